"""``package.module:name`` and ``path/to/file.py:name``: how a command is told about a piece of the user's code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["UsageError", "load_target"]


class UsageError(Exception):
    """The command was given something it cannot use."""


def load_target(text: str) -> Any:
    """Import what ``text`` names. Modules are looked up in the current folder too.

    Raises:
        UsageError: The text has another form, or there is no such module, file or name.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"expected package.module:name or path/to/file.py:name, found '{text}'")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            present = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")))
            raise UsageError(f"'{place}' has no '{name}'; it has {present or 'nothing callable'}")
        found = getattr(found, part)
    return found


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file '{path}'")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as when the file is run: it may import what lies beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (name == missing.name or name.startswith(missing.name + ".")):
            raise UsageError(f"there is no module '{name}'") from missing
        raise  # it is there, and something that it imports is not
