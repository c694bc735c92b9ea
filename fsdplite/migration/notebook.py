"""Notebooks: the code of all cells is read as one source, and what is found is told by cell."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import defaultdict
from dataclasses import replace

from .finder import find
from .rule import Finding

__all__ = ["findings"]

_MAGIC = re.compile(r"^(\s*)(?:[%!?].*|.*[^\s?]\?{1,2}\s*)$")  # IPython's own lines


def findings(data: bytes) -> dict[int, list[Finding]]:
    """What is found in each cell. Cells count from 1, lines from the beginning of their cell.

    Raises:
        ValueError: It is no notebook.
        SyntaxError: A cell cannot be parsed; it is named.
    """
    document = json.loads(data.decode("utf-8-sig"))
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ValueError("this is no notebook: it has no cells")
    lines: list[str] = []
    places: list[tuple[int, int]] = []  # cell and line in it of each line
    for number, cell in enumerate(cells, 1):
        source = _source(cell)
        _parse(source, number)
        lines += source
        places += [(number, line) for line in range(1, len(source) + 1)]
    found: dict[int, list[Finding]] = defaultdict(list)
    for finding in find(_parse(lines, 0)):
        number, line = places[finding.line - 1]
        found[number].append(replace(finding, line=line))
    return found


def _source(cell: object) -> list[str]:
    """The lines of a cell of code, those of IPython left out."""
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return []
    source = cell.get("source", "")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    if text.lstrip().startswith("%%") and not text.lstrip().startswith(("%%time", "%%capture")):
        return []  # the cell is another language's
    return [_MAGIC.sub(r"\1pass", line) if _MAGIC.match(line) else line for line in text.splitlines()]


def _parse(lines: list[str], cell: int) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse("\n".join(lines))
    except SyntaxError as failure:
        failure.msg = f"cell {cell}: {failure.msg}"
        raise
