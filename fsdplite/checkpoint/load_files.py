"""Hugging Face folders into models: each rank reads the ranges that it holds."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import CheckpointError, ConfigError
from . import model_state
from ..keywords import known_keywords
from .agree import Agreement
from .catalog import PUBLISHED, root_path
from .dtypes import ITEMSIZE
from .export import INDEX, SINGLE
from .load import LoadReport
from .manifest import MANIFEST, Manifest, Range, TensorRecord
from .model_state import ModelState
from .read_model import Reading, refuse_unfilled
from .remote import file_system
from .storage import FileSystem, read_all
from .wanted import Differences
from .world import alone, is_wrapped, world_of

__all__ = ["load_safetensors"]

Rename = Callable[[str], str | None] | Mapping[str, str | None] | None


@known_keywords
def load_safetensors(model: nn.Module, folder: Any, *, rename: Rename = None, strict: bool = True) -> LoadReport:
    """Load weights from a folder of safetensors files, as Hugging Face lays them out, into a model, wrapped or not.

    Each rank reads only its ranges. Tied weights take whichever of their names the files have. Widening casts are
    exact and allowed; a narrowing one is an error (export with ``dtype=``, or keep masters: ``precision="bf16"``).

    Args:
        model: Wrapped, containing wrapped modules, or plain.
        folder: Holds ``model.safetensors``, or an index and its files, or any ``*.safetensors``. Or one such file.
        rename: From names in the files to names in the model: a function or a mapping (names that it lacks stay).
            None as the new name leaves a tensor out.
        strict: Missing and unexpected names are an error, listed together.

    Returns:
        A report with ``missing``, ``unexpected`` and ``bytes_read``; its ``step`` is None.

    Collective for a wrapped model (messages through the store, small); a plain module loads as a world of one.

    Memory: one block of 3 MiB.
    """
    agreement = Agreement(world_of(model) if is_wrapped(model) else alone(), "load_safetensors")
    with agreement.open():
        agreement.phase = "find"
        fs = file_system(root_path(folder))
        base, names, listed = _find(fs, root_path(folder))
        reading = Reading(agreement, fs, base)
        try:
            return _load(reading, model, names, listed, rename, strict)
        finally:
            reading.close()


def _find(fs: FileSystem, folder: str) -> tuple[str, list[str], dict[str, str]]:
    """The directory, the names of its files, and of each tensor that an index lists the file that has it."""
    try:
        names = fs.list(folder)
    except NotADirectoryError:
        above, name = os.path.split(folder)
        return _find(fs, above) if name == INDEX else (above, [name], {})
    except FileNotFoundError:
        raise CheckpointError(
            "there is no such folder", expected="a folder of safetensors files, or one such file", phase="find",
            path=folder, errno=errno.ENOENT, cure="a name on a hub is not a path: download the folder first",
        ) from None  # fmt: skip
    if MANIFEST in names or any(PUBLISHED.fullmatch(name) for name in names):
        raise CheckpointError(
            "this folder is a checkpoint" if MANIFEST in names else "this folder is a root of checkpoints",
            phase="find", path=folder,
            cure=f'use fsdp.load_checkpoint("{folder}", model), or make a folder with fsdp.export_safetensors',
        )  # fmt: skip
    if INDEX in names:
        path = os.path.join(folder, INDEX)
        try:
            listed = json.loads(read_all(fs, path))["weight_map"]
            wanted = list(dict.fromkeys(listed.values()))
            if strange := [name for name in wanted if not isinstance(name, str)]:
                raise ValueError(f"{strange[0]!r} is listed as a file")
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError("the index cannot be read", found=repr(problem), phase="find", path=path) from None
        absent = [name for name in wanted if name not in names]
        if absent:
            raise CheckpointError(
                "the index lists files that are not here",
                found=absent[:5],
                phase="find",
                path=os.path.join(folder, absent[0]),
            )
        return folder, wanted, listed
    if SINGLE in names:
        return folder, [SINGLE], {}
    found = [name for name in names if name.endswith(".safetensors")]
    parts = [name for name in found if name.startswith("model-") and "-of-" in name]
    if not found or parts:
        raise CheckpointError(
            "there is no model here" if not found else "these are parts of a model, and their index is missing",
            expected=f"{SINGLE}, or {INDEX} with its files",
            found=", ".join(names[:10]) or "an empty folder",
            phase="find",
            path=folder,
            errno=errno.ENOENT,
        )
    return folder, found, {}


def _renamed(rename: Rename, name: str) -> str | None:
    if rename is None:
        return name
    new = rename(name) if callable(rename) else rename.get(name, name)
    if new is not None and not isinstance(new, str):
        raise ConfigError(
            f"rename makes something else than a name of '{name}'",
            expected="the name in the model, or None to leave the tensor out",
            found=repr(new),
            parameter=name,
        )
    return new


def _load(
    reading: Reading, model: nn.Module, names: list[str], listed: dict[str, str], rename: Rename, strict: bool
) -> LoadReport:
    manifest, inside = _as_manifest(reading, names, listed, rename)
    reading.agreement.phase = "compare"
    state: ModelState = model_state.collect(model)
    differences = Differences()
    stored = reading.match(manifest, state, False, differences)
    targets, write_backs = reading.model_targets(state, stored)
    differences.refuse(strict, reading.folder, may_cast=False)
    reading.prepare(manifest, [], targets, inside)
    reading.fill(state, [t for t in state.tensors if t.name in stored], write_backs)
    report = LoadReport(
        step=None,
        missing=list(differences.missing),
        unexpected=list(differences.unexpected),
        bytes_read=reading.bytes_read,
    )
    refuse_unfilled(state, report.missing)
    return report


def _as_manifest(
    reading: Reading, names: list[str], listed: dict[str, str], rename: Rename
) -> tuple[Manifest, dict[str, str]]:
    """The files' headers as one manifest under the model's names, and the names in the files."""
    manifest = Manifest(step=0, world_size=len(names), mesh=(1, 1), run_id="", created=0.0)
    inside: dict[str, str] = {}
    absent = dict(listed)
    for number, name in enumerate(names):
        file = reading.open(number, name, None)
        for spec in file.header.tensors.values():
            absent.pop(spec.name, None)
            new = _renamed(rename, spec.name)
            if new is None:
                continue
            if new in inside:
                raise ConfigError(
                    f"two tensors in the files would both be '{new}'", found=[inside[new], spec.name], parameter=new
                )
            inside[new] = spec.name
            ranges = (Range(number, 0, spec.size_bytes // ITEMSIZE[spec.dtype]),) if spec.size_bytes else ()
            manifest.tensors[new] = TensorRecord(spec.dtype, spec.shape, "replicated", ranges)
    if absent:
        name = next(iter(absent))
        raise CheckpointError(
            f"the index lists {len(absent)} tensors that none of its files holds" if len(absent) > 1 else
            "the index lists a tensor that none of its files holds",
            found=f"'{name}', listed in {absent[name]}",
            parameter=name,
            phase="find",
            path=os.path.join(reading.folder, absent[name]),
            cure="get the whole folder again: its files and its index are of different versions",
        )  # fmt: skip
    return manifest, inside
