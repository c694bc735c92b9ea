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
