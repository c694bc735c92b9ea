"""Steps of AdamW with state in files, beside what the disk and the processor can do.

The disk, the update alone and the step are measured in turns, and compared within a round: a disk that others use too
is faster at one time than at another.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fsdplite as fsdp

from .disk import THREADS, Disk, RawRate

WIDTH = 2048


@dataclass
class Round:
    """One round. Seconds.

    Attributes:
        raw: The disk's rates.
        step_s: A step with state in files.
        update_s: The update alone: a step with state in memory.
        busy_read_s, busy_write_s, busy_update_s: How long reads, writes and updates ran within the step.
    """

    raw: RawRate
    step_s: float
    update_s: float
    moved_bytes: int
    busy_read_s: float
    busy_write_s: float
    busy_update_s: float

    @property
    def share_of_raw(self) -> float:
        """Of the rate at which the disk reads and writes at once."""
        return self.moved_bytes / self.step_s / self.raw.both

    @property
    def longest_s(self) -> float:
        return max(self.busy_read_s, self.busy_write_s, self.busy_update_s)

    @property
    def sum_s(self) -> float:
        return self.busy_read_s + self.busy_write_s + self.busy_update_s


@dataclass
class Found:
    """All rounds of one case."""

    numel: int
    is_direct: bool
    rounds: list[Round]

    def median(self, of: Any) -> float:
        return statistics.median(of(r) for r in self.rounds)


def _optimizer(offload: fsdp.Offload, numel: int, fused: bool) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, numel // WIDTH**2))))
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), offload=offload)
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=1e-4, fused=fused)
    with torch.no_grad():
        for parameter in model.parameters():  # a disk behind which somebody compresses must find nothing to compress
            parameter.grad = torch.randn(parameter.numel())
    for _ in range(2):  # the first makes the state, the second writes where nothing was written
        optimizer.step()
    return optimizer


def _seconds(call: Any) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def measure(folder: str, numel: int, rounds: int, buffer_bytes: int, buffers: int, fused: bool) -> Found:
    """One case, in this process. Takes 16 bytes of disk and 24 bytes of memory per parameter."""
    disk = Disk(folder, 2 * 4 * WIDTH**2, max(1, numel // WIDTH**2), min(buffer_bytes, 4 * WIDTH**2))
    files = fsdp.Offload(optimizer="nvme", path=folder, buffer_bytes=buffer_bytes, buffers=buffers)
    stepping = _optimizer(files, numel, fused)
    updating = _optimizer(fsdp.Offload(optimizer="cpu", buffer_bytes=buffer_bytes), numel, fused)
    found = Found(numel, disk.is_direct, [])
    try:
        for _ in range(rounds):
            raw, step_s, update_s = disk.measure(), _seconds(stepping.step), _seconds(updating.step)
            report = stepping.last_step
            moved = report.read_bytes + report.written_bytes
            busy = report.read_s / THREADS, report.write_s / THREADS, report.update_s
            found.rounds.append(Round(raw, step_s, update_s, moved, *busy))
    finally:
        stepping.close()
        disk.close()
    return found


def as_lines(found: Found) -> list[str]:
    """For a person: medians over rounds, and of ratios the quartiles."""
    gb = 1e9
    moved = found.rounds[0].moved_bytes

    def middle(of: Any) -> str:
        return f"{found.median(of):.2f}"

    def spread(of: Any) -> str:
        values = sorted(of(r) for r in found.rounds)
        low, high = values[len(values) // 4], values[-1 - len(values) // 4]
        return f"{statistics.median(values):.2f} ({low:.2f}-{high:.2f})"

    return [
        f"{found.numel / 1e6:.0f}M parameters, AdamW moments in files: {moved / gb:.2f} GB moved a step"
        + ("" if found.is_direct else " (through the page cache: rates are those of memory)"),
        f"  disk alone, GB/s     read {middle(lambda r: r.raw.read / gb)}, write {middle(lambda r: r.raw.write / gb)}, "
        f"both at once {middle(lambda r: r.raw.both / gb)}",
        f"  step                 {middle(lambda r: r.step_s)} s, {middle(lambda r: moved / r.step_s / gb)} GB/s; "
        f"share of the disk's rate for both at once: {spread(lambda r: r.share_of_raw)}",
        f"  busy within a step   read {middle(lambda r: r.busy_read_s)}, write {middle(lambda r: r.busy_write_s)}, "
        f"update {middle(lambda r: r.busy_update_s)} s; step over the longest: {spread(lambda r: r.step_s / r.longest_s)}, "
        f"over their sum: {spread(lambda r: r.step_s / r.sum_s)}",
        f"  update alone         {middle(lambda r: r.update_s)} s (state in memory)",
    ]
