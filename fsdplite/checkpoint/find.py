"""Which checkpoint a path means, and what lies there when it means none. No torch.

A path is a root, which stands for its latest published step, or the directory of one step, which stands for itself.
"""

from __future__ import annotations

import contextlib
import errno
import os

from ..errors import CheckpointError, ConfigError, did_you_mean
from .catalog import PUBLISHED, RANK_FILE, WORKING, defect, load_manifest, published, published_itself
from .manifest import MANIFEST, step_directory
from .storage import FileSystem, is_url

__all__ = ["cure_of_missing", "find_step", "locate", "roots_below"]

_ROOTS_LOOKED_AT = 20
_LEVELS_LOOKED_AT = 3


def find_step(fs: FileSystem, path: str, step: int | str) -> str:
    """The directory of a published step, or of the latest. ``path`` is a root, or the directory of that very step."""
    if step != "latest" and (not isinstance(step, int) or isinstance(step, bool)):
        raise ConfigError("step is a number or 'latest'", found=repr(step))
    try:
        found = {manifest.step: folder for folder, manifest in published(fs, path)}
    except NotADirectoryError:
        raise _a_file(path) from None
    if found:
        wanted = max(found) if step == "latest" else step
        if wanted in found:
            return found[wanted]
        raise _other_steps(fs, path, wanted, sorted(found))
    itself = published_itself(fs, path)
    if itself is None:
        what = "there is no published checkpoint" if step == "latest" else f"step {step} is not published"
        raise _nothing(fs, path, what)
    if step not in ("latest", itself.step):
        raise CheckpointError(
            f"step {step} is not published here: this is the directory of step {itself.step}",
            phase="find",
            path=path,
            cure=f"give the root, {os.path.dirname(path)}, and step={step}",
        )
    return path


def locate(fs: FileSystem, path: str) -> str:
    """The directory of one checkpoint, published or not: ``path`` itself, or the latest step if it is a root."""
    try:
        fs.size(os.path.join(path, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return find_step(fs, path, "latest")
    return path


def _other_steps(fs: FileSystem, root: str, step: int, steps: list[int]) -> CheckpointError:
    folder = os.path.join(root, step_directory(step))
    why = _why_unpublished(fs, folder)
    shown = steps if len(steps) <= 10 else ["...", *steps[-10:]]
    return CheckpointError(
        f"step {step} is not published here" + (f": {os.path.basename(folder)} {why}" if why else ""),
        found="steps " + ", ".join(map(str, shown)),
        phase="find",
        path=root,
        cure=f"pass step= with one of those, or leave it out for the latest, {steps[-1]}",
    )


def _why_unpublished(fs: FileSystem, folder: str) -> str | None:
    """What is wrong with a step's directory; None if there is none."""
    try:
        names = fs.list(folder)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return "is a file"
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        return "is a loop of symbolic links"
    if MANIFEST not in names:
        return "is there, without a manifest: a save that was not finished" if names else "is there, and empty"
    try:
        manifest = load_manifest(fs, folder)
        problem = defect(fs, folder, manifest) or f"its manifest is of step {manifest.step}"
    except CheckpointError as error:
        problem = f"{MANIFEST}: {error.problem}"
    return f"is there, and is not complete: {problem}"


def _a_file(path: str) -> CheckpointError:
    folder, name = os.path.split(path)
    cure = "give a directory: the root that save_checkpoint was given, or a step-<n> in it"
    if name == MANIFEST or RANK_FILE.fullmatch(name):
        cure = f"give the directory that it belongs to, {folder}"
    elif name.endswith(".safetensors"):
        cure = f'weights alone are loaded with fsdp.load_safetensors(model, "{path}")'
    return CheckpointError(
        "there is no published checkpoint here: this is a file", phase="find", path=path, cure=cure
    )


def _nothing(fs: FileSystem, path: str, what: str) -> CheckpointError:
    """Nothing under ``path`` is published: what is there instead, and what to do about it."""
    try:
        names = fs.list(path)
    except FileNotFoundError:
        return _missing(fs, path, what)
    steps = sorted(int(match[1]) for name in names if (match := PUBLISHED.fullmatch(name)))
    weights = [name for name in names if name.endswith(".safetensors") and not RANK_FILE.fullmatch(name)]
    found = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    cure: str | None = "give the root that save_checkpoint was given, or a step-<n> in it"
    if not names:
        why, found = "the directory is empty", ""
    elif MANIFEST in names or any(RANK_FILE.fullmatch(name) for name in names):
        why = f"this directory {_why_unpublished(fs, path)}"
        cure = f"give the root, {os.path.dirname(path)}: its latest complete step is loaded"
    elif steps:
        folder = os.path.join(path, step_directory(steps[-1]))
        why = f"{os.path.basename(folder)} {_why_unpublished(fs, folder)}"
        cure = f"`fsdplite ckpt ls {path}` says what is wrong with each"
    elif any(WORKING.fullmatch(name) for name in names):
        why = "only what a save has left that failed, or is in flight"
        cure = None
    elif weights:
        why = "these are weights alone"
        cure = f'load them with fsdp.load_safetensors(model, "{path}")'
    else:
        why = "no step-<n> is in it"
        if roots := roots_below(fs, path, names):
            cure = f"one level down there are some: give {_listed(roots)}"
    return CheckpointError(f"{what} here: {why}", found=found or None, phase="find", path=path, cure=cure)


def _missing(fs: FileSystem, path: str, what: str) -> CheckpointError:
    problem = f"{what} here: there is no such directory"
    return CheckpointError(problem, phase="find", path=path, cure=cure_of_missing(fs, path))


def cure_of_missing(fs: FileSystem, path: str) -> str:
    """What to give in place of a directory that is not there: a root above it or beside it, or one with such a name."""
    above, beside = path, []
    for _ in range(_LEVELS_LOOKED_AT):
        above, name = os.path.split(above)
        if is_url(path) and not is_url(above):
            break  # above the root of its file system
        with contextlib.suppress(OSError):
            beside = fs.list(above)
            break
    if MANIFEST in beside and published_itself(fs, above) is not None:
        return f"give the checkpoint itself, {above}"
    steps = [manifest.step for _, manifest in published(fs, above)] if beside else []
    if steps and PUBLISHED.fullmatch(name):
        return f"the steps in {above} are {', '.join(map(str, steps[-10:]))}"
    if steps:
        return f"give the root, {above}: its latest step, {steps[-1]}, is what is loaded"
    cure = f"give the root that save_checkpoint was given{did_you_mean(name, beside)}"
    roots = roots_below(fs, above, beside)
    return cure + (f"; in {above} there are {_listed(roots)}" if roots else "")


def _listed(roots: list[str]) -> str:
    return " or ".join(roots[:3]) + (f" and {len(roots) - 3} more" if len(roots) > 3 else "")


def roots_below(fs: FileSystem, path: str, names: list[str]) -> list[str]:
    """Those of the first names in a directory that are roots of checkpoints, as paths."""
    roots = []
    for name in names[:_ROOTS_LOOKED_AT]:
        try:
            inside = fs.list(os.path.join(path, name))
        except OSError:
            continue
        if any(PUBLISHED.fullmatch(inner) for inner in inside):
            roots.append(os.path.join(path, name))
    return roots
