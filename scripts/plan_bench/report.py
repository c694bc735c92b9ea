"""Tables of predicted and measured, or published, step times."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_rows(found: dict[str, Any], markdown: bool) -> None:
    """Predicted beside measured steps."""
    rows = [
        (row["model"], row["wrapping"], f"{row['measured_ms']:.0f}", f"{row['predicted_ms']:.0f}",
         f"{row['predicted_ms'] / row['measured_ms'] - 1:+.1%}", f"{row['communication_ms']:.0f}")
        for row in found["rows"]
    ]  # fmt: skip
    _print(("model", "wrapping", "measured ms", "predicted ms", "error", "of which communication"), rows, markdown)


def print_auto(found: dict[str, Any], markdown: bool) -> None:
    """The automatic choice beside wrapping by block."""
    rows = []
    for name, entry in found.items():
        base, best = entry["by_block"], entry["auto"]
        budget = f"{entry['budget_bytes'] / 1e6:.1f}" if entry["budget_bytes"] else "none"
        rows.append((
            name, budget, entry["chosen"],
            f"{base['measured_ms']:.0f} > {best['measured_ms']:.0f}", f"{entry['measured_ratio']:.2f}",
            f"{base['peak_bytes'] / 1e6:.1f} > {best['peak_bytes'] / 1e6:.1f}",
        ))  # fmt: skip
    _print(("model", "budget MB", "chosen", "step ms", "ratio", "peak MB"), rows, markdown)


def print_published(rows: list[dict[str, Any]], markdown: bool) -> None:
    """Predicted beside published throughput."""
    cells = [
        (row["source"], row["what"], f"{row['published']:,.0f}", f"{row['predicted']:,.0f}",
         "calibrated on" if row["is_base"] else f"{row['predicted'] / row['published'] - 1:+.1%}")
        for row in rows
    ]  # fmt: skip
    _print(("source", "run", "published tok/s/GPU", "predicted", "error"), cells, markdown)


def _print(headings: tuple[str, ...], rows: list[tuple[str, ...]], markdown: bool) -> None:
    if markdown:
        print("| " + " | ".join(headings) + " |")
        print("|" + "---|" * len(headings))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
