"""Tables of what was measured, each row beside its target."""

from __future__ import annotations

import statistics
from typing import Any

from engine_bench.report import Table

# Of which quantity the seconds are divided by which other's, in the same round.
RATIOS = (
    ("write rate / raw pwrite + fsync", "raw", "save", "at least 0.9"),
    ("write rate / torch.distributed.checkpoint", "dcp", "save", "at least 1.5"),
    ("time / time without checksums", "save", "unchecked", "at most 1.10"),
    ("background stall / copy of the slices", "stall", "copy", "at most 1.3"),
)
MIB = 2**20
MEMORY_TARGETS = {"foreground": "64 MiB", "background": "1.05 slices", "export": "64 MiB", "import": "64 MiB"}


def tables(found: dict[str, Any]) -> list[Table]:
    """All tables of a run."""
    made = []
    if "timing" in found:
        made += [_ratios(found), _seconds(found)]
    if "loads" in found:
        rows = [
            [f"2 ranks, loaded by {world_size}", f"{load['share']:.4f}", "at most 1.05"]
            for world_size, load in found["loads"].items()
        ]
        title = "Bytes that a rank reads (data, headers, manifest) as a share of those it holds; the largest rank's"
        made.append(Table(title, ["saved by", "share", "target"], rows))
    if "memory" in found:
        rows = [[what, _growth(value), MEMORY_TARGETS[what]] for what, value in found["memory"].items()]
        title = "Growth of resident memory (VmHWM, reset before) in one operation of a fresh process; the largest rank's"
        made.append(Table(title, ["", "growth", "at most"], rows))
    return made


def _ratios(found: dict[str, Any]) -> Table:
    rows = []
    for title, above, below, target in RATIOS:
        cells = []
        for timing in found["timing"].values():
            ratios = [a / b for a, b in zip(timing["seconds"][above], timing["seconds"][below], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        rows.append([title, *cells, target])
    rounds = len(next(iter(found["timing"].values()))["seconds"]["raw"])
    title = f"A save of {found['megabytes']} MB: ratios within a round, median (lowest-highest) of {rounds} rounds"
    return Table(title, ["", *_ranks(found), "target"], rows)


def _seconds(found: dict[str, Any]) -> Table:
    names = next(iter(found["timing"].values()))["seconds"]
    rows = [
        [name, *(f"{1000 * statistics.median(t['seconds'][name]):.0f}" for t in found["timing"].values())]
        for name in names
    ]
    return Table("Milliseconds, median", ["", *_ranks(found)], rows)


def _ranks(found: dict[str, Any]) -> list[str]:
    return [f"{world_size} rank{'s' if world_size != '1' else ''}" for world_size in found["timing"]]


def _growth(value: dict[str, Any]) -> str:
    text = f"{value['growth'] / MIB:.0f} MiB"
    return f"{text}, {value['growth'] / value['shard']:.2f} slices" if value["shard"] else text
