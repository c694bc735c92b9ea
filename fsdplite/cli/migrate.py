"""``fsdplite migrate``: what a script uses of other engines, and what to write instead."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .ckpt_output import escaped, json_text, write_out

if TYPE_CHECKING:
    from ..migration.report import Report
    from ..migration.rule import Finding

__all__ = ["add_parser"]

_INDENT = 10
_LONGEST = 2000
_SHOWN = 100


def add_parser(commands: Any) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "migrate",
        help="what a script uses of DDP, FSDP, DeepSpeed, ..., and what to write instead",
        description="Read Python sources, notebooks and configurations of DeepSpeed and Accelerate, find what they use "
        "of torch's DDP, FSDP1, FSDP2 and distributed checkpoints, DeepSpeed's ZeRO, Megatron-FSDP, Accelerate and "
        "Fabric, and say for each use what to write with fsdplite. Files are parsed, never imported, run or changed.",
        epilog="exit codes: 0 every use has a counterpart, 1 some have none or a file could not be read, 2 usage",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH",
                        help="a Python file, a notebook, a folder of them, or a configuration of DeepSpeed or "
                             "Accelerate (JSON; YAML with PyYAML)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for path in args.paths:
        if not os.path.exists(path):
            print(f"fsdplite migrate: there is no file or folder '{escaped(path)}'", file=sys.stderr)
            return 2
    from ..migration.report import examine  # the tables: other commands start without them

    report = examine(args.paths)
    write_out(json_text(_document(report)) if args.json else _text(report))
    return 0 if report.fine else 1


def _document(report: Report) -> dict[str, Any]:
    return {
        "fine": report.fine,
        "files_read": report.read,
        "counts": report.counts(),
        "files": [asdict(file) for file in report.files],
        "problems": [asdict(problem) for problem in report.problems],
    }


def _text(report: Report) -> str:
    from ..migration.rule import VERDICTS

    width = max(40, min(shutil.get_terminal_size((80, 24)).columns, 120))
    lines: list[str] = []
    for file in report.files:
        lines.append(escaped(file.path))
        for finding in file.findings:
            lines += _lines(finding, width)
        lines.append("")
    for problem in report.problems:
        where = escaped(problem.path) + (f":{problem.line}" if problem.line is not None else "")
        lines += _wrapped(f"problem   {where}: {escaped(problem.problem)}", width, _INDENT)
    counts = report.counts()
    found = ", ".join(f"{counts[verdict]} {what}" for verdict, what in VERDICTS.items())
    uses = sum(counts.values())
    lines += _wrapped(f"{_number(report.read, 'file')} read, {_number(uses, 'use')}: {found}", width, 0)
    return "\n".join(lines) + "\n"


def _lines(finding: Finding, width: int) -> list[str]:
    """One finding: where, what becomes of it, whose it is, the source; then the counterpart and notes."""
    found = finding.found if len(finding.found) <= _SHOWN else finding.found[: _SHOWN - 3] + "..."
    lines = _wrapped(
        f"{finding.line:>6}  {finding.verdict:8}{finding.engine}: {escaped(found)}", width, _INDENT + 6
    )
    if finding.write:
        lines += _wrapped(f"{'':{_INDENT}}write {escaped(finding.write, _LONGEST)}", width, _INDENT + 6)
    for note in finding.notes:
        lines += _wrapped(f"{'':{_INDENT}}note  {escaped(note, _LONGEST)}", width, _INDENT + 6)
    return lines


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_on_hyphens=False, replace_whitespace=False
    ) or [text]
