"""Loading: each rank reads the ranges it holds, from whatever files have them, and proves every byte."""

from __future__ import annotations

import os
import warnings
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, FSDPError
from ..fsdp_unit import state_of
from . import background, catalog, model_state
from .agree import Agreement, World, alone, world_of
from .manifest import MANIFEST, Manifest, decode, intersect
from .model_state import ModelState, ModelTensor
from .optimizer_load import OptimizerLoad
from .reading import BUFFER_BYTES, RankFile, Request, refuse_damage
from .storage import FileSystem, file_system, read_all
from .dtypes import ITEMSIZE
from .tensor_bytes import bytes_of
from .values import decode_value, unpack
from .wanted import Differences, Target, check_dtype, describe, into_memory, sink

__all__ = ["LoadReport", "load_checkpoint"]


@dataclass
class LoadReport:
    """What :func:`load_checkpoint` did.

    Attributes:
        step: Of the checkpoint.
        extra: What was saved as ``extra``.
        per_rank: What this rank saved as ``per_rank``; None if the checkpoint has none for it.
        missing: Names of the model's tensors that the checkpoint does not hold (with ``strict=False``).
        unexpected: Names in the checkpoint that the model does not have.
        bytes_read: Of tensor data, by this rank; without the manifest and headers.
    """

    step: int
    extra: Any = None
    per_rank: Any = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_read: int = 0


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
        root: The directory that holds the ``step-<n>`` directories.
        model: Wrapped, containing wrapped modules, or plain.
        optimizer: Gets its state and the settings of its groups, matched by the names of their parameters.
        step: Which; ``"latest"`` is the highest one published.
        strict: Missing and unexpected names are an error, listed together.
        allow_cast: Allow casts that round (fp32 to bf16). Widening casts are exact and always allowed.

    Raises:
        CheckpointError: With everything that does not fit, or the file, tensor and chunk that is damaged.

    Collective for a wrapped model (messages through the store, small); a plain module loads as a world of one.

    Memory: one block of 3 MiB, and the optimizer's new state while it still has an old one.
    """
    is_wrapped = any(state_of(module) is not None for module in model.modules())
    world = world_of(model) if is_wrapped else alone()
    agreement = Agreement(world, "load_checkpoint")
    with agreement.open():
        background.drain()
        load = _Load(agreement, file_system(), catalog.root_path(root), step)
        try:
            return load.run(model, optimizer, strict, allow_cast)
        finally:
            load.close()


class _Load:
    """One rank's part of one load."""

    def __init__(self, agreement: Agreement, fs: FileSystem, root: str, step: int | str) -> None:
        self._agreement = agreement
        self._world: World = agreement.world
        self._fs = fs
        self._files: dict[int, RankFile] = {}
        self._path, self._manifest = self._find(root, step)

    def _find(self, root: str, step: int | str) -> tuple[str, Manifest]:
        """Rank 0 decides which; the others read the same manifest."""
        agreement = self._agreement
        agreement.phase, agreement.path = "find", root
        if self._world.size == 1:
            path = catalog.find_step(self._fs, root, step)
            return path, catalog.load_manifest(self._fs, path)
        if self._world.is_first:
            path = catalog.find_step(self._fs, root, step)
            raw = read_all(self._fs, os.path.join(path, MANIFEST))
            agreement.tell("go", {"path": path, "crc32": zlib.crc32(raw), "bytes": len(raw)})
        else:
            go = agreement.hear("go")
            path = go["path"]
            raw = read_all(self._fs, os.path.join(path, MANIFEST))
            if (zlib.crc32(raw), len(raw)) != (go["crc32"], go["bytes"]):
                raise CheckpointError(
                    f"rank {self._world.rank} sees another manifest than rank {self._world.ranks[0]}",
                    phase="find",
                    path=path,
                    cure="the root must be one directory on a file system that all ranks share",
                )
        return path, decode(raw, os.path.join(path, MANIFEST))

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    # ------------------------------------------------------------------ the order of things

    def run(self, model: nn.Module, optimizer: Any, strict: bool, allow_cast: bool) -> LoadReport:
        agreement, manifest = self._agreement, self._manifest
        agreement.phase, agreement.path = "compare", self._path
        state = model_state.collect(model)
        differences = Differences()
        stored = self._match(state, allow_cast, differences)
        targets, write_backs = self._model_targets(state, stored)
        load = None
        if optimizer is not None:
            load = OptimizerLoad(optimizer, state, manifest, stored, allow_cast, differences)
            differences.unexpected.update(load.unexpected(stored))
            targets += load.targets
        differences.refuse(strict, self._path)
        extra_tensors = self._extra_targets(targets)
        own = self._own_values(targets)
        agreement.phase = "open"
        requests = self._requests(targets)
        self._together("ready")
        agreement.phase = "read"
        loaded = [t for t in state.tensors if t.name in stored]
        try:
            self._read(requests)
            self._together("done")
        except BaseException:
            _distrust(loaded)
            raise
        for write_back in write_backs:
            write_back()
        _trust(loaded)
        if load is not None:
            load.install()
        report = LoadReport(
            step=manifest.step,
            extra=decode_value(manifest.extra, extra_tensors),
            per_rank=self._unpack_own(own),
            missing=list(differences.missing),
            unexpected=list(differences.unexpected),
            bytes_read=sum(file.bytes_read for file in self._files.values()),
        )
        refuse_unfilled(state, report.missing)
        return report

    def _together(self, name: str) -> None:
        """Nobody goes on before all have come here without an error."""
        agreement = self._agreement
        if self._world.is_first:
            agreement.collect(name, True)
            agreement.tell(f"all {name}", True)
        else:
            agreement.post(name, True)
            agreement.hear(f"all {name}")

    # ------------------------------------------------------------------ what is wanted

    def _match(self, state: ModelState, allow_cast: bool, differences: Differences) -> dict[str, str]:
        """For each tensor of the model the name under which it is stored; differences are noted."""
        manifest = self._manifest
        stored: dict[str, str] = {}
        left_out = set(manifest.left_out)
        for entry in state.tensors:
            name = next((found for n in entry.names if (found := manifest.find(n)) in manifest.tensors), None)
            if name is None:
                is_left_out = any(n in left_out or manifest.aliases.get(n) in left_out for n in entry.names)
                if not is_left_out:
                    differences.missing[entry.name] = f"of shape {entry.shape}, {entry.dtype}"
                continue
            record = manifest.tensors[name]
            stored[entry.name] = name
            if record.shape != entry.shape:
                differences.wrong.append(
                    f"shape: '{entry.name}' is stored with shape {record.shape}, wanted with {entry.shape}"
                )
            check_dtype(entry.name, record.dtype, entry.dtype, allow_cast, differences)
        known = {name for entry in state.tensors for name in entry.names}
        used = set(stored.values())
        for name, record in manifest.model_tensors().items():
            if name not in used and name not in known:
                differences.unexpected[name] = describe(record)
        return stored

    def _model_targets(self, state: ModelState, stored: dict[str, str]) -> tuple[list[Target], list[Any]]:
        targets, write_backs = [], []
        for entry in state.tensors:
            if entry.name not in stored:
                continue
            low, high = entry.local_range()
            if entry.flat is not None:
                into = entry.local()
            elif entry.tensor.is_meta:
                raise CheckpointError(
                    "a tensor is on the meta device and has no memory to load into",
                    parameter=entry.name,
                    cure="wrap the model first (fsdp_wrap materialises it), or call model.to_empty(device=...)",
                )
            else:
                into, write_back = into_memory(entry.tensor)
                write_backs.append(write_back)
            if low < high:
                targets.append(Target(stored[entry.name], low, high, into))
        return targets, write_backs

    def _extra_targets(self, targets: list[Target]) -> dict[str, torch.Tensor]:
        from .tensor_bytes import torch_dtype

        tensors = {}
        for name, record in self._manifest.tensors.items():
            if name.startswith("extra/"):
                tensor = torch.empty(record.numel, dtype=torch_dtype(record.dtype))
                targets.append(Target(name, 0, record.numel, tensor))
                tensors[name.removeprefix("extra/")] = tensor.reshape(record.shape)
        return tensors

    def _own_values(self, targets: list[Target]) -> torch.Tensor | None:
        manifest = self._manifest
        index = self._world.index
        if self._world.size == 1 and dist.is_available() and dist.is_initialized():
            index = dist.get_rank()  # a plain module, loaded by each rank on its own
            size = dist.get_world_size()
        else:
            size = self._world.size
        saved = [int(n.removeprefix("per_rank/")) for n, t in manifest.tensors.items() if t.kind == "per_rank"]
        left = [rank for rank in saved if rank >= size]
        if index == 0 and left:
            warnings.warn(
                f"per_rank values of {len(left)} ranks (first: rank {left[0]}) were left out: the checkpoint was saved "
                f"on {manifest.world_size} ranks, this run has {size}",
                UserWarning,
                stacklevel=5,
            )
        record = manifest.tensors.get(f"per_rank/{index}")
        if record is None:
            if saved and index >= manifest.world_size:
                warnings.warn(
                    f"rank {index} has no per_rank values: the checkpoint was saved on {manifest.world_size} ranks",
                    UserWarning,
                    stacklevel=5,
                )
            return None
        data = torch.empty(record.numel, dtype=torch.uint8)
        targets.append(Target(f"per_rank/{index}", 0, record.numel, data))
        return data

    def _unpack_own(self, data: torch.Tensor | None) -> Any:
        return None if data is None else unpack(bytes(bytes_of(data)), self._path)

    # ------------------------------------------------------------------ reading

    def _requests(self, targets: list[Target]) -> dict[int, list[list[Request]]]:
        """Open what is needed and ask each file for its bytes. Headers are checked here."""
        manifest = self._manifest
        by_file: dict[int, dict[str, list[Request]]] = {}
        for target in targets:
            record = manifest.tensors[target.source]
            itemsize = ITEMSIZE[record.dtype]
            for piece in intersect(record, target.low, target.high):
                request = Request(
                    target.source,
                    piece.offset * itemsize,
                    (piece.offset + piece.count) * itemsize,
                    sink(target, record.dtype, piece.first),
                )
                by_file.setdefault(piece.file, {}).setdefault(target.source, []).append(request)
        result = {}
        for number, requests in by_file.items():
            name = manifest.files[number].name
            self._agreement.path = os.path.join(self._path, name)
            file = self._files[number] = RankFile(self._fs, self._agreement.path, manifest.files[number])
            self._check_ranges(number, file, requests)
            # Tied names may want the same bytes twice: each round asks for a tensor once.
            rounds = max(len(several) for several in requests.values())
            result[number] = [[r[i] for r in requests.values() if i < len(r)] for i in range(rounds)]
            self._agreement.advance()
        return result

    def _check_ranges(self, number: int, file: RankFile, requests: dict[str, list[Request]]) -> None:
        for name in requests:
            record = self._manifest.tensors[name]
            count = next(part.count for part in record.ranges if part.file == number)
            spec = file.header.tensors.get(name)
            if spec is None or (spec.dtype, spec.numel) != (record.dtype, count):
                raise CheckpointError(
                    "a file does not hold what the manifest lists",
                    expected=f"{count} elements of {record.dtype}",
                    found="nothing" if spec is None else f"{spec.numel} elements of {spec.dtype}",
                    parameter=name,
                    phase="read",
                    path=file.path,
                )

    def _read(self, requests: dict[int, list[list[Request]]]) -> None:
        """File by file, begun at a place that depends on the rank, so that not all ranks read the same one first."""
        buffer = memoryview(bytearray(BUFFER_BYTES))
        numbers = sorted(requests)
        start = self._world.index * len(numbers) // self._world.size if numbers else 0
        for number in numbers[start:] + numbers[:start]:
            file = self._files[number]
            self._agreement.path = file.path
            for wanted in requests[number]:
                file.read([self._watched(request) for request in wanted], buffer, refuse_damage)

    def _watched(self, request: Request) -> Request:
        def take(offset: int, view: memoryview) -> None:
            request.take(offset, view)
            self._agreement.advance()

        return Request(request.name, request.low, request.high, take)


def _trust(loaded: list[ModelTensor]) -> None:
    """Tell the engine: these have values now, and what was gathered before is stale."""
    for entry in loaded:
        if entry.flat is not None:
            entry.flat.mark_filled(entry.index)
    for flat in {id(entry.flat): entry.flat for entry in loaded if entry.flat is not None}.values():
        flat.mark_updated()


def _distrust(loaded: list[ModelTensor]) -> None:
    """A load ended in the middle: the model holds a mixture, and its next forward refuses it."""
    for entry in loaded:
        if entry.flat is not None:
            entry.flat.unfilled.add(entry.index)
            entry.flat.unit.schedule.unfilled[entry.flat.names[entry.index]] = (entry.flat, entry.index)
            entry.flat.mark_updated()


def refuse_unfilled(state: ModelState, missing: list[str]) -> None:
    """Raise if a tensor from the meta device still has no values. Those in ``missing`` were left out on purpose."""
    names = [name for name in model_state.unfilled_names(state) if name not in missing]
    if names:
        raise FSDPError(
            "tensors built on the meta device have no values after the load",
            found=", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else ""),
            cure="give their module a reset_parameters() that fills them (non-persistent buffers are in no checkpoint), "
            "or build that module off the meta device",
        )
