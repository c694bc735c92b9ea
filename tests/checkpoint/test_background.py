"""Background saves own what they write, and leave training its time. Cases K57 and K67."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.checkpoint import background, storage
from fsdplite.checkpoint.safetensors_file import CHUNK_BYTES
from tests.harness import Vec, expect_loud, here, plain, run

from .faults import Fault, FaultyFileSystem
from .parts import filled, values_in
from .reader import manifest_of, read


def K57_body(root, stage):
    model = fsdp.fsdp_wrap(Vec(9, 1.0, torch.float32), stage=stage)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(1.0).backward()
    like = plain(model.w)
    for state in [optimizer.state[model.w]]:
        state.update(step=torch.tensor(3.0), exp_avg=torch.ones_like(like), exp_avg_sq=torch.ones_like(like))
    extra = {"epoch": [1], "t": torch.tensor([5])}
    per_rank = {"pos": torch.tensor([7])}
    with storage.using(FaultyFileSystem(Fault("slow", 1, 0.4), only=lambda name, path: name == "create")):
        handle = fsdp.save_checkpoint(root, model, optimizer, step=1, extra=extra, per_rank=per_rank, background=True)
        assert not handle.done and fsdp.latest_step(root) is None
        with torch.no_grad():
            model.w.add_(1)
            for tensor in optimizer.state[model.w].values():
                tensor.add_(1)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 9.0
        extra["epoch"][0] = 2
        extra["t"].fill_(6)
        per_rank["pos"].fill_(8)
        handle.wait()
    assert handle.done
    model = fsdp.fsdp_wrap(Vec(9, 0.0, torch.float32), stage=stage)
    optimizer = torch.optim.Adam(model.parameters())
    report = fsdp.load_checkpoint(root, model, optimizer)
    state = optimizer.state[model.w]
    assert set(plain(model.w).tolist()) <= {1.0}
    assert set(state["exp_avg"].tolist()) | set(state["exp_avg_sq"].tolist()) <= {1.0}
    assert state["step"].item() == 3.0 and optimizer.param_groups[0]["lr"] == 0.5
    assert report.extra["epoch"] == [1] and report.extra["t"].item() == 5 and report.per_rank["pos"].item() == 7


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_K57_later_changes_do_not_leak_in(tmp_path, world_size):
    for stage in range(4):
        run(world_size, K57_body, str(tmp_path / str(stage)), stage)
        assert values_in_model(tmp_path / str(stage) / "step-1") == {1.0}


def values_in_model(folder):
    return {x for name, t in read(folder).items() if name.startswith(("w", "optimizer/")) for x in t.tolist()}


def staging_is_reused(root):
    """Several saves of one size, one after the other, without waiting: each has its own values."""
    model, optimizer = filled(0.0, 1001)
    for step in range(1, 6):
        with torch.no_grad():
            model.w.fill_(float(step))
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[model.w][key].fill_(float(step))
        handle = fsdp.save_checkpoint(root, model, optimizer, step=step, background=True, keep=4)
    handle.wait()


def test_saves_in_a_row(tmp_path):
    run(2, staging_is_reused, str(tmp_path))
    assert [c.step for c in fsdp.list_checkpoints(tmp_path)] == [2, 3, 4, 5]
    for step in range(2, 6):
        assert values_in(tmp_path / f"step-{step}") == {float(step)}


class Many(nn.Module):
    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.ps = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(count)])

    def forward(self, x):
        return sum((p * x).sum() for p in self.ps)


@pytest.mark.parametrize("count", [10, 2000])
def test_K67_file_system_calls_grow_with_bytes(tmp_path, count):
    numel = 16 * 2**20 // count
    model = Many(count, numel)
    with storage.using(FaultyFileSystem()) as fs:
        fsdp.save_checkpoint(tmp_path, model, step=1)
    assert fs.count <= count + 4 * count * numel / CHUNK_BYTES + 50
    assert fs.count < 120, "and far below: data go in blocks"
    with storage.using(FaultyFileSystem()) as fs:
        fsdp.load_checkpoint(tmp_path, model)
    assert fs.count < 120


SCRIPT = """
import sys, torch
import fsdplite as fsdp
from fsdplite.checkpoint import background, storage
sys.path.insert(0, {here!r})
from tests.checkpoint.faults import Fault, FaultyFileSystem
model = torch.nn.Linear(3, 3)
fault = Fault({kind!r}, 1, {detail!r})
with storage.using(FaultyFileSystem(fault, only=lambda name, path: name == "create")):
    fsdp.save_checkpoint({root!r}, model, step=1, background=True)
print("end of the program")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind,detail", [("slow", 1.0), ("fail", 28)])
def test_the_writer_is_drained_at_exit(tmp_path, kind, detail):
    source = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    code = SCRIPT.format(here=source, root=str(tmp_path), kind=kind, detail=detail)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "end of the program" in done.stdout
    if kind == "slow":
        assert fsdp.latest_step(tmp_path) == 1 and fsdp.verify_checkpoint(tmp_path / "step-1").ok
    else:
        assert "errno 28" in done.stderr and "rank-0-of-1" in done.stderr and fsdp.latest_step(tmp_path) is None


def training_goes_on(root):
    """A save in flight does not disturb the collectives of training, whatever the ranks do meanwhile."""
    from tests.harness import MLP, local_batch, mse

    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with storage.using(FaultyFileSystem(Fault("slow", 1, 0.5), only=lambda name, path: name == "create")):
        handle = fsdp.save_checkpoint(root, model, optimizer, step=1, background=True)
        for step in range(20):
            optimizer.zero_grad()
            mse(model, local_batch(step, here.rank)).backward()
            optimizer.step()
            time.sleep(0.02)
        handle.wait()
    assert manifest_of(os.path.join(root, "step-1"))["world_size"] == 2
    expect_loud(lambda: fsdp.save_checkpoint(root, model, step=-1), "step")


def test_training_goes_on_during_a_save(tmp_path):
    run(2, training_goes_on, str(tmp_path))


def test_threads_of_a_program_save_at_the_same_time(tmp_path, monkeypatch):
    class Thread(threading.Thread):
        def start(self) -> None:
            background.settle()  # another thread's save waits for those in flight at this very moment
            super().start()

    monkeypatch.setattr(background.threading, "Thread", Thread)
    model, optimizer = filled(1.0, wrap=False)
    for step in (1, 2):
        fsdp.save_checkpoint(tmp_path, model, optimizer, step=step, background=True)
    background.drain()
    assert [c.step for c in fsdp.list_checkpoints(tmp_path)] == [1, 2]
