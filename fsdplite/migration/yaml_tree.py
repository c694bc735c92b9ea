"""A YAML document as Python's syntax tree, which knows lines. PyYAML reads it, which is no requirement of the base."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any

__all__ = ["parse"]

_MOST_NODES = 100_000


def parse(text: str) -> ast.expr:
    """The document of a text.

    Raises:
        ValueError: It is not YAML, holds several documents, or PyYAML is not installed; ``lineno`` says where.
    """
    try:
        import yaml
    except ImportError:
        raise ValueError("YAML is read with PyYAML, which is not installed: pip install 'fsdplite[migrate]'") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as problem:
        failure = ValueError(getattr(problem, "problem", None) or str(problem))
        if (mark := getattr(problem, "problem_mark", None)) is not None:
            failure.lineno = mark.line + 1  # type: ignore[attr-defined]
        raise failure from problem
    try:
        return ast.Constant(None) if node is None else _tree(node, yaml.SafeLoader(""), itertools.count())
    except RecursionError:
        raise ValueError("it is nested too deeply, or holds itself") from None


def _tree(node: Any, loader: Any, number: Iterator[int]) -> ast.expr:
    if next(number) > _MOST_NODES:
        raise ValueError("it is too long, or its aliases multiply")
    made: ast.expr
    if node.id == "mapping":
        keys, values = zip(*node.value) if node.value else ((), ())
        made = ast.Dict(*([_tree(item, loader, number) for item in items] for items in (keys, values)))
    elif node.id == "sequence":
        made = ast.List([_tree(item, loader, number) for item in node.value], ast.Load())
    else:
        value = loader.construct_object(node)
        made = ast.Constant(value if isinstance(value, (str, int, float, bool, type(None))) else str(node.value))
    made.lineno = made.end_lineno = node.start_mark.line + 1
    made.col_offset = made.end_col_offset = node.start_mark.column
    return made
