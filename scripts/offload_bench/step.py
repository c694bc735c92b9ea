"""Steps of AdamW with state in files, beside what the disk and the processor can do.

The disk is measured before and after each step and compared with it within a round: a disk that others use too is faster
at one time than at another. One optimizer is there at a time, as in training; the update alone, and updates in backward
beside those after it, are measured by themselves.
"""

from __future__ import annotations

import contextlib
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
        busy_read_s, busy_write_s, busy_update_s: How long reads, writes and updates ran within the step.
    """

    raw: RawRate
    raw_after: float
    step_s: float
    moved_bytes: int
    busy_read_s: float
    busy_write_s: float
    busy_update_s: float

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


@dataclass
class Found:
    """All rounds of one case. Seconds.

    Attributes:
        update_s: Of updates alone: steps with state in memory.
        backward_s: Of backward and step, one after the other and with updates in backward, in turns.
    """

    numel: int
    is_direct: bool
    rows: int
    rounds: list[Round]
    update_s: list[float]
    backward_s: list[tuple[float, float]]

    def alone(self, one: Round) -> tuple[float, float, float]:
        """Reading, writing and updating, each by itself."""
        moved = one.moved_bytes / 2
        return moved / one.raw.read, moved / one.raw.write, statistics.median(self.update_s)

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

    Memory: 16 bytes of disk and of memory per parameter.
    """
    units = max(1, numel // WIDTH**2)
    files = fsdp.Offload(optimizer="nvme", path=folder, buffer_bytes=buffer_bytes, buffers=buffers)
    found = Found(units * WIDTH**2, False, rows, [], [], [])
    disk = Disk(folder, units, 4 * WIDTH**2, MOMENTS, buffer_bytes, buffers)
    found.is_direct = disk.is_direct
    with contextlib.closing(disk), contextlib.closing(_stepping(files, numel, fused)) as stepping:
        for _ in range(rounds):
            found.rounds.append(_round(disk, stepping))
    host = fsdp.Offload(optimizer="cpu", buffer_bytes=buffer_bytes)
    with contextlib.closing(_stepping(host, numel, fused)) as updating:
        found.update_s += [_seconds(updating.step) for _ in range(rounds)]
    if rows:
        after, step_after = _training(files, numel, fused, rows, False)
        early, step_early = _training(files, numel, fused, rows, True)
        with contextlib.closing(after), contextlib.closing(early):
            found.backward_s += [(step_after(), step_early()) for _ in range(rounds)]
    return found


def _round(disk: Disk, stepping: Any) -> Round:
    raw, step_s = disk.measure(), _seconds(stepping.step)
    report = stepping.last_step
    moved_bytes = report.read_bytes + report.written_bytes
    busy = report.read_s / THREADS, report.write_s / THREADS, report.update_s
    return Round(raw, moved_bytes / disk.both(), step_s, moved_bytes, *busy)


def as_lines(found: Found) -> list[str]:
    """For a person: medians over rounds, and of ratios the quartiles."""
    gb = 1e9
    moved = found.rounds[0].moved_bytes

    def middle(of: Any) -> str:
        return f"{found.median(of):.2f}"

    def spread(of: Any, over: list | None = None) -> str:
        values = sorted(of(r) for r in (found.rounds if over is None else over))
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
        f"  each by itself       {three(found.alone)}",
    ]
    if found.rows:
        after, early = (statistics.median(seconds[i] for seconds in found.backward_s) for i in range(2))
        lines.append(
            f"  backward and step    {after:.2f} s one after the other ({found.rows} rows), with in_backward {early:.2f} s: "
            f"{spread(lambda seconds: seconds[1] / seconds[0], found.backward_s)}"
        )
    return lines
