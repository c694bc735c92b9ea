"""Files and folders: what is read, and what was found where."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from . import config_files, notebook
from .finder import find
from .rule import NONE, VERDICTS, Finding

__all__ = ["FileReport", "Problem", "Report", "examine"]

_SOURCES = (".py", ".pyi", ".pyw", "")
_CONFIGS = (".json", ".yaml", ".yml")
_MESH = "init_device_mesh"
_LEFT_OUT = frozenset(("__pycache__", "node_modules", "site-packages"))
_ENVIRONMENT_SIGNS = ("pyvenv.cfg", "conda-meta")


@dataclass(frozen=True)
class Problem:
    """A file that could not be read.

    Attributes:
        path: The file.
        problem: Why.
        line: Where; None if it has no place.
    """

    path: str
    problem: str
    line: int | None = None


@dataclass(frozen=True)
class FileReport:
    """One file with at least one finding, or a notebook's cell: ``train.ipynb, cell 3``."""

    path: str
    findings: tuple[Finding, ...]


@dataclass
class Report:
    """Everything.

    Attributes:
        files: Those with findings, in the order in which they were read.
        read: How many files were read.
        problems: Files that could not be read.
    """

    files: list[FileReport] = field(default_factory=list)
    read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Everything was read, and every use has a counterpart."""
        return not self.problems and not self.counts()[NONE]

    def counts(self) -> dict[str, int]:
        """How many findings have each verdict."""
        verdicts = [finding.verdict for file in self.files for finding in file.findings]
        return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


def examine(paths: Sequence[str]) -> Report:
    """Read files, and the Python sources of folders, each once.

    Args:
        paths: Files that exist and folders. A folder is walked in the order of names; hidden folders, virtual
            environments and caches in it are left out. Of JSON and YAML files only those that are named are read.

    Returns:
        What was found. Nothing is imported, run or written.
    """
    report = Report()
    seen: set[str] = set()
    for given in paths:
        for path in _files(given, report) if os.path.isdir(given) else [given]:
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                _read(path, report)
    return report


def _files(folder: str, report: Report) -> Iterator[str]:
    def unreadable(problem: OSError) -> None:
        report.problems.append(Problem(str(problem.filename), f"cannot be read: {problem.strerror}"))

    for above, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not _is_left_out(os.path.join(above, name), name))
        for name in sorted(names):
            path = os.path.join(above, name)
            if name.startswith(".") or not os.path.isfile(path):
                continue
            if name.endswith((".py", ".pyi", ".pyw", ".ipynb")):
                yield path


def _is_left_out(path: str, name: str) -> bool:
    if name.startswith(".") or name in _LEFT_OUT:
        return True
    return any(os.path.exists(os.path.join(path, sign)) for sign in _ENVIRONMENT_SIGNS)


def _read(path: str, report: Report) -> None:
    def problem(text: str, line: int | None = None) -> None:
        report.problems.append(Problem(path, text, line))

    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (*_SOURCES, *_CONFIGS, ".ipynb"):
        return problem("expected a Python source, a notebook, a folder, or a configuration in JSON or YAML")
    if not os.path.isfile(path):
        return problem("not a regular file")
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as failure:
        return problem(f"cannot be read: {failure.strerror or failure}")
    try:
        parts = _parts(path, data, suffix)
    except SyntaxError as failure:
        return problem(f"cannot be parsed: {failure.msg}", failure.lineno or None)
    except ValueError as failure:  # what JSON cannot read, and null bytes
        return problem(f"cannot be parsed: {failure}", getattr(failure, "lineno", None))
    except (RecursionError, MemoryError):
        return problem("cannot be parsed: it is nested too deeply")
    report.read += 1
    report.files += parts


def _parts(path: str, data: bytes, suffix: str) -> list[FileReport]:
    """What was found in a file, or in each cell of a notebook."""
    if suffix in _CONFIGS:
        found = {path: config_files.findings(data, suffix == ".json")}
    elif suffix == ".ipynb":
        found = {f"{path}, cell {number}": findings for number, findings in notebook.findings(data).items()}
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a script's own invalid escapes
            found = {path: find(ast.parse(data))}
    if _MESH.encode() not in data:
        found = {where: [_with_import(finding) for finding in findings] for where, findings in found.items()}
    return [FileReport(where, tuple(findings)) for where, findings in found.items() if findings]


def _with_import(finding: Finding) -> Finding:
    """A counterpart that makes a mesh says where that function comes from."""
    if _MESH + "(" not in finding.write:
        return finding
    return replace(finding, notes=(*finding.notes, f"from torch.distributed.device_mesh import {_MESH}"))
