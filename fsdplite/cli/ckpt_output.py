"""What a command about files hands over and prints, and how names and numbers out of files are shown."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..events import format_bytes

__all__ = [
    "Outcome", "SHOWN_ROWS", "add_all_option", "escaped", "json_text", "progress", "shape_text", "size_text", "table",
    "time_text", "write_out",
]  # fmt: skip

SHOWN_ROWS = 40


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        code: Exit code.
        document: All of it, for programs.
        text: Makes the text for people.
    """

    code: int
    document: dict[str, Any]
    text: Callable[[], str]


def escaped(text: str, longest: int = 400) -> str:
    """Text from a file or a name, on one line, without characters that could steer a terminal."""
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size_text(size_bytes: int) -> str:
    return format_bytes(size_bytes)


def time_text(seconds: float) -> str:
    """A moment in the machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def json_text(document: Any) -> str:
    try:
        return json.dumps(document, allow_nan=False) + "\n"
    except ValueError:  # a number like 1e999
        return json.dumps(_finite(document), allow_nan=False) + "\n"


def write_out(text: str) -> None:
    """Write to stdout what its encoding can hold. Whoever reads it may stop early."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return value


def add_all_option(parser: Any) -> None:
    parser.add_argument("--all", action="store_true", help=f"show all rows, not the first {SHOWN_ROWS} of each table")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], every: bool = True, what: str = "rows") -> str:
    """Rows in columns as wide as the terminal, 80 where there is none.

    Args:
        headings: ``>`` in front puts a column's cells to the right and never breaks them, ``=`` only the latter.
        rows: Cells. Control characters are escaped here, except line breaks.
        every: Show all of them, or the first 40 and how many more there are.
        what: They are, for that line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    laid_out = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
    for heading in headings:
        right, fixed = heading.startswith(">"), heading.startswith((">", "="))
        laid_out.add_column(
            Text(heading.lstrip(">=")), justify="right" if right else "left", no_wrap=fixed, overflow="fold"
        )
    longest = sys.maxsize if every else 400
    for row in rows if every else rows[:SHOWN_ROWS]:
        laid_out.add_row(*(Text("\n".join(escaped(line, longest) for line in cell.split("\n"))) for cell in row))
    width = shutil.get_terminal_size((80, 24)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(laid_out)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    if not every and len(rows) > SHOWN_ROWS:
        lines.append(f"and {len(rows) - SHOWN_ROWS} more {what}; --all shows them")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal; yields what is called with bytes done."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(escaped(label)), total=total_bytes)
        yield lambda count: bar.advance(task, count)
