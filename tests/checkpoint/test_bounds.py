"""Memory, bytes and files have bounds. Cases K01, K104, K105."""

from __future__ import annotations

import os
import resource
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdplite as fsdp
from fsdplite.checkpoint import storage
from fsdplite.inspect import units
from tests.harness import Vec, here, run

from .faults import FaultyFileSystem
from .reader import manifest_of
from .test_background import Many

MIB = 2**20


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not func.is_view:
                self.largest = max(self.largest, value.numel() * value.element_size())
        return result


class Resident:
    """Growth of this process's resident memory inside the block, at its highest."""

    def __enter__(self):
        self._stop = threading.Event()
        self._before = self._now()
        self.peak = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _now(self) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self._now() - self._before)

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()


def K01_body(root, numel, background):
    model = fsdp.fsdp_wrap(Vec(numel, 1.0, torch.float32))
    shard = units(model)[0].flats[0].shard_numel * 4
    fsdp.save_checkpoint(root, fsdp.fsdp_wrap(Vec(8, 1.0)), step=0)  # what is imported and set up once
    with Resident() as resident, Allocations() as allocations:
        fsdp.save_checkpoint(root, model, step=1, background=background).wait()
    return shard, resident.peak, allocations.largest


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc, to read resident memory from")
@pytest.mark.parametrize("background", [False, True])
def test_K01_saving_does_not_gather(tmp_path, background):
    for numel in (16 * MIB, 32 * MIB):
        for shard, peak, largest in run(4, K01_body, str(tmp_path), numel, background, fresh=True, timeout_s=60):
            assert peak <= 1.25 * shard and largest <= shard, (shard, peak, largest)
            if not background:
                assert peak <= 12 * MIB and largest < MIB


def load_memory(root, numel):
    model = fsdp.fsdp_wrap(Vec(numel, 0.0, torch.float32))
    fsdp.save_checkpoint(root, model, step=1)
    with Resident() as resident, Allocations() as allocations:
        fsdp.load_checkpoint(root, model)
    return resident.peak, allocations.largest


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc, to read resident memory from")
def test_a_load_needs_one_block(tmp_path):
    for peak, largest in run(2, load_memory, str(tmp_path), 16 * MIB, fresh=True, timeout_s=60):
        assert peak <= 12 * MIB and largest < MIB


def K104_body(root):
    model = fsdp.fsdp_wrap(Many(2000, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(1.0).backward()
    optimizer.step()
    most = 0
    watching = threading.Event()

    def watch():
        nonlocal most
        while not watching.wait(0.002):
            most = max(most, len(os.listdir(root)))

    thread = threading.Thread(target=watch)
    thread.start()
    with storage.using(FaultyFileSystem()) as fs:
        fsdp.save_checkpoint(root, model, optimizer, step=1)
    watching.set()
    thread.join()
    assert fs.most_open == 1 and most <= 1


@pytest.mark.slow
def test_K104_few_files(tmp_path):
    run(4, K104_body, str(tmp_path), timeout_s=60)
    names = sorted(os.listdir(tmp_path / "step-1"))
    assert names == ["manifest.json", *(f"rank-{r}-of-4.safetensors" for r in range(4))]
    assert len(manifest_of(tmp_path / "step-1")["tensors"]) == 6000


class Layers(nn.Module):
    """64 MiB of fp32 in two units' worth of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.ls = nn.ModuleList([Vec(n, 1.0, torch.float32) for n in (7_000_001, 4_000_003, 5_777_212)])

    def forward(self, c):
        return sum(layer(c) for layer in self.ls)


def build(value=1.0):
    model = fsdp.fsdp_wrap(Layers(), fsdp.by_class(Vec))
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(1.0)}
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key] = torch.full((p.numel(),), value)
    return model, optimizer


def K105_save(root):
    model, optimizer = build()
    fsdp.save_checkpoint(root, model, optimizer, step=1)


def K105_load(root, saved_on):
    model, optimizer = build(2.0)
    own = sum(p.numel() for p in model.parameters()) * 3 * 4
    with storage.using(FaultyFileSystem()) as fs:
        report = fsdp.load_checkpoint(root, model, optimizer)
    assert all(bool((t == 1).all()) for p in model.parameters() for t in optimizer.state[p].values())
    assert own <= report.bytes_read <= 1.05 * own
    headers = 0
    for name in fs.opened() - {"manifest.json"}:
        with open(os.path.join(root, "step-1", name), "rb") as file:
            headers += 8 + int.from_bytes(file.read(8), "little")
    assert sum(n for name, n in fs.bytes_read.items() if name != "manifest.json") == report.bytes_read + headers
    if saved_on == here.world_size:
        assert fs.opened() == {"manifest.json", f"rank-{here.rank}-of-{saved_on}.safetensors"}
    return report.bytes_read / own


@pytest.mark.parametrize("n,m", [(4, 4), (1, 4), (4, 3)])
def test_K105_a_rank_reads_what_it_needs(tmp_path, n, m):
    run(n, K105_save, str(tmp_path), timeout_s=90)
    ratios = run(m, K105_load, str(tmp_path), n, timeout_s=90)
    assert max(ratios) <= 1.05, ratios


def export_and_import(root):
    model = Vec(24 * MIB, 1.0, torch.float32)
    fsdp.save_checkpoint(root, model, step=1)
    fsdp.save_checkpoint(root, Vec(8, 1.0, torch.float32), step=2)
    fsdp.export_safetensors(f"{root}/step-2", f"{root}/small", dtype=torch.bfloat16)  # what is set up once
    peaks = []
    with Resident() as resident, Allocations() as allocations:
        fsdp.export_safetensors(f"{root}/step-1", f"{root}/hf", dtype=torch.bfloat16)
    peaks += [resident.peak, allocations.largest]
    with Resident() as resident, Allocations() as allocations:
        fsdp.load_safetensors(model, f"{root}/hf")
    assert bool((model.w == 1).all())
    return peaks + [resident.peak, allocations.largest]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc, to read resident memory from")
def test_export_and_import_need_blocks(tmp_path):
    (peaks,) = run(1, export_and_import, str(tmp_path), fresh=True, group=False, timeout_s=60)
    assert max(peaks) <= 40 * MIB, peaks  # of 96 MiB; the allocator keeps some
