"""Everything that lies in a root and why it does or does not count, and what a path on the command line names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from ..checkpoint.catalog import PUBLISHED, RANK_FILE, WORKING, defect, load_manifest, root_path
from ..checkpoint.find import cure_of_missing, find_step, roots_below
from ..checkpoint.manifest import MANIFEST, Manifest
from ..checkpoint.remote import file_system
from ..checkpoint.storage import FileSystem
from ..errors import CheckpointError
from .target import UsageError

__all__ = ["Entry", "add_step_option", "locate", "open_root", "reason", "survey"]


@dataclass(frozen=True)
class Entry:
    """One name in a root.

    Attributes:
        state: ``published``; ``incomplete``: named as a step, and it is not a whole one; ``leftover`` of a save that
            failed or is in flight; ``stranger``.
        why: It does not count, or counts under this name.
        total_bytes: Of its files.
        dtypes: Of the model's tensors.
        created: Seconds since 1970.
    """

    name: str
    path: str
    state: str
    step: int | None = None
    why: str | None = None
    world_size: int | None = None
    total_bytes: int | None = None
    tensor_count: int | None = None
    dtypes: tuple[str, ...] = ()
    created: float | None = None
    run_id: str | None = None


def open_root(path: str) -> tuple[FileSystem, str, list[str]]:
    """A root's file system, its place, and the names in it."""
    fs, root, names = _open(path)
    if MANIFEST in names:
        raise UsageError(f"'{root}' is one checkpoint; give the root, {os.path.dirname(root)}, the directory above it")
    return fs, root, names


def _open(path: str) -> tuple[FileSystem, str, list[str]]:
    place = root_path(path)
    fs = file_system(place)
    try:
        return fs, place, fs.list(place)
    except FileNotFoundError:
        raise UsageError(f"there is no directory '{place}'\n  cure: {cure_of_missing(fs, place)}") from None
    except NotADirectoryError:
        raise UsageError(
            f"'{place}' is a file\n  cure: give a directory: the root of checkpoints, or one step-<n> in it"
        ) from None


def add_step_option(parser: Any) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="which step of a root (default: the latest)")


def locate(path: str, step: int | None = None) -> tuple[FileSystem, str]:
    """The directory of one checkpoint: ``path`` itself, or the latest or the given step if it is a root."""
    fs, place, names = _open(path)
    name = os.path.basename(place)
    if MANIFEST in names or PUBLISHED.fullmatch(name) or WORKING.fullmatch(name):
        if step is not None:
            raise UsageError(f"--step {step} chooses from a root, and '{place}' is one checkpoint; leave --step out")
        return fs, place
    return fs, find_step(fs, place, "latest" if step is None else step)


def reason(problem: CheckpointError | OSError) -> str:
    """An error on one line, without the place."""
    if isinstance(problem, CheckpointError):
        return re.sub(r"\n +", "; ", str(problem).partition("\n  at: ")[0])
    return problem.strerror or str(problem)


def survey(fs: FileSystem, root: str, names: list[str]) -> list[Entry]:
    """Every name in a root: steps by number, then the others."""
    steps, others, working, strangers = [], [], [], []
    for name in names:
        path = os.path.join(root, name)
        if match := PUBLISHED.fullmatch(name):
            steps.append(_step(fs, name, path, int(match[1])))
        elif match := WORKING.fullmatch(name):
            working.append((name, path, int(match[1]), match[2]))
        else:
            strangers.append(name)
    roots = [] if steps else roots_below(fs, root, strangers)
    for name in strangers:
        path = os.path.join(root, name)
        why = f"a root of checkpoints itself: give {path}" if path in roots else _strange(name)
        others.append(Entry(name, path, "stranger", why=why))
    published = {entry.step for entry in steps if entry.state == "published"}
    for name, path, step, purpose in working:
        if purpose == "replaced" and step not in published:
            found = _step(fs, name, path, step)
            why = "was set aside for a new version that never came; the next save puts it back"
            if found.state == "published":
                published.add(step)
                steps.append(_entry(name, path, step, load_manifest(fs, path), why))
            else:
                others.append(Entry(name, path, "incomplete", step, f"set aside, the only one of its step; {found.why}"))
            continue
        others.append(Entry(name, path, "leftover", step, _LEFT[purpose]))
    return sorted(steps, key=lambda entry: (entry.step, entry.name)) + others


_LEFT = {
    "saving": "a save that failed, or is in flight",
    "replaced": "an old version of a step that was saved again",
    "removing": "a removal that did not end, or is in flight",
}


def _strange(name: str) -> str:
    if name.startswith("step-"):
        return "a step's name is step- and a number, without zeros in front"
    if name.startswith(".step-"):
        return "a save's own directories are named otherwise"
    return "is not named step-<n>"


def _step(fs: FileSystem, name: str, path: str, step: int) -> Entry:
    try:
        manifest = load_manifest(fs, path)
        if manifest.step != step:
            return Entry(name, path, "incomplete", step, f"its manifest is of step {manifest.step}")
        problem = defect(fs, path, manifest)
        if problem is None:
            return _entry(name, path, step, manifest, "a symbolic link" if fs.is_link(path) else None)
        return Entry(name, path, "incomplete", step, problem)
    except (CheckpointError, OSError) as error:
        if fs.is_remote and _only_rank_files(fs, path):
            why = "a save that failed, or is in flight: the manifest is put last"
            return Entry(name, path, "leftover", step, why)
        return Entry(name, path, "incomplete", step, reason(error))


def _only_rank_files(fs: FileSystem, path: str) -> bool:
    try:
        names = fs.list(path)
    except OSError:
        return False
    return bool(names) and all(RANK_FILE.fullmatch(name) for name in names)


def _entry(name: str, path: str, step: int, manifest: Manifest, why: str | None) -> Entry:
    dtypes = tuple(sorted({tensor.dtype for tensor in manifest.model_tensors().values()}))
    return Entry(
        name, path, "published", step, why, manifest.world_size, manifest.total_bytes, len(manifest.tensors), dtypes,
        manifest.created, manifest.run_id,
    )  # fmt: skip
