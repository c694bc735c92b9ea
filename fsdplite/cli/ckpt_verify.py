"""``fsdplite ckpt verify``: is every byte the one that was written?"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

from ..checkpoint.catalog import PUBLISHED, load_manifest
from ..checkpoint.storage import FileSystem
from ..checkpoint.verify import Verification, verify_folder
from ..errors import CheckpointError
from .ckpt_output import Outcome, add_all_option, escaped, progress, size_text, table
from .ckpt_root import add_step_option, locate, open_root
from .target import UsageError

__all__ = ["add_parser", "run", "verified"]

_DESCRIPTION = """\
Read all of a checkpoint and compare every checksum. Each finding names the file, the tensor, the chunk of 24 KiB and
the elements in it. Files that do not belong to the checkpoint are findings too.
"""
_EPILOG = "exit codes: 0 intact, 1 not, 2 usage"


def add_parser(actions: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser("verify", help="check every byte", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("path", metavar="PATH", help="a step-<n> directory, or a root")
    add_step_option(parser)
    parser.add_argument("--all-steps", action="store_true", help="every step-<n> in a root")
    add_all_option(parser)
    return parser


def verified(fs: FileSystem, folder: str) -> Verification:
    """:func:`verify_folder` with a progress bar."""
    try:
        total_bytes = load_manifest(fs, folder).tensor_bytes
    except (CheckpointError, OSError):
        total_bytes = 0  # the verification says why
    with progress(f"reading {os.path.basename(folder)}", total_bytes) as advance:
        return verify_folder(fs, folder, advance)


def run(args: argparse.Namespace) -> Outcome:
    if args.all_steps:
        if args.step is not None:
            raise UsageError("--all-steps and --step exclude each other")
        fs, root, names = open_root(args.path)
        matches = sorted((int(match[1]), match[0]) for name in names if (match := PUBLISHED.fullmatch(name)))
        folders = [os.path.join(root, name) for _, name in matches]
        if not folders:
            raise CheckpointError("there is no step-<n> here", phase="find", path=root)
    else:
        fs, folder = locate(args.path, args.step)
        folders = [folder]
    results = [verified(fs, folder) for folder in folders]
    document = {
        "ok": all(result.ok for result in results),
        "checkpoints": [
            {"path": r.path, "ok": r.ok, "bytes_checked": r.bytes_checked, "problems": [asdict(p) for p in r.problems]}
            for r in results
        ],
    }
    return Outcome(0 if document["ok"] else 1, document, lambda: "".join(_text(r, args.all) for r in results))


def _text(result: Verification, every: bool) -> str:
    checked = f"{size_text(result.bytes_checked)} of tensors checked"
    if result.ok:
        return f"{escaped(result.path)}: intact, {checked}\n"
    count = len(result.problems)
    text = f"{escaped(result.path)}: {count} problem{'s' if count > 1 else ''}, {checked}\n"
    rows = []
    for problem in result.problems:
        elements = ""
        if problem.first is not None and problem.count is not None:
            elements = f"{problem.first} to {problem.first + problem.count}"
        rows.append([problem.file, problem.tensor or "", elements, problem.what])
    return text + table(["file", "tensor", "elements", "problem"], rows, every, "problems")
