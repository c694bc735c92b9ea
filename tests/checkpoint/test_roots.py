"""Strangers in a root: what people, and other jobs, put where checkpoints are."""

from __future__ import annotations

import os
import warnings

import pytest

import fsdplite as fsdp
from tests.harness import Vec

LEFTOVER = ".step-7.0123456789abcdef.saving"


def save(root, step, value=None, **options):
    return fsdp.save_checkpoint(root, Vec(4, float(step if value is None else value)), step=step, **options)


def loaded(root, **options):
    model = Vec(4, -1.0)
    report = fsdp.load_checkpoint(root, model, **options)
    return report.step, set(model.w.tolist())


def test_folders_in_a_step_do_not_stop_later_saves(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    save(root, 5)
    fsdp.export_safetensors(root / "step-5", root / "step-5" / "hf")
    (root / "step-5" / "hf" / "link").symlink_to(elsewhere)
    save(root, 5, 6.0)
    assert os.listdir(root) == ["step-5"] and loaded(root) == (5, {6.0})
    (root / "step-5" / "deep" / "er").mkdir(parents=True)
    (root / "step-5" / "deep" / "er" / "x").write_text("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(root, 6, keep=1)
    assert os.listdir(root) == ["step-6"] and os.listdir(elsewhere) == ["mine"]


def test_what_looks_like_a_leftover(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    for kind in ("folder", "file", "link"):
        root = tmp_path / kind
        save(root, 3)
        if kind == "folder":
            (root / LEFTOVER / "sub").mkdir(parents=True)
            save(root, 4)
            assert sorted(os.listdir(root)) == ["step-3", "step-4"]
            continue
        if kind == "file":
            (root / LEFTOVER).write_text("mine")
        else:
            (root / LEFTOVER).symlink_to(elsewhere)
        with pytest.warns(UserWarning, match=LEFTOVER):
            save(root, 4)
        assert sorted(os.listdir(root)) == [LEFTOVER, "step-3", "step-4"] and loaded(root) == (4, {4.0})
    assert os.listdir(elsewhere) == ["mine"]
