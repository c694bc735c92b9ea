"""The YAML that configuration files of launchers are written in, as Python's syntax tree, which knows lines.

Mappings and lists by indentation, plain and quoted scalars, lists and mappings in brackets, comments. Anchors, tags, and
texts of several lines are not read.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["YamlError", "parse"]

_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("null", "~", ""), None),
}
_KEY = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:''|[^'])*'|[^\s#"'\[\]{},&*!|>%@`-][^#]*?|-[^\s#][^#]*?)\s*:(?:\s+|$)""")
_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:''|[^'])*')|(^|\s)#.*""")


class YamlError(ValueError):
    """What is not read.

    Attributes:
        lineno: Where.
    """

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.lineno = line


@dataclass(frozen=True)
class _Line:
    number: int
    indent: int
    text: str


def parse(text: str) -> ast.expr:
    """The document of a text.

    Raises:
        YamlError: It has something that is not read here.
    """
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        content = _COMMENT.sub(lambda match: match[1] or match[2], raw).rstrip()
        if content and not (content == "---" and not lines):
            if "\t" in content[: len(content) - len(content.lstrip())]:
                raise YamlError("a line is indented by a tab", number)
            lines.append(_Line(number, len(content) - len(content.lstrip(" ")), content.strip()))
    value, rest = _block(lines, 0, 0)
    if rest < len(lines):
        raise YamlError("the indentation fits nothing above it", lines[rest].number)
    return value


def _at(node: ast.expr, line: int) -> ast.expr:
    node.lineno, node.col_offset, node.end_lineno, node.end_col_offset = line, 0, line, 0
    return node


def _block(lines: list[_Line], start: int, indent: int) -> tuple[ast.expr, int]:
    """The value that begins at a line, and the line behind it."""
    if start == len(lines) or lines[start].indent < indent:
        return _at(ast.Constant(None), lines[start - 1].number if start else 1), start
    first = lines[start]
    if re.match(r"-(\s|$)", first.text):
        return _list(lines, start, first.indent)
    if _KEY.match(first.text):
        return _mapping(lines, start, first.indent)
    return _scalar(first.text, first.number), start + 1


def _mapping(lines: list[_Line], start: int, indent: int) -> tuple[ast.expr, int]:
    keys: list[ast.expr | None] = []
    values: list[ast.expr] = []
    place = start
    while place < len(lines) and lines[place].indent == indent:
        line = lines[place]
        match = _KEY.match(line.text)
        if match is None:
            raise YamlError("a key was expected", line.number)
        rest = line.text[match.end() :]
        if rest:
            value, place = _scalar(rest, line.number), place + 1
        else:
            under = place + 1 < len(lines) and lines[place + 1].text.startswith("-")  # lists may stand under their key
            value, place = _block(lines, place + 1, indent if under else indent + 1)
        keys.append(_at(ast.Constant(str(_plain(match[1], line.number))), line.number))
        values.append(value)
    return _at(ast.Dict(keys, values), lines[start].number), place


def _list(lines: list[_Line], start: int, indent: int) -> tuple[ast.expr, int]:
    items = []
    place = start
    while place < len(lines) and lines[place].indent == indent and re.match(r"-(\s|$)", lines[place].text):
        line = lines[place]
        inside = line.text[1:].lstrip()
        if inside and _KEY.match(inside) is None:
            items.append(_scalar(inside, line.number))
            place += 1
        else:  # a block whose first line stands behind the dash
            shifted = _Line(line.number, indent + len(line.text) - len(inside), inside)
            block = [*lines[:place], *([shifted] if inside else []), *lines[place + 1 :]]
            value, end = _block(block, place if inside else place, indent + 1)
            items.append(value)
            place = end + (0 if inside else 1)
    return _at(ast.List(items, ast.Load()), lines[start].number), place


def _scalar(text: str, line: int) -> ast.expr:
    if text[0] in "&*!|>%@`":
        raise YamlError(f"'{text[0]}' has a meaning in YAML that is not read here", line)
    if text[0] in "[{":
        return _flow(text, line)
    return _at(ast.Constant(_plain(text, line)), line)


def _flow(text: str, line: int) -> ast.expr:
    if text[-1] != {"[": "]", "{": "}"}[text[0]]:
        raise YamlError("brackets that end on another line are not read", line)
    parts = re.findall(r"""(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*'|\[[^\]]*\]|\{[^}]*\}|[^,])+""", text[1:-1])
    parts = [part.strip() for part in parts if part.strip()]
    if text[0] == "[":
        return _at(ast.List([_scalar(part, line) for part in parts], ast.Load()), line)
    pairs = []
    for part in parts:
        match = _KEY.match(part)
        if match is None:
            raise YamlError("a key was expected", line)
        pairs.append((_at(ast.Constant(str(_plain(match[1], line))), line), _scalar(part[match.end() :] or "~", line)))
    return _at(ast.Dict([key for key, _ in pairs], [value for _, value in pairs]), line)


def _plain(text: str, line: int) -> Any:
    if text[0] in "\"'":
        if len(text) < 2 or text[-1] != text[0]:
            raise YamlError("a quote that ends on another line is not read", line)
        return text[1:-1].replace("''", "'") if text[0] == "'" else re.sub(r"\\(.)", r"\1", text[1:-1])
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
