"""Loading: each rank reads the ranges it holds, from whatever files have them, and proves every byte."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..arguments import expect_module
from ..errors import CheckpointError, RankMismatchError
from ..user_warning import warn_user
from . import background, catalog, model_state
from ..keywords import known_keywords
from .agree import Agreement
from .find import find_step
from .manifest import MANIFEST, Manifest, decode
from .optimizer_load import OptimizerLoad, prepare
from .read_model import Reading, refuse_unfilled
from .remote import file_system
from .storage import FileSystem, read_all
from .tensor_bytes import bytes_of, host_empty, torch_dtype
from .values import decode_value, unpack
from .wanted import Differences, Target
from .world import World, alone, is_wrapped, world_of

__all__ = ["LoadReport", "load_checkpoint"]


@dataclass
class LoadReport:
    """What :func:`load_checkpoint` or :func:`load_safetensors` did.

    Attributes:
        step: Of the checkpoint; None for a folder of safetensors files, which has none.
        extra: What was saved as ``extra``.
        per_rank: What this rank saved as ``per_rank``; None if the checkpoint has none for it.
        missing: Names of the model's tensors that the checkpoint does not hold (with ``strict=False``).
        unexpected: Names in the checkpoint that the model does not have.
        bytes_read: Of tensor data, by this rank; without the manifest and headers.
        notes: What else ``strict=True`` would have refused, in words.
    """

    step: int | None
    extra: Any = None
    per_rank: Any = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_read: int = 0
    notes: list[str] = field(default_factory=list)


@known_keywords
def load_checkpoint(
    root: Any,
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int | str = "latest",
    strict: bool = True,
    allow_cast: bool = False,
) -> LoadReport:
    """Load a step into a model, wrapped or not, and its optimizer. World size, stage, mesh and policy may be others.

    Names, shapes, dtypes and headers are compared on all ranks before anything is written; every byte is checked
    before it is used. If data turn out to be damaged in the middle of a load, all ranks raise, and a wrapped model
    refuses its forward until a load has succeeded.

    Args:
        root: The directory that holds the ``step-<n>`` directories, or one of those.
        model: Wrapped, containing wrapped modules, or plain.
        optimizer: Of the class that was saved. Gets its state and the settings of its groups, matched by the names of
            their parameters.
        step: Which; ``"latest"`` is the highest one published.
        strict: Missing and unexpected names, and another class of optimizer, are an error, listed together.
        allow_cast: Allow casts that round (fp32 to bf16). Widening casts are exact and always allowed.

    Raises:
        ConfigError: An argument cannot be used.
        CheckpointError: With everything that does not fit, or the file, tensor and chunk that is damaged.

    Collective for a wrapped model (messages through the store, small); a plain module loads as a world of one.

    Memory: one block of 3 MiB, and the optimizer's new state while it still has an old one.
    """
    expect_module(model, "fsdp.load_checkpoint(root, model, optimizer)")
    agreement = Agreement(world_of(model) if is_wrapped(model) else alone(), "load_checkpoint")
    with agreement.open():
        background.settle()
        base = catalog.root_path(root)
        fs = file_system(base)
        options = {"step": step, "strict": strict, "allow_cast": allow_cast, "optimizer": optimizer is not None}
        path, manifest = _find(agreement, fs, base, options)
        reading = Reading(agreement, fs, path)
        try:
            return _Load(reading, path, manifest).run(model, optimizer, strict, allow_cast)
        except (CheckpointError, OSError) as problem:
            what = catalog.changed_meanwhile(fs, path, manifest)
            if what is None:
                raise
            raise CheckpointError(
                f"step {manifest.step} {what}", phase=agreement.phase, path=path, cure="load again, or another step"
            ) from problem
        finally:
            reading.close()


def _find(agreement: Agreement, fs: FileSystem, root: str, options: dict[str, Any]) -> tuple[str, Manifest]:
    """Rank 0 decides which; the others read the same manifest."""
    world = agreement.world
    agreement.phase, agreement.path = "find", root
    if world.is_first:
        path = find_step(fs, root, options["step"])
        raw = read_all(fs, os.path.join(path, MANIFEST))
        agreement.tell("go", {"path": path, "crc32": zlib.crc32(raw), "bytes": len(raw), "options": options})
    else:
        go = agreement.hear("go")
        path = go["path"]
        for name, value in options.items():
            if go["options"][name] != value:
                raise RankMismatchError(
                    f"argument '{name}' differs between rank {world.ranks[0]} and rank {world.rank}",
                    found=f"{go['options'][name]!r} and {value!r}",
                    cure="every rank must load the same step with the same arguments",
                )
        raw = read_all(fs, os.path.join(path, MANIFEST))
        if (zlib.crc32(raw), len(raw)) != (go["crc32"], go["bytes"]):
            raise CheckpointError(
                f"rank {world.rank} sees another manifest than rank {world.ranks[0]}",
                phase="find",
                path=path,
                cure="the root must be one directory on a file system that all ranks share",
            )
    return path, decode(raw, os.path.join(path, MANIFEST))


class _Load:
    """One rank's part of one load."""

    def __init__(self, reading: Reading, path: str, manifest: Manifest) -> None:
        self._reading = reading
        self._world: World = reading.agreement.world
        self._path = path
        self._manifest = manifest

    def run(self, model: nn.Module, optimizer: Any, strict: bool, allow_cast: bool) -> LoadReport:
        reading, manifest = self._reading, self._manifest
        reading.agreement.phase, reading.agreement.path = "compare", self._path
        if optimizer is not None:
            prepare(optimizer)
        state = model_state.collect(model)
        differences = Differences()
        stored = reading.match(manifest, state, allow_cast, differences)
        targets, write_backs = reading.model_targets(state, stored)
        load = None
        if optimizer is not None:
            load = OptimizerLoad(optimizer, state, manifest, stored, allow_cast, differences)
            differences.unexpected.update(load.unexpected(stored))
            targets += load.targets
        differences.refuse(strict, self._path)
        values: list[Target] = []
        extra_tensors = self._extra_targets(values)
        own = self._own_values(values)
        reading.prepare(manifest, values, targets)
        # Before the first weight changes: these may turn out to be nothing that a save writes.
        extra = decode_value(manifest.extra, extra_tensors, "extra")
        per_rank = None if own is None else unpack(bytes(bytes_of(own)), self._path, "per_rank")
        if load is not None:
            write_backs.append(load.install)
        loaded = [t for t in state.tensors if t.name in stored]
        reading.fill(state, loaded, write_backs, None if load is None else load.begin)
        report = LoadReport(
            step=manifest.step,
            extra=extra,
            per_rank=per_rank,
            missing=list(differences.missing),
            unexpected=list(differences.unexpected),
            bytes_read=reading.bytes_read,
            notes=list(differences.notes),
        )
        refuse_unfilled(state, report.missing)
        return report

    @torch.inference_mode(False)
    def _extra_targets(self, targets: list[Target]) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, record in self._manifest.tensors.items():
            if name.startswith("extra/"):
                tensor = host_empty(record.numel, torch_dtype(record.dtype))
                targets.append(Target(name, 0, record.numel, tensor))
                tensors[name.removeprefix("extra/")] = tensor.reshape(record.shape)
        return tensors

    def _own_values(self, targets: list[Target]) -> torch.Tensor | None:
        manifest = self._manifest
        index, size = self._world.index, self._world.size
        if self._world.is_alone and dist.is_available() and dist.is_initialized():
            index, size = dist.get_rank(), dist.get_world_size()  # a plain module, which all ranks have saved together
        saved = [_rank_of(name, self._path) for name, t in manifest.tensors.items() if t.kind == "per_rank"]
        left = [rank for rank in saved if rank >= size]
        if index == 0 and left:
            warn_user(
                f"per_rank values of {len(left)} ranks (first: rank {left[0]}) were left out: the checkpoint was saved "
                f"on {manifest.world_size} ranks, this run has {size}"
            )
        record = manifest.tensors.get(f"per_rank/{index}")
        if record is None:
            if saved and index >= manifest.world_size:
                warn_user(
                    f"rank {index} has no per_rank values: the checkpoint was saved on {manifest.world_size} ranks"
                )
            return None
        data = host_empty(record.numel, torch.uint8)
        targets.append(Target(f"per_rank/{index}", 0, record.numel, data))
        return data


def _rank_of(name: str, path: str) -> int:
    number = name.removeprefix("per_rank/")
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise CheckpointError(
            f"'{name}' is of no rank", expected="per_rank/<rank>", parameter=name, phase="compare", path=path
        )
    return int(number)
