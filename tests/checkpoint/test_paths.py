"""What a path may be in each call, and what is said about one that is something else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import Vec, expect_loud, run

from .parts import filled, values_in


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 5 and 10, with 5.0 and 10.0 in every parameter."""
    for step in (5, 10):
        fsdp.save_checkpoint(tmp_path / "runs" / "k", Vec(4, float(step)), step=step)
    return tmp_path / "runs" / "k"


def loaded(path, **options):
    model = Vec(4, 0.0)
    report = fsdp.load_checkpoint(path, model, **options)
    assert set(model.w.tolist()) == {float(report.step)}
    return report.step


def refused(path, *needles, **options):
    model = Vec(4, 0.0)
    text = expect_loud(lambda: fsdp.load_checkpoint(path, model, **options), *needles)
    assert set(model.w.tolist()) == {0.0}
    return text


def test_a_step_stands_for_itself(root):
    assert loaded(root) == loaded(root / "step-10") == 10
    assert loaded(root / "step-5") == loaded(root / "step-5", step=5) == 5
    assert loaded(fsdp.list_checkpoints(root)[0].path) == 5
    refused(root / "step-5", "step 10", "step 5", str(root), step=10)
    assert fsdp.latest_step(root / "step-5") == 5
    assert [c.path for c in fsdp.list_checkpoints(root / "step-5")] == [str(root / "step-5")]
    shutil.copytree(root / "step-5", root.parent / "best")
    assert loaded(root.parent / "best") == 5
    shutil.copytree(root / "step-5", root / "step-7")  # not what its name says
    refused(root / "step-7", "its manifest is of step 5")
    assert fsdp.latest_step(root / "step-7") is None
    expect_loud(lambda: fsdp.save_checkpoint(root / "step-5", Vec(4, 1.0), step=6), "of step 5", str(root))
    assert fsdp.verify_checkpoint(root / "step-5").ok


def test_a_root_stands_for_its_latest_step(root, tmp_path):
    result = fsdp.verify_checkpoint(root)
    assert result.ok and result.path == str(root / "step-10") and result.bytes_checked == 4 * 8
    fsdp.export_safetensors(root, tmp_path / "out")
    model = Vec(4, 0.0)
    report = fsdp.load_safetensors(model, tmp_path / "out")
    assert set(model.w.tolist()) == {10.0} and report.step is None


def test_a_step_that_is_not_there_and_one_that_is_not_complete(root):
    text = refused(root, "step 7 is not published", "steps 5, 10", "step=", step=7)
    assert "is there" not in text and "complete" not in text
    (root / "step-7").mkdir()
    refused(root, "step-7 is there, and empty", "steps 5, 10", step=7)
    (root / "step-7" / "rank-0-of-2.safetensors").write_bytes(b"")
    refused(root, "step-7 is there, without a manifest", "steps 5, 10", step=7)
    (root / "step-10" / "rank-0-of-1.safetensors").unlink()
    refused(root, "step-10 is there, and is not complete", "rank-0-of-1.safetensors is missing", step=10)
    refused(root / "step-10", "not complete", "rank-0-of-1.safetensors is missing", str(root))
    assert loaded(root) == 5


def test_places_without_a_checkpoint(root, tmp_path):
    """Each says what lies there, and what to give instead."""
    fsdp.export_safetensors(root / "step-5", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "failed" / "step-3").mkdir(parents=True)
    (tmp_path / "died" / (".step-3." + 16 * "0" + ".saving")).mkdir(parents=True)
    told = {
        root.parent / "kk": ("no such directory", "did you mean 'k'"),
        root / "step-6": ("no such directory", f"steps in {root} are 5, 10"),
        root / "latest": ("no such directory", f"give the root, {root}: its latest step, 10,"),
        root / "a" / "b": ("no such directory", f"give the root, {root}: "),
        root / "step-5" / "model": ("no such directory", f"give the checkpoint itself, {root / 'step-5'}"),
        root.parent / "other": ("no such directory", f"in {root.parent} there are {root}"),
        tmp_path / "empty": ("is empty",),
        tmp_path / "notes": ("a.txt", "no step-<n>"),
        tmp_path / "out": ("weights alone", "load_safetensors"),
        tmp_path / "failed": ("step-3 is there, and empty", "fsdplite ckpt ls"),
        tmp_path / "died": ("failed, or is in flight",),
        root.parent: ("no step-<n>", str(root)),
    }
    files = {
        tmp_path / "notes" / "a.txt": ("this is a file",),
        tmp_path / "out" / "model.safetensors": ("this is a file", "load_safetensors"),
        root / "step-5" / "manifest.json": ("this is a file", str(root / "step-5")),
    }
    for path, needles in (told | files).items():
        text = refused(path, "there is no published checkpoint here", *needles)
        assert "failed to" not in text, text
        refused(path, "step 7 is not published" if path in told else "this is a file", step=7)
        problem = fsdp.verify_checkpoint(path).problems[0]
        assert all(needle in str(problem) for needle in needles), problem
        expect_loud(lambda: fsdp.export_safetensors(path, tmp_path / "new"), *needles)
        assert not (tmp_path / "new").exists()
    for path in told:
        assert fsdp.latest_step(path) is None and fsdp.list_checkpoints(path) == []
    for path in files:
        expect_loud(lambda: fsdp.latest_step(path), "a file", str(path))


def test_places_without_weights(root, tmp_path):
    for path, needles in {
        root: ("root of checkpoints", f'load_checkpoint("{root}", model)'),
        root / "step-5": ("is a checkpoint", "load_checkpoint"),
        tmp_path / "org" / "model": ("no such folder", str(tmp_path / "org" / "model")),
    }.items():
        text = expect_loud(lambda: fsdp.load_safetensors(Vec(4, 0.0), path), *needles)
        assert "failed to" not in text, text


def step_on_all_ranks(root):
    model, optimizer = filled(1.0)
    assert fsdp.load_checkpoint(os.path.join(root, "step-1"), model, optimizer).step == 1
    expect_loud(lambda: fsdp.load_checkpoint(os.path.join(root, "none"), model, optimizer), "no such directory")


def test_all_ranks_hear_the_same(tmp_path):
    model, optimizer = filled(2.0)
    fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert 2.0 in values_in(tmp_path / "step-1")
    run(2, step_on_all_ranks, str(tmp_path))


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16])
def test_dtypes_of_an_export_by_word(root, tmp_path, dtype):
    from safetensors.torch import load_file

    fsdp.export_safetensors(root, tmp_path / "out", dtype=dtype)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bf61", "int8", torch.int32, float, torch.float8_e4m3fn])
def test_dtypes_that_an_export_refuses(root, tmp_path, dtype):
    text = expect_loud(lambda: fsdp.export_safetensors(root, tmp_path / "out", dtype=dtype), "torch.bfloat16", "'bf16'")
    assert ("did you mean 'bf16'" in text) is (dtype == "bf61")
    assert not (tmp_path / "out").exists()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_export_in_plain_torch(tmp_path):
    """As docs/checkpoints.md says."""
    from safetensors.torch import load_file, load_model

    saved = Tied()
    fsdp.export_safetensors(fsdp.save_checkpoint(tmp_path, saved, step=1).path, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    one, other = Tied(), Tied()
    load_model(one, file)
    assert other.load_state_dict(load_file(file), strict=False).missing_keys == ["head.weight"]
    for model in (one, other):
        assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, saved.head.weight)
