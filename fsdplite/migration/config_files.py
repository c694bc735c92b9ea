"""Configuration files: DeepSpeed's in JSON, Accelerate's in YAML, the Trainer's ``fsdp_config`` in either."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from . import config_settings, launch_settings, yaml_tree
from .rule import Finding

__all__ = ["findings", "parse_json"]

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")


def parse_json(data: bytes) -> ast.expr:
    """A JSON document as Python's tree, which knows lines. Comments and last commas are read, as DeepSpeed reads them.

    Raises:
        ValueError: It is not JSON.
    """

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    text = _LAST_COMMA.sub(blank, _COMMENT.sub(blank, data.decode("utf-8-sig")))
    json.loads(text)
    text = re.sub(r"\\(.)", lambda match: "/" if match[1] == "/" else match[0], text)  # \/ is no escape in Python
    tree = ast.parse(f"(\n{text}\n)", mode="eval")
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno -= 1
    return tree.body


def findings(data: bytes, is_json: bool) -> list[Finding]:
    """What becomes of each setting of a file.

    Raises:
        ValueError: It cannot be parsed, or holds no configuration that is known.
    """
    document = parse_json(data) if is_json else yaml_tree.parse(data.decode("utf-8-sig"))
    found = [finding for node in _configurations(document) for finding in _findings(node)]
    if not found:
        raise ValueError("this is no configuration of DeepSpeed, Accelerate or the Trainer's fsdp_config: it has none "
                         "of their settings")  # fmt: skip
    return found


def _configurations(document: ast.expr) -> Iterator[ast.Dict]:
    """The configurations in a document: itself, or what it holds somewhere inside."""
    if isinstance(document, ast.Dict) and (
        config_settings.is_config(document, alone=True) or launch_settings.is_config(document)
    ):
        yield document
        return
    for child in ast.iter_child_nodes(document):
        if isinstance(child, (ast.Dict, ast.List)):
            yield from _configurations(child)


def _findings(node: ast.Dict) -> list[Finding]:
    return launch_settings.findings(node) if launch_settings.is_config(node) else config_settings.findings(node)
