"""Tables of what was measured: for a terminal, and as Markdown for the README."""

from __future__ import annotations

import os
import platform
import re
from datetime import date
from pathlib import Path
from typing import Any

from .timing import Spread, paired_ratios

REFERENCE = "fully_shard"
Table = tuple[str, list[str], list[list[str]]]  # title, headings, rows

_TIMING_COLUMNS = {"step": "step", "forward_backward": "fwd + bwd", "optimizer": "optimizer", "host": "main-thread CPU"}


def describe_machine() -> dict[str, Any]:
    """CPU, cores, torch, load: what a reader needs to judge the milliseconds."""
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
        model = found.group(1) if found else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": model,
        "cores": cores,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_1_minute": os.getloadavg()[0],
        "date": date.today().isoformat(),
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """All tables of a run, in the order of its cases."""
    made = []
    for case in found["cases"].values():
        if "timing" in case:
            made.append(_timing_table(case))
        if "memory" in case:
            made.append(_memory_table(case))
    return made


def _timing_table(case: dict[str, Any]) -> Table:
    timing = case["timing"]
    rounds = len(timing[REFERENCE]["step"])
    title = f"{case['title']}: time over {REFERENCE}'s, median (quartiles) of {rounds} paired steps; ms of the median"
    rows = []
    for name, clock in timing.items():
        row = [name]
        for quantity in _TIMING_COLUMNS:
            milliseconds = Spread.of(clock[quantity]).median
            row.append(f"{_spread(paired_ratios(clock[quantity], timing[REFERENCE][quantity]))}, {milliseconds:.1f} ms")
        rows.append(row)
    if "plain" in timing:
        added = {name: _added_us(clock, timing["plain"], case["units"]) for name, clock in timing.items()}
        for row in rows:
            row.append("" if row[0] == "plain" else f"{added[row[0]].median:.0f} us")
    headings = ["", *_TIMING_COLUMNS.values(), *(["added per unit"] if "plain" in timing else [])]
    return title, headings, rows


def _added_us(clock: dict[str, list[float]], plain: dict[str, list[float]], units: int) -> Spread:
    """Main-thread CPU time of forward and backward beyond that of the unwrapped model, per unit and step."""
    quantity = "host_forward_backward"
    return Spread.of([1000 * (a - b) / units for a, b in zip(clock[quantity], plain[quantity], strict=True)])


def _memory_table(case: dict[str, Any]) -> Table:
    title = f"{case['title']}: live tensor bytes at the peak, and collectives, of one step on rank 0"
    headings = ["", "precision", "peak", "ratio", "formula", "same each step", "collectives", "bytes"]
    rows = []
    for precision, contenders in case["memory"].items():
        reference = contenders[REFERENCE]["steps"][-1]["peak_bytes"]
        for name, contender in contenders.items():
            step = contender["steps"][-1]
            predicted = contender["predicted_peak_bytes"]
            rows.append(
                [
                    name,
                    precision,
                    _megabytes(step["peak_bytes"]),
                    f"{step['peak_bytes'] / reference:.3f}",
                    "" if predicted is None else f"{_megabytes(predicted)} ({predicted / step['peak_bytes'] - 1:+.1%})",
                    "yes" if is_flat(contender) else "no",
                    _calls(step["calls"]),
                    _megabytes(step["collective_bytes"]),
                ]
            )
    return title, headings, rows


def is_flat(contender: dict[str, Any]) -> bool:
    """Whether every step from the second on had the same peak."""
    return len({step["peak_bytes"] for step in contender["steps"][1:]}) == 1


def _calls(calls: dict[str, int]) -> str:
    short = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "broadcast": "BC", "all_to_all": "A2A"}
    return " + ".join(f"{count} {short.get(kind, kind)}" for kind, count in sorted(calls.items()))


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def machine_line(found: dict[str, Any]) -> str:
    """One line about where and when."""
    machine = found["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores (load {machine['load_1_minute']:.1f} at the start), torch "
        f"{machine['torch']}, Python {machine['python']}, gloo, 1 thread per rank, {machine['date']}"
    )


def as_markdown(found: dict[str, Any]) -> str:
    """The tables as the README shows them, with the command, the machine and the date."""
    parts = [f"`{found['command']}` on {machine_line(found)}."]
    for title, headings, rows in tables(found):
        lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        parts += [f"{title}:", "\n".join(lines)]
    return "\n\n".join(parts)


def print_tables(found: dict[str, Any]) -> None:
    """The tables on the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    console.print(machine_line(found), markup=False)
    for title, headings, rows in tables(found):
        table = RichTable(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
