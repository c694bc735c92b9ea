"""Steps of AdamW with state in files, beside what the disk and the processor can do.

The disk, the update alone and the step are measured in turns, the disk before and after each step, and compared within
a round: a disk that others use too is faster at one time than at another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fsdplite as fsdp

from .disk import THREADS, Disk, RawRate

WIDTH = 2048
MOMENTS = 2


@dataclass
class Round:
    """One round. Seconds.

    Attributes:
        raw: The disk's rates, before the step.
        raw_after: Of both directions at once, after it.
        step_s: A step with state in files.
        update_s: The update alone: a step with state in memory.
        busy_read_s, busy_write_s, busy_update_s: How long reads, writes and updates ran within the step.
        backward_s, in_backward_s: Backward and step, one after the other, and with updates in backward.
    """

    raw: RawRate
    raw_after: float
    step_s: float
    update_s: float
    moved_bytes: int
    busy_read_s: float
    busy_write_s: float
    busy_update_s: float
    backward_s: float | None
    in_backward_s: float | None

    @property
    def raw_both(self) -> float:
        """Rate of the disk around the step."""
        return (self.raw.both + self.raw_after) / 2

    @property
    def share_of_raw(self) -> float:
        """Of the rate at which the disk reads and writes at once."""
        return self.moved_bytes / self.step_s / self.raw_both

    @property
    def busy(self) -> tuple[float, float, float]:
        return self.busy_read_s, self.busy_write_s, self.busy_update_s

    @property
    def alone(self) -> tuple[float, float, float]:
        """Reading, writing and updating, each by itself."""
        return self.moved_bytes / 2 / self.raw.read, self.moved_bytes / 2 / self.raw.write, self.update_s


@dataclass
class Found:
    """All rounds of one case."""

    numel: int
    is_direct: bool
    rows: int
    rounds: list[Round]

    def median(self, of: Any) -> float:
        return statistics.median(of(r) for r in self.rounds)


def _model(offload: fsdp.Offload, numel: int) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, numel // WIDTH**2))))
    return fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), offload=offload)


def _stepping(offload: fsdp.Offload, numel: int, fused: bool) -> Any:
    """An optimizer whose step is measured alone, with gradients that stay."""
    model = _model(offload, numel)
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=1e-4, fused=fused)
    with torch.no_grad():
        for parameter in model.parameters():  # a disk behind which somebody compresses must find nothing to compress
            parameter.grad = torch.randn(parameter.numel())
    for _ in range(2):  # the first makes the state, the second writes where nothing was written
        optimizer.step()
    return optimizer


def _training(offload: fsdp.Offload, numel: int, fused: bool, rows: int, in_backward: bool) -> tuple[Any, Callable]:
    """An optimizer, and a call that takes a step and returns the seconds of its backward and update."""
    model = _model(offload, numel)
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=1e-4, fused=fused, in_backward=in_backward)

    def step() -> float:
        loss = model(torch.randn(rows, WIDTH)).square().mean()
        before = time.perf_counter()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - before

    for _ in range(2):
        step()
    return optimizer, step


def _seconds(call: Any) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def measure(folder: str, numel: int, rounds: int, buffer_bytes: int, buffers: int, fused: bool, rows: int) -> Found:
    """One case, in this process.

    Args:
        rows: Of a batch, for updates in backward; 0: those are left out.

    Memory: 16 bytes of disk and 24 of memory per parameter, and as much again for updates in backward.
    """
    units = max(1, numel // WIDTH**2)
    disk = Disk(folder, units, 4 * WIDTH**2, MOMENTS, buffer_bytes, buffers)
    files = fsdp.Offload(optimizer="nvme", path=folder, buffer_bytes=buffer_bytes, buffers=buffers)
    stepping = _stepping(files, numel, fused)
    updating = _stepping(fsdp.Offload(optimizer="cpu", buffer_bytes=buffer_bytes), numel, fused)
    training = [_training(files, numel, fused, rows, early) for early in (False, True)] if rows else []
    moved = 2 * MOMENTS * 4 * units * WIDTH**2
    found = Found(units * WIDTH**2, disk.is_direct, rows, [])
    try:
        for _ in range(rounds):
            raw, step_s = disk.measure(), _seconds(stepping.step)
            report = stepping.last_step
            raw_after, update_s = moved / disk.both(), _seconds(updating.step)
            busy = report.read_s / THREADS, report.write_s / THREADS, report.update_s
            backward_s = [step() for _, step in training] or [None, None]
            moved_bytes = report.read_bytes + report.written_bytes
            found.rounds.append(Round(raw, raw_after, step_s, update_s, moved_bytes, *busy, *backward_s))
    finally:
        for optimizer in (stepping, updating, *(optimizer for optimizer, _ in training)):
            optimizer.close()
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

    def three(times: Callable[[Round], tuple[float, float, float]]) -> str:
        read, write, update = (middle(lambda r, i=i: times(r)[i]) for i in range(3))
        longest, total = spread(lambda r: r.step_s / max(times(r))), spread(lambda r: r.step_s / sum(times(r)))
        return f"read {read}, write {write}, update {update} s; step over the longest {longest}, over their sum {total}"

    lines = [
        f"{found.numel / 1e6:.0f}M parameters, AdamW moments in files: {moved / gb:.2f} GB moved a step"
        + ("" if found.is_direct else " (through the page cache: rates are those of memory)"),
        f"  disk alone, GB/s     read {middle(lambda r: r.raw.read / gb)}, write {middle(lambda r: r.raw.write / gb)}, "
        f"both at once {middle(lambda r: r.raw_both / gb)}; after over before the step: "
        f"{spread(lambda r: r.raw_after / r.raw.both)}",
        f"  step                 {middle(lambda r: r.step_s)} s, {middle(lambda r: moved / r.step_s / gb)} GB/s; "
        f"share of the disk's rate for both at once: {spread(lambda r: r.share_of_raw)}",
        f"  busy within a step   {three(lambda r: r.busy)}",
        f"  each by itself       {three(lambda r: r.alone)}",
    ]
    if found.rows:
        lines.append(
            f"  backward and step    {middle(lambda r: r.backward_s)} s one after the other ({found.rows} rows), with "
            f"in_backward {middle(lambda r: r.in_backward_s)} s: {spread(lambda r: r.in_backward_s / r.backward_s)}"
        )
    return lines
