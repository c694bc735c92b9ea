"""Tables of what was measured: for a terminal, and as Markdown for the README."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from .timing import Spread, paired_ratios

REFERENCE = "fully_shard"


@dataclass(frozen=True)
class Table:
    """A table before it is drawn. A cell may have several lines."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


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
    title = (
        f"{case['title']}: time as a share of {REFERENCE}'s, median and quartiles of {rounds} paired steps; "
        "milliseconds are medians"
    )
    rows = []
    for name, clock in timing.items():
        cells = []
        for quantity in _TIMING_COLUMNS:
            ratio = paired_ratios(clock[quantity], timing[REFERENCE][quantity])
            cells.append(f"{_spread(ratio)}\n{Spread.of(clock[quantity]).median:.1f} ms")
        rows.append([name, *cells])
    note = ""
    if "plain" in timing:
        added = {name: _added_us(clock, timing["plain"], case["units"]) for name, clock in timing.items()}
        note = "Main-thread CPU time of forward and backward that each adds to the unwrapped model, per unit and step: "
        note += ", ".join(f"{name} {spread.median:.0f} us" for name, spread in added.items() if name != "plain") + "."
    return Table(title, ["", *_TIMING_COLUMNS.values()], rows, note)


def _added_us(clock: dict[str, list[float]], plain: dict[str, list[float]], units: int) -> Spread:
    """Main-thread CPU time of forward and backward beyond that of the unwrapped model, per unit and step."""
    quantity = "host_forward_backward"
    return Spread.of([1000 * (a - b) / units for a, b in zip(clock[quantity], plain[quantity], strict=True)])


def _memory_table(case: dict[str, Any]) -> Table:
    title = f"{case['title']}: peak of live tensor bytes in one step of rank 0, and its collectives; MB"
    headings = ["", "dtype", "peak", "ratio", "formula", "constant", "collectives", "MB"]
    rows = []
    for precision, contenders in case["memory"].items():
        reference = contenders[REFERENCE]["steps"][-1]["peak_bytes"]
        for name, contender in contenders.items():
            step = contender["steps"][-1]
            peak, predicted = step["peak_bytes"], contender["predicted_peak_bytes"]
            formula = "" if predicted is None else f"{predicted / 1e6:.1f} ({predicted / peak - 1:+.1%})"
            constant = "yes" if is_constant(contender) else "no"
            share = f"{peak / reference:.3f}"
            sent = f"{step['collective_bytes'] / 1e6:.1f}"
            rows.append(
                [name, precision, f"{peak / 1e6:.1f}", share, formula, constant, _calls(step["calls"]), sent]
            )
    note = "AG all-gather, RS reduce-scatter, AR all-reduce, c control message. Constant: the same peak in every step "
    note += "from the second on. Formula: from the layout, with the unwrapped model's activations."
    return Table(title, headings, rows, note)


def is_constant(contender: dict[str, Any]) -> bool:
    """Whether every step from the second on had the same peak."""
    return len({step["peak_bytes"] for step in contender["steps"][1:]}) == 1


def _calls(calls: dict[str, int]) -> str:
    short = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "broadcast": "BC", "control": "c"}
    order = sorted(calls.items(), key=lambda item: (item[0] == "control", item[0]))
    return ", ".join(f"{count} {short.get(kind, kind)}" for kind, count in order)


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def machine_line(found: dict[str, Any]) -> str:
    """One line about where and when."""
    machine = found["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores (load {machine['load_1_minute']:.1f} at the start), torch "
        f"{machine['torch']}, Python {machine['python']}, gloo, 1 thread per rank, {machine['date']}"
    )


def as_markdown(found: dict[str, Any], made: list[Table]) -> str:
    """The tables as the README shows them, with the command, the machine and the date."""
    parts = [f"`{found['command']}` on {machine_line(found)}."]
    for table in made:
        lines = ["| " + " | ".join(table.headings) + " |", "|" + "---|" * len(table.headings)]
        lines += ["| " + " | ".join(cell.replace("\n", "<br>") for cell in row) + " |" for row in table.rows]
        parts += [f"{table.title}:", "\n".join(lines), *([table.note] if table.note else [])]
    return "\n\n".join(parts)


def print_tables(found: dict[str, Any], made: list[Table]) -> None:
    """The tables on the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(machine_line(found), markup=False)
    for table in made:
        drawn = RichTable(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
        for heading in table.headings:
            drawn.add_column(heading, no_wrap=heading != "collectives")
        for row in table.rows:
            drawn.add_row(*row)
        console.print()
        console.print(table.title, markup=False)
        console.print(drawn)
        if table.note:
            console.print(table.note, markup=False)
