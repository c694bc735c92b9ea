"""Roots at an fsspec URL: the manifest is the commit there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import fsdplite as fsdp
from fsdplite.checkpoint.remote import RemoteFileSystem
from tests.harness import Vec, expect_loud, gather, here, run

from .parts import filled, values_in
from .reader import read


def save_and_load(root):
    model, optimizer = filled(1.0, 11)
    fsdp.save_checkpoint(root, model, optimizer, step=1, extra={"t": torch.tensor(here.world_size)}, per_rank=here.rank)
    fsdp.save_checkpoint(root, model, optimizer, step=2, background=True).wait()
    other, its = filled(2.0, 11)
    report = fsdp.load_checkpoint(root, other, its, step=1)
    assert (report.extra["t"].item(), report.per_rank) == (here.world_size, here.rank)
    return gather(other)["w"].tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_local_protocol(tmp_path, world_size):
    root = f"file://{tmp_path}/run"
    assert run(world_size, save_and_load, root) == [[1.0] * 11] * world_size
    assert [c.step for c in fsdp.list_checkpoints(root)] == [1, 2] and fsdp.latest_step(root) == 2
    assert fsdp.verify_checkpoint(f"{root}/step-2").ok
    assert values_in(tmp_path / "run" / "step-2") == {1.0}
    assert set(read(tmp_path / "run" / "step-1")) >= {"w", "optimizer/w/exp_avg"}
    fsdp.export_safetensors(f"{root}/step-2", tmp_path / "hf")
    model = Vec(11, 0.0, torch.float32)
    fsdp.load_safetensors(model, f"file://{tmp_path}/hf")
    assert set(model.w.tolist()) == {1.0}


def test_one_file_at_a_url(tmp_path):
    fsdp.save_checkpoint(f"file://{tmp_path}/run", Vec(11, 3.0, torch.float32), step=1)
    fsdp.export_safetensors(f"file://{tmp_path}/run", tmp_path / "hf")
    model = Vec(11, 0.0, torch.float32)
    fsdp.load_safetensors(model, f"file://{tmp_path}/hf/model.safetensors")
    assert set(model.w.tolist()) == {3.0}


@pytest.mark.parametrize("torn", [b"", b'{"crc32": "0012'])
def test_a_torn_step_at_a_url_is_saved_again(tmp_path, torn):
    """Where closing a file is not atomic, a crash leaves part of a manifest."""
    root = f"file://{tmp_path}"
    fsdp.save_checkpoint(root, Vec(11, 1.0), step=1)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "rank-0-of-1.safetensors").write_bytes(b"torn")
    (tmp_path / "step-2" / "manifest.json").write_bytes(torn)
    assert fsdp.latest_step(root) == 1
    fsdp.save_checkpoint(root, Vec(11, 2.0), step=2)
    assert fsdp.latest_step(root) == 2 and values_in(tmp_path / "step-2") == {2.0}


def test_a_path_object_cannot_hold_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path("memory://run"), Path("s3://bucket/run")):
        expect_loud(lambda: fsdp.save_checkpoint(path, Vec(11, 1.0), step=1), "slash", "as text")
    assert not os.listdir(tmp_path)


class Failing(RemoteFileSystem):
    at = 0
    count = 0

    def write_at(self, file, offset, data):
        Failing.count += 1
        if Failing.count == Failing.at:
            raise OSError(28, "No space left on device", file.path)
        return super().write_at(file, offset, data)


def test_in_memory(monkeypatch):
    import fsspec

    root = "memory://checkpoints/run"
    model, optimizer = filled(1.0, wrap=False)
    for step in (1, 2, 3):
        fsdp.save_checkpoint(root, model, optimizer, step=step, keep=2)
    assert [c.step for c in fsdp.list_checkpoints(root)] == [2, 3]
    assert fsspec.filesystem("memory").find("/checkpoints/run/step-1") == []
    text = expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=3), "step 3", "published already")
    assert "memory://checkpoints/run/step-3" in text and fsdp.verify_checkpoint(f"{root}/step-3").ok

    monkeypatch.setattr("fsdplite.checkpoint.remote.RemoteFileSystem", Failing)
    for Failing.at in range(1, 20):
        Failing.count = 0
        other, its = filled(2.0, wrap=False)
        try:
            fsdp.save_checkpoint(root, other, its, step=4)
        except fsdp.CheckpointError as problem:
            assert "errno 28" in str(problem) and fsdp.latest_step(root) == 3
        else:
            break
    assert 2 < Failing.at < 10 and fsdp.latest_step(root) == 4
    Failing.at = 0
    fs = fsspec.filesystem("memory")
    fs.pipe("/checkpoints/run/step-9/rank-0-of-1.safetensors", b"left by a save that died")
    assert fsdp.latest_step(root) == 4
    fsdp.save_checkpoint(root, model, optimizer, step=5)
    assert not fs.exists("/checkpoints/run/step-9/rank-0-of-1.safetensors")
    model, optimizer = filled(7.0, wrap=False)
    assert fsdp.load_checkpoint(root, model, optimizer, step=4).step == 4 and set(model.w.tolist()) == {2.0}
    expect_loud(lambda: fsdp.export_safetensors(f"{root}/step-4", "memory://x"), "memory://x")
    expect_loud(lambda: fsdp.save_checkpoint("nosuch://x", model, step=1), "nosuch://x", "fsspec")
    assert os.path.exists("nosuch:") is False
