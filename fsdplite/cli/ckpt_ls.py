"""``fsdplite ckpt ls``: what is in a root."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from .ckpt_output import SHOWN_ROWS, Outcome, add_all_option, escaped, size_text, table, time_text
from .ckpt_root import Entry, open_root, survey

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
List what is in a root of checkpoints: which steps are published, and of everything else why it is not. A published
step has its manifest, and all files that it lists, in their sizes; 'fsdplite ckpt verify' reads every byte.
"""
_EPILOG = "exit codes: 0 fine, 1 a directory named as a step is not a whole checkpoint, 2 usage"


def add_parser(actions: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser("ls", help="list the steps in a root", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("root", metavar="ROOT", help="what save_checkpoint was given")
    add_all_option(parser)
    return parser


def run(args: argparse.Namespace) -> Outcome:
    fs, root, names = open_root(args.root)
    entries = survey(fs, root, names)
    steps = [entry.step for entry in entries if entry.state == "published"]
    latest = max(steps, default=None)
    document = {"root": root, "latest": latest, "entries": [asdict(entry) for entry in entries]}
    code = int(any(entry.state == "incomplete" for entry in entries))
    return Outcome(code, document, lambda: _text(root, entries, latest, args.all))


def _text(root: str, entries: list[Entry], latest: int | None, every: bool) -> str:
    published = [entry for entry in entries if entry.state == "published"]
    others = [entry for entry in entries if entry.state != "published"]
    text = f"{escaped(root)}: {len(published)} published"
    text += f", the latest is step {latest}\n" if latest is not None else "\n"
    if published:
        rows = [_row(entry, latest) for entry in published]
        hidden = [] if every else rows[:-SHOWN_ROWS]  # the newest are what people look for
        if hidden:
            text += f"{len(hidden)} older steps are not shown; --all shows them\n"
        text += table([">step", ">size", ">ranks", ">tensors", "dtypes", "=saved", ""], rows[len(hidden) :])
    if others:
        text += "\nnot checkpoints:\n"
        text += table(["name", "=state", "why"], [[e.name, e.state, e.why or ""] for e in others], every, "names")
    return text


def _row(entry: Entry, latest: int | None) -> list[str]:
    notes = [note for note in ("latest" if entry.step == latest else None, entry.why) if note]
    return [
        str(entry.step), size_text(entry.total_bytes or 0), str(entry.world_size), str(entry.tensor_count),
        ", ".join(entry.dtypes), time_text(entry.created or 0), "; ".join(notes),
    ]  # fmt: skip
