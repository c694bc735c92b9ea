"""``fsdplite ckpt prune``: keep the last K checkpoints that are intact, remove the older ones."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..checkpoint.catalog import RANK_FILE, load_manifest, remove_tree, retire, unused
from ..checkpoint.manifest import MANIFEST, rank_file
from ..checkpoint.storage import FileSystem
from ..errors import CheckpointError
from .ckpt_output import Outcome, add_all_option, escaped, size_text, table
from .ckpt_root import Entry, open_root, reason, survey
from .ckpt_verify import verified

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Keep the K highest steps that are published and intact, and remove the published ones below them. Without --yes nothing
is removed: the command shows what would be. Those that are kept are read whole and checked first, so a damaged one
never counts; it is left where it is. Directories that are not checkpoints, that hold other files, or that are symbolic
links are never touched.
"""
_EPILOG = "exit codes: 0 done or nothing to do, 1 a step is damaged or could not be removed, 2 usage"


def add_parser(actions: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser("prune", help="keep the last ones", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("root", metavar="ROOT", help="what save_checkpoint was given")
    parser.add_argument("--keep", type=_positive, required=True, metavar="K", help="how many intact steps to keep")
    parser.add_argument("--leftovers", action="store_true",
                        help="also what saves that failed have left, if nothing in it has changed lately")  # fmt: skip
    parser.add_argument("--idle-minutes", type=_positive, default=60, metavar="M",
                        help="lately: within M minutes (default 60). A save in flight writes all the time, and none "
                        "waits longer than its process group's timeout")  # fmt: skip
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--yes", action="store_true", help="remove")
    either.add_argument("--dry-run", action="store_true", help="only show what would be removed (the default)")
    add_all_option(parser)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


@dataclass(frozen=True)
class _Plan:
    """What becomes of one entry: ``keep``, ``spare`` (not touched, and not counted) or ``remove``."""

    entry: Entry
    action: str
    why: str
    done: bool = False


def run(args: argparse.Namespace) -> Outcome:
    fs, root, names = open_root(args.root)
    entries = survey(fs, root, names)
    plans, damaged = _plan(fs, entries, args.keep)
    if args.leftovers:
        plans += [_plan_leftover(fs, entry, args.idle_minutes) for entry in entries if entry.state == "leftover"]
    error = None
    if args.yes:
        plans, error = _remove(fs, root, plans)
    document = {
        "root": root,
        "dry_run": not args.yes,
        "damaged": damaged,
        "error": error,
        "entries": [{**asdict(p.entry), "action": p.action, "why": p.why, "removed": p.done} for p in plans],
        "removed_bytes": sum(p.entry.total_bytes or 0 for p in plans if p.done),
    }
    return Outcome(int(bool(damaged or error)), document, lambda: _text(plans, document, args.all))


def _plan(fs: FileSystem, entries: list[Entry], keep: int) -> tuple[list[_Plan], dict[str, list[str]]]:
    """From the highest step down: intact ones are kept until there are ``keep``, the rest is to be removed."""
    plans: list[_Plan] = []
    damaged: dict[str, list[str]] = {}
    kept = 0
    for entry in reversed([entry for entry in entries if entry.state == "published"]):
        if kept == keep:
            why = _untouchable(fs, entry.path, _own_names(entry))
            plans.append(_Plan(entry, "spare" if why else "remove", why or f"below the {keep} kept"))
            continue
        own = _own_names(entry)
        problems = [str(problem) for problem in verified(fs, entry.path).problems if problem.file in own]
        if problems:
            damaged[entry.path] = problems
            plans.append(_Plan(entry, "spare", f"damaged: {problems[0]}"))
        else:
            kept += 1
            plans.append(_Plan(entry, "keep", "intact"))
    return plans[::-1], damaged


def _own_names(entry: Entry) -> set[str]:
    ranks = entry.world_size or 0
    return {MANIFEST, *(rank_file(rank, ranks) for rank in range(ranks))}


def _untouchable(fs: FileSystem, path: str, own: set[str] | None) -> str | None:
    """Why a directory is not to be removed. ``own`` are the names it may hold; None: any that a save writes."""
    if fs.is_link(path):
        return "a symbolic link"
    strange = [n for n in fs.list(path) if (n not in own if own is not None else not _of_a_save(n))]
    return f"holds other files: {', '.join(strange[:3])}" if strange else None


def _of_a_save(name: str) -> bool:
    return name == MANIFEST or RANK_FILE.fullmatch(name) is not None


def _plan_leftover(fs: FileSystem, entry: Entry, idle_minutes: int) -> _Plan:
    try:
        why = _untouchable(fs, entry.path, None)
        if why is None:
            with unused(fs, entry.path):
                minutes = (time.time() - _newest_change_s(fs, entry.path)) / 60
            if minutes < idle_minutes:
                why = f"may be in use: it changed {max(minutes, 0):.0f} minutes ago"
    except OSError as problem:
        why = reason(problem)
    return _Plan(entry, "spare" if why else "remove", why or entry.why or "")


def _newest_change_s(fs: FileSystem, path: str) -> float:
    times = [fs.modified_s(os.path.join(path, name)) for name in fs.list(path)]
    if not fs.is_remote:
        times.append(fs.modified_s(path))
    return max(times)


def _remove(fs: FileSystem, root: str, plans: list[_Plan]) -> tuple[list[_Plan], str | None]:
    """Remove what is planned, lowest step first; stops at the first error. Returns the plans with what was done."""
    result = list(plans)
    try:
        for plan in plans:
            if plan.action == "keep" and not _unchanged(fs, plan.entry):
                problem = "a step that was to be kept has changed meanwhile"
                raise CheckpointError(problem, phase="prune", path=plan.entry.path)
        for index, plan in enumerate(plans):
            if plan.action != "remove":
                continue
            entry = plan.entry
            if entry.state == "published" and not _unchanged(fs, entry):
                result[index] = replace(plan, action="spare", why="was replaced or removed meanwhile")
                continue
            if entry.state == "leftover":
                try:
                    with unused(fs, entry.path):
                        remove_tree(fs, entry.path)
                except OSError as problem:
                    if problem.errno != errno.EBUSY:
                        raise
                    result[index] = replace(plan, action="spare", why=reason(problem))
                    continue
            else:
                retire(fs, root, entry.path, entry.step or 0, secrets.token_hex(8))
            result[index] = replace(plan, done=True)
    except (CheckpointError, OSError) as problem:
        where = getattr(problem, "path", None) or getattr(problem, "filename", None) or root
        return result, f"stopped at {where}: {reason(problem)}"
    return result, None


def _unchanged(fs: FileSystem, entry: Entry) -> bool:
    try:
        return load_manifest(fs, entry.path).run_id == entry.run_id
    except CheckpointError:
        return False


def _text(plans: list[_Plan], document: dict[str, Any], every: bool) -> str:
    dry = document["dry_run"]
    rows = []
    for plan in plans:
        action = {"keep": "kept", "spare": "left alone"}.get(plan.action, "to be removed")
        size = size_text(plan.entry.total_bytes) if plan.entry.total_bytes is not None else ""
        rows.append([plan.entry.name, size, "removed" if plan.done else action, plan.why])
    text = escaped(document["root"]) + "\n"
    text += table(["name", ">size", "=what", "why"], rows, every, "names") if rows else "no checkpoint is published\n"
    doomed = [plan for plan in plans if plan.action == "remove"]
    size = size_text(sum(plan.entry.total_bytes or 0 for plan in doomed))
    if document["error"] is not None:
        text += f"{escaped(document['error'])}\n"
    if dry:
        return text + (f"nothing was removed; --yes removes {len(doomed)}, {size}\n" if doomed else "none to remove\n")
    done = sum(plan.done for plan in plans)
    return text + f"removed {done} of {len(doomed)}, {size_text(document['removed_bytes'])}\n"
