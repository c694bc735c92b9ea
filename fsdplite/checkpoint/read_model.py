"""Reading tensors into a model from open files: what ``load_checkpoint`` and ``load_safetensors`` share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from .. import events
from ..errors import CheckpointError, FSDPError
from ..unfilled import listed
from . import model_state
from .agree import Agreement
from .dtypes import ITEMSIZE
from .manifest import FileRecord, Manifest, intersect
from .model_state import ModelState, ModelTensor
from .reading import BUFFER_BYTES, RankFile, Request, refuse_damage
from .storage import FileSystem
from .wanted import Differences, Target, check_dtype, describe, into_memory, shares_memory_inside, sink

__all__ = ["Reading", "refuse_unfilled"]


class Reading:
    """The files of one load, opened as they are needed.

    Args:
        agreement: Of this call.
        fs: Where.
        folder: That holds the files.

    Attributes:
        bytes_read: Of tensor data, from files that are closed.
    """

    def __init__(self, agreement: Agreement, fs: FileSystem, folder: str) -> None:
        self.agreement = agreement
        self.folder = folder
        self._fs = fs
        self._files: dict[int, RankFile] = {}
        self._wanted: dict[int, list[list[Request]]] = {}
        self.bytes_read = 0

    def open(self, number: int, name: str, record: FileRecord | None) -> RankFile:
        """Open file ``number`` and prove its header."""
        self.agreement.path = os.path.join(self.folder, name)
        self._files[number] = RankFile(self._fs, self.agreement.path, record)
        return self._files[number]

    def close(self) -> None:
        while self._files:
            file = self._files.popitem()[1]
            self.bytes_read += file.bytes_read
            file.close()

    # ------------------------------------------------------------------ what is wanted

    def match(
        self, manifest: Manifest, state: ModelState, allow_cast: bool, differences: Differences
    ) -> dict[str, str]:
        """For each tensor of the model the name under which it is stored; differences are noted."""
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
            for other in entry.names:
                if manifest.aliases.get(other, name) != name:
                    differences.notes.append(
                        f"tied: '{other}' is '{name}' in the model, and '{manifest.aliases[other]}' in the checkpoint"
                    )
            if record.shape != entry.shape:
                differences.wrong.append(
                    f"shape: '{entry.name}' is stored with shape {record.shape}, wanted with {entry.shape}"
                )
            check_dtype(entry.name, record.dtype, entry.dtype, allow_cast, differences)
            if entry.flat is None and shares_memory_inside(entry.tensor):
                differences.wrong.append(
                    f"memory: '{entry.name}' has elements that share memory (strides {entry.tensor.stride()}), and "
                    "cannot be written to; give the model its clone()"
                )
        known = {name for entry in state.tensors for name in entry.names}
        used = set(stored.values())
        # Only a checkpoint has names of its own: in a folder without a manifest any name would be the model's.
        model_tensors = manifest.model_tensors() if manifest.files else manifest.tensors
        for name, record in model_tensors.items():
            if name not in used and name not in known:
                differences.unexpected[name] = describe(record)
        return stored

    def model_targets(self, state: ModelState, stored: dict[str, str]) -> tuple[list[Target], list[Callable[[], None]]]:
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

    # ------------------------------------------------------------------ reading

    def prepare(
        self,
        manifest: Manifest,
        values: list[Target],
        targets: list[Target],
        inside: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Open the files, prove their headers, and read what is no part of the model.

        Args:
            manifest: Of the files.
            values: Tensors of this load's own, to read at once.
            targets: Where :meth:`fill` is to put the others.
            inside: Names in the files, where they are not the manifest's.
        """
        self.agreement.phase = "open"
        first = self._requests(manifest, values, inside)
        self._wanted = self._requests(manifest, targets, inside)
        both = [request for part in (first, self._wanted) for rounds in part.values() for r in rounds for request in r]
        events.emit("load", sum(request.high - request.low for request in both))
        self.agreement.phase = "read"
        self._read(first)

    def fill(
        self,
        state: ModelState,
        loaded: list[ModelTensor],
        write_backs: list[Callable[[], None]],
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Read all targets: nothing before every rank has proved its headers, nothing used before it is checked.

        Args:
            state: The model.
            loaded: Its tensors among the targets.
            write_backs: Called when all values are there.
            begin: Called before the first is written, when no rank can refuse any more.
        """
        self._together("ready")
        try:
            if begin is not None:
                begin()
            self._read(self._wanted)
            self.close()  # what can fail on one rank comes before all hear that none has
            self._together("done")
            for write_back in write_backs:
                write_back()
        except BaseException:
            _distrust(state, loaded)
            raise
        _trust(state, loaded)

    def _together(self, name: str) -> None:
        """Nobody goes on before all have come here without an error."""
        if self.agreement.world.is_first:
            self.agreement.collect(name, True)
            self.agreement.tell(f"all {name}", True)
        else:
            self.agreement.post(name, True)
            self.agreement.hear(f"all {name}")

    def _requests(
        self, manifest: Manifest, targets: list[Target], inside: Mapping[str, str]
    ) -> dict[int, list[list[Request]]]:
        """Open what is needed and ask each file for its bytes. Headers are checked here."""
        by_file: dict[int, dict[str, list[Request]]] = {}
        for target in targets:
            record = manifest.tensors[target.source]
            itemsize = ITEMSIZE[record.dtype]
            for piece in intersect(record, target.low, target.high):
                request = Request(
                    inside.get(target.source, target.source),
                    piece.offset * itemsize,
                    (piece.offset + piece.count) * itemsize,
                    sink(target, record.dtype, piece.first),
                )
                by_file.setdefault(piece.file, {}).setdefault(target.source, []).append(request)
        result = {}
        for number, requests in by_file.items():
            if manifest.files:  # those of a folder without a manifest are open, and said themselves what they hold
                record = manifest.files[number]
                file = self._files.get(number) or self.open(number, record.name, record)
                self._check_ranges(manifest, number, file, requests)
            # Tied names may want the same bytes twice: each round asks for a tensor once.
            rounds = max(len(several) for several in requests.values())
            result[number] = [[r[i] for r in requests.values() if i < len(r)] for i in range(rounds)]
            self.agreement.advance()
        return result

    def _check_ranges(
        self, manifest: Manifest, number: int, file: RankFile, requests: dict[str, list[Request]]
    ) -> None:
        for name in requests:
            record = manifest.tensors[name]
            file.expect(name, record.dtype, next(part.count for part in record.ranges if part.file == number))

    def _read(self, requests: dict[int, list[list[Request]]]) -> None:
        """File by file, begun at a place that depends on the rank, so that not all ranks read the same one first."""
        buffer = memoryview(bytearray(BUFFER_BYTES))
        numbers = sorted(requests)
        start = self.agreement.world.index * len(numbers) // self.agreement.world.size if numbers else 0
        for number in numbers[start:] + numbers[:start]:
            file = self._files[number]
            self.agreement.path = file.path
            for wanted in requests[number]:
                file.read([self._watched(request) for request in wanted], buffer, refuse_damage)

    def _watched(self, request: Request) -> Request:
        def take(offset: int, view: memoryview) -> None:
            request.take(offset, view)
            self.agreement.advance()
            events.emit("read", len(view))

        return Request(request.name, request.low, request.high, take)


def _trust(state: ModelState, loaded: list[ModelTensor]) -> None:
    """Tell the engine: these have values now, and what was gathered before is stale."""
    for entry in loaded:
        if entry.flat is not None:
            entry.flat.mark_filled(entry.index)
    for flat in {id(entry.flat): entry.flat for entry in loaded if entry.flat is not None}.values():
        flat.mark_updated()
    names = {name for entry in loaded for name in entry.names}
    _count_versions(loaded)
    for name, schedule, inner in model_state.unfilled(state):
        if name in names:
            del schedule.unfilled[inner]


def _distrust(state: ModelState, loaded: list[ModelTensor]) -> None:
    """A load ended in the middle: the model holds a mixture, and its next forward refuses it."""
    blank = set(model_state.unfilled_names(state))  # another version would say that somebody has filled them
    _count_versions([entry for entry in loaded if entry.name not in blank])
    for entry in loaded:
        if entry.flat is not None:
            entry.flat.unit.schedule.unfilled.half_load(entry.flat, entry.index)


def _count_versions(loaded: list[ModelTensor]) -> None:
    """Tell autograd, which did not see the bytes come: a backward that needs the old values must raise."""
    for entry in loaded:
        if entry.flat is None and not entry.tensor.is_inference():
            torch.autograd.graph.increment_version(entry.tensor)


def refuse_unfilled(state: ModelState, missing: list[str]) -> None:
    """Raise if a tensor from the meta device still has no values. Those in ``missing`` were left out on purpose."""
    names = [name for name in model_state.unfilled_names(state) if name not in missing]
    if names:
        raise FSDPError(
            "tensors built on the meta device have no values after the load",
            found=listed(names),
            cure="give their module a reset_parameters() that fills them (no checkpoint holds non-persistent buffers), "
            "or build that module off the meta device",
        )
