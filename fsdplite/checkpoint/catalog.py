"""What is in a root: published checkpoints, leftovers, publishing and retention. No torch.

A checkpoint is published when ``step-<n>`` holds a manifest that passes its own checksum and is of step n, and every
file that it lists, with the listed size. Nothing points to the latest one: it is computed from what is published.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..keywords import known_keywords
from .failure import from_os_error
from .manifest import MANIFEST, Manifest, decode, step_directory
from .remote import file_system
from .storage import FileSystem, is_url, read_all

__all__ = [
    "CheckpointInfo",
    "PUBLISHED",
    "RANK_FILE",
    "WORKING",
    "changed_meanwhile",
    "clean",
    "defect",
    "latest_step",
    "list_checkpoints",
    "load_manifest",
    "publish",
    "published",
    "published_itself",
    "retain",
    "retire",
    "root_path",
    "staging_directory",
    "unused",
]

PUBLISHED = re.compile(r"step-(0|[1-9][0-9]*)")
RANK_FILE = re.compile(r"rank-[0-9]+-of-[0-9]+\.safetensors")
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_LOOKS = 20  # at what others change at the same time
# Directories that a save works in. Only names of exactly this form are ever removed.
WORKING = re.compile(r"\.step-(0|[1-9][0-9]*)\.[0-9a-f]{16}\.(saving|replaced|removing)")


@dataclass(frozen=True)
class CheckpointInfo:
    """One published checkpoint.

    Attributes:
        step: Of training.
        path: Its directory.
        world_size: Number of ranks that wrote it.
        total_bytes: Of its rank files.
    """

    step: int
    path: str
    world_size: int
    total_bytes: int


# What errors say of a name that is no part of a checkpoint. Others (EIO, EACCES) may hide a step that is there, and
# an older one is not quietly taken in its place.
_STRANGE = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.ENXIO, errno.EINVAL)


def root_path(root: Any) -> str:
    """``root`` as an absolute path, or as the URL it is.

    Raises:
        ConfigError: It is not a path, or empty.
        CheckpointError: No file can have such a name.
    """
    if not isinstance(root, (str, bytes, os.PathLike)):
        raise ConfigError("a root of checkpoints is a path", found=repr(root), cure="give a directory, or a URL")
    path = os.fspath(root)
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not path:
        raise ConfigError("a root of checkpoints is a path, and this is empty", found=repr(root), cure="give '.'")
    if "\0" in path:
        raise CheckpointError("no path has a zero character in it", found=repr(path), phase="find")
    if is_url(path):
        return path.rstrip("/")
    if not isinstance(root, (str, bytes)) and _BROKEN_URL.match(path):
        raise ConfigError("a path object took a slash out of this URL", found=path, cure="give the URL as text")
    return os.path.abspath(path)


@known_keywords
def list_checkpoints(root: Any) -> list[CheckpointInfo]:
    """The published checkpoints in ``root``, lowest step first. Other things in it are left alone and not listed.

    The directory of one step stands for itself; a root that is empty, or not there yet, has none.

    Raises:
        CheckpointError: ``root`` is a file, or it or a step in it cannot be read.
    """
    place = root_path(root)
    fs = file_system(place)
    try:
        found = published(fs, place)
        if not found and (itself := published_itself(fs, place)) is not None:
            found = [(place, itself)]
    except NotADirectoryError:
        raise CheckpointError(
            "a root of checkpoints is a directory, and this is a file",
            phase="find",
            path=place,
            cure="give the root that save_checkpoint was given",
        ) from None
    except OSError as problem:
        raise from_os_error(problem, "the checkpoints here cannot be listed", phase="find", path=place) from None
    return [CheckpointInfo(manifest.step, path, manifest.world_size, manifest.total_bytes) for path, manifest in found]


@known_keywords
def latest_step(root: Any) -> int | None:
    """The highest published step in ``root``, None if there is none. Paths are as in :func:`list_checkpoints`."""
    found = list_checkpoints(root)
    return found[-1].step if found else None


def load_manifest(fs: FileSystem, path: str) -> Manifest:
    """The manifest of one checkpoint directory, checked."""
    name = os.path.join(path, MANIFEST)
    try:
        raw = read_all(fs, name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            "there is no manifest here: not a published checkpoint", phase="read", path=name
        ) from None
    except OSError as problem:
        if problem.errno not in _STRANGE:
            raise
        raise CheckpointError(
            f"this is not a manifest: {problem.strerror}", phase="read", path=name, errno=problem.errno
        ) from None
    return decode(raw, name)


def published(fs: FileSystem, root: str) -> list[tuple[str, Manifest]]:
    """The published steps in a root, lowest first: their directories and manifests.

    While this looks, a job may publish a step and remove older ones: a name that is gone by then makes it look again.
    """
    for _ in range(_LOOKS):
        try:
            names = fs.list(root)
        except FileNotFoundError:
            return []
        found = _published_among(fs, root, names)
        others = (name for name in names if (match := PUBLISHED.fullmatch(name)) and int(match[1]) not in found)
        if all(_exists(fs, os.path.join(root, name)) for name in others):
            break
    return [found[step] for step in sorted(found)]


def _published_among(fs: FileSystem, root: str, names: list[str]) -> dict[int, tuple[str, Manifest]]:
    found: dict[int, tuple[str, Manifest]] = {}
    for name in names:
        match = PUBLISHED.fullmatch(name)
        if match:
            _add(fs, os.path.join(root, name), int(match[1]), found)
    for name in names:  # set aside while a new version of the step was moved in, where names cannot be exchanged
        match = WORKING.fullmatch(name)
        if match and match[2] == "replaced" and int(match[1]) not in found:
            _add(fs, os.path.join(root, name), int(match[1]), found)
    return found


def changed_meanwhile(fs: FileSystem, path: str, manifest: Manifest) -> str | None:
    """What another job has done to a checkpoint since its manifest was read."""
    try:
        now = load_manifest(fs, path)
    except CheckpointError:
        return None if _exists(fs, path) else "was removed while it was read"
    except OSError:
        return None
    return None if now.run_id == manifest.run_id else "was saved again while it was read"


def published_itself(fs: FileSystem, path: str) -> Manifest | None:
    """The manifest of a path that is not a root but one complete checkpoint, moved elsewhere or not."""
    name = os.path.basename(path)
    try:
        manifest = load_manifest(fs, path)
        if WORKING.fullmatch(name) or defect(fs, path, manifest) is not None:
            return None
    except (CheckpointError, FileNotFoundError):
        return None
    match = PUBLISHED.fullmatch(name)
    return manifest if match is None or int(match[1]) == manifest.step else None


def _add(fs: FileSystem, path: str, step: int, found: dict[int, tuple[str, Manifest]]) -> None:
    try:
        for _ in range(_LOOKS):
            manifest = load_manifest(fs, path)
            if manifest.step == step and defect(fs, path, manifest) is None:
                found[step] = (path, manifest)
            elif changed_meanwhile(fs, path, manifest):
                continue
            break
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        pass  # not published; find_step and verify_checkpoint say why. Other errors hide a step that may be there


def defect(fs: FileSystem, path: str, manifest: Manifest) -> str | None:
    """A file that is missing or has another size."""
    for record in manifest.files:
        try:
            size = fs.size(os.path.join(path, record.name))
        except FileNotFoundError:
            return f"{record.name} is missing"
        except OSError as problem:
            if problem.errno not in _STRANGE:
                raise
            return f"{record.name}: {problem.strerror}"
        if size != record.size_bytes:
            return f"{record.name} has {size} bytes, the manifest lists {record.size_bytes}"
    return None


# ---------------------------------------------------------------------- what a save does to a root


def staging_directory(fs: FileSystem, root: str, step: int, run_id: str) -> str:
    """Where a save writes before it is published."""
    if fs.is_remote:  # nothing can be renamed there: until it has a manifest the step is not published
        return os.path.join(root, step_directory(step))
    return _working(root, step, run_id, "saving")


def refuse_replacing(fs: FileSystem, root: str, step: int) -> None:
    """Raise if there is something in the step's place that a save cannot replace, before anything is written.

    A published step at a URL cannot be exchanged for another in one operation; and no step goes into a step.
    """
    if (outer := _enclosing_checkpoint(fs, root)) is not None:
        folder, manifest = outer
        where = "itself" if folder == root else "inside"
        raise ConfigError(
            f"the root is {where} the directory of a checkpoint, of step {manifest.step}",
            found=root,
            cure=f"give the root, {os.path.dirname(folder)}",
        )
    if fs.is_remote and any(manifest.step == step for _, manifest in published(fs, root)):
        raise ConfigError(
            f"step {step} is published already, and at a URL it cannot be replaced without endangering it",
            found=os.path.join(root, step_directory(step)),
            cure="save under another step, or remove that one first",
        )
    final = os.path.join(root, step_directory(step))
    if not fs.is_remote and _exists(fs, final) and not fs.is_directory(final):
        kind = "a symbolic link" if fs.is_link(final) else "a file"
        raise CheckpointError(
            f"{step_directory(step)} is {kind} here, which a save does not replace",
            phase="prepare",
            path=final,
            cure="save under another step, or move it elsewhere",
        )


def _enclosing_checkpoint(fs: FileSystem, path: str) -> tuple[str, Manifest] | None:
    """The published checkpoint that ``path`` is, or lies in. Above it only directories with names of steps count."""
    above, here = os.path.dirname(path), path
    while True:
        if (here == path or PUBLISHED.fullmatch(os.path.basename(here))) and (found := published_itself(fs, here)):
            return here, found
        if above in ("", here):
            return None
        above, here = os.path.dirname(above), above


def make_room(fs: FileSystem, root: str, step: int) -> None:
    """At a URL remove what is in the step's place and not published; elsewhere it goes when the new one is there."""
    if fs.is_remote:
        remove_tree(fs, os.path.join(root, step_directory(step)))


def _working(root: str, step: int, run_id: str, purpose: str) -> str:
    return os.path.join(root, f".{step_directory(step)}.{run_id}.{purpose}")


def make_directories(fs: FileSystem, path: str) -> None:
    """Create a directory and what is above it, each name durable before the next; it may be there already."""
    missing = []
    while True:
        try:
            fs.make_directory(path)
            break
        except FileExistsError:
            break
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
    for path in reversed(missing):
        fs.make_directory(path)
        fs.flush_directory(os.path.dirname(path))


def clean(fs: FileSystem, root: str) -> list[OSError]:
    """Remove what failed saves have left; put back a step that was set aside and not replaced.

    Returns:
        Why some of it is still there. Each is of one leftover, and none of them stands in the way of a save.
    """
    kept = []
    for name in fs.list(root):
        path = os.path.join(root, name)
        try:
            if fs.is_remote and PUBLISHED.fullmatch(name):
                _clean_remote(fs, path)
            elif match := WORKING.fullmatch(name):
                _clean_working(fs, path, os.path.join(root, step_directory(int(match[1]))), match[2])
        except OSError as problem:
            kept.append(problem)
    return kept


def _clean_working(fs: FileSystem, path: str, final: str, purpose: str) -> None:
    if fs.is_link(path):
        raise OSError(errno.ELOOP, "a symbolic link: what it points to is not the root's", path)
    if purpose == "replaced" and not _exists(fs, final):
        fs.rename(path, final)
        return
    with unused(fs, path):
        remove_tree(fs, path)


@contextlib.contextmanager
def unused(fs: FileSystem, path: str) -> Iterator[None]:
    """Hold a save's working directory. ``OSError`` with EBUSY while a process of this machine writes it."""
    with contextlib.nullcontext(True) if fs.is_remote else fs.held(path) as is_free:
        if not is_free:
            raise OSError(errno.EBUSY, "another save is writing it; a root belongs to one job at a time", path)
        yield


def _clean_remote(fs: FileSystem, path: str) -> None:
    """Remove a step that consists of rank files and has no manifest: its save failed."""
    names = fs.list(path)
    if names and all(RANK_FILE.fullmatch(name) for name in names):
        remove_tree(fs, path)


def _exists(fs: FileSystem, path: str) -> bool:
    if fs.is_link(path):
        return True  # whatever it points to
    try:
        fs.size(path)
    except FileNotFoundError:
        return False
    return True


def remove_tree(fs: FileSystem, path: str) -> None:
    """Remove a checkpoint's directory, the manifest first, and what others have put into it.

    Links in it are removed, not followed. Parts of it that are gone already are no error.
    """
    try:
        names = fs.list(path)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda name: name != MANIFEST):
        inner = os.path.join(path, name)
        try:
            fs.remove(inner)
        except FileNotFoundError:
            pass
        except OSError as problem:  # what unlink says of a directory: EISDIR on Linux, EPERM elsewhere
            if problem.errno not in (errno.EISDIR, errno.EPERM) or not fs.is_directory(inner):
                raise
            remove_tree(fs, inner)
    try:
        fs.remove_directory(path)
    except FileNotFoundError:
        pass


def publish(fs: FileSystem, root: str, staging: str, step: int, run_id: str) -> str | None:
    """Move a complete directory to its final name, in one step where the file system has one.

    Returns:
        Where the version of this step that was replaced is now, if there was one.
    """
    final = os.path.join(root, step_directory(step))
    try:
        fs.rename(staging, final)
        return None
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    try:
        fs.exchange(staging, final)
        return staging
    except OSError as problem:
        if problem.errno != errno.ENOSYS:
            raise
    aside = _working(root, step, run_id, "replaced")
    fs.rename(final, aside)  # readers accept this name while the final one is absent
    fs.rename(staging, final)
    return aside


def withdraw(fs: FileSystem, root: str, step: int, run_id: str, replaced: str | None) -> None:
    """Take back what was published a moment ago and is not whole; the version that it replaced returns."""
    retire(fs, root, os.path.join(root, step_directory(step)), step, run_id)
    if replaced is not None:
        fs.rename(replaced, os.path.join(root, step_directory(step)))


def retain(fs: FileSystem, root: str, keep: int, saved: int, run_id: str) -> None:
    """Remove published checkpoints beyond the ``keep`` highest steps, never the one just saved.

    A step that is a symbolic link counts, and stays: its files belong elsewhere.
    """
    found = published(fs, root)
    for path, manifest in found[:-keep]:
        if manifest.step == saved or fs.is_link(path):
            continue
        retire(fs, root, path, manifest.step, run_id)


def retire(fs: FileSystem, root: str, path: str, step: int, run_id: str) -> None:
    """Remove one step's directory so that a half-removed one is never taken for published."""
    if not fs.is_remote:  # there the manifest goes first
        doomed = _working(root, step, run_id, "removing")
        fs.rename(path, doomed)
        fs.flush_directory(root)
        path = doomed
    remove_tree(fs, path)
