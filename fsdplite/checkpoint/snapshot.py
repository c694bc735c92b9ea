"""Everything that one rank brings to a save, as it is at this moment, and what must be the same on all ranks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, RankMismatchError
from . import model_state, optimizer_state
from .manifest import MARKS, Range, TensorRecord, state_name
from .model_state import ModelState, ModelTensor
from .optimizer_state import OptimizerState
from .placement import written_ranges
from .tensor_bytes import bytes_of, dtype_name, flat_view, host_empty
from .values import digest, encode_value, pack
from .world import World
from .writer import Part

__all__ = ["Snapshot", "merge", "take"]


@dataclass
class Snapshot:
    """See the module docstring.

    Attributes:
        model: The model's tensors that are saved.
        left_out: Names of those that are not.
        optimizer: Its state, or None.
        extra: The JSON of ``extra``, and the tensors in it.
        per_rank: This rank's own values as bytes, or None.
        meshes: The distinct (shard group, replicate group) pairs, in model order.
        coordinates: This rank's (shard rank, replica) in each of them.
    """

    model: ModelState
    left_out: list[str]
    optimizer: OptimizerState | None
    extra: Any
    extra_tensors: dict[str, torch.Tensor]
    per_rank: bytes | None
    meshes: list[Any]
    coordinates: list[tuple[int, int]]

    @property
    def saved(self) -> list[ModelTensor]:
        gone = set(self.left_out)
        return [t for t in self.model.tensors if t.name not in gone]

    # ------------------------------------------------------------------ what must agree

    def structure(self, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Names, dtypes, shapes, settings and hashes: everything that must be the same on all ranks."""
        extra = self.extra if isinstance(self.extra, dict) and not MARKS & set(self.extra) else {"extra": self.extra}
        optimizer = self.optimizer or OptimizerState("")
        return {
            "argument": options,
            "tensor": {t.name: [t.dtype, list(t.shape), t.names[1:], t.flat is not None] for t in self.saved},
            "extra": {key: digest(value, self.extra_tensors) for key, value in extra.items()},
            "parameter group": {str(number): group for number, group in enumerate(optimizer.groups)},
            "optimizer state": {
                name: {**optimizer.sharded.get(name, {}), **optimizer.scalars.get(name, {})}
                for name in [*optimizer.sharded, *(n for n in optimizer.scalars if n not in optimizer.sharded)]
            },
        }

    def owned(self) -> list[str]:
        """Parameters of which this rank holds elements."""
        return [t.name for t in self.saved if not t.is_buffer and t.local_range()[0] < t.local_range()[1]]

    # ------------------------------------------------------------------ who writes what

    def _sections(self) -> list[tuple[Any, list[int], dict[int, ModelTensor]]]:
        """Flat parameters with the parameters of theirs that are saved."""
        members: dict[int, dict[int, ModelTensor]] = {}
        for entry in self.saved:
            if entry.flat is not None:
                members.setdefault(id(entry.flat), {})[entry.index] = entry
        return [
            (flat, sorted(members[id(flat)]), members[id(flat)]) for flat in self.model.flats if id(flat) in members
        ]

    def _mesh_of(self, flat: Any) -> int:
        return next(i for i, groups in enumerate(self.meshes) if _mesh_key(groups) == _mesh_key(flat.groups))

    def parts(self, world: World) -> list[Part]:
        """What this rank writes. Views of the live tensors, nothing is copied."""
        parts = []

        def add(entry: ModelTensor, first: int, count: int) -> None:
            start = first - entry.local_range()[0]
            parts.append(Part(entry.name, entry.dtype, entry.local()[start : start + count]))
            if self.optimizer is not None:
                for key, local in self.optimizer.local.get(entry.name, {}).items():
                    dtype = self.optimizer.sharded[entry.name][key]
                    parts.append(Part(state_name(entry.name, key), dtype, local[start : start + count]))

        for flat, included, members in self._sections():
            shard_rank, replica = self.coordinates[self._mesh_of(flat)]
            for index, first, count in written_ranges(
                flat.layout, included, shard_rank, replica, flat.groups.replicate_size
            ):
                add(members[index], first, count)
        if world.is_first:
            for entry in self.saved:
                if entry.flat is None and entry.numel:
                    add(entry, 0, entry.numel)
            for name, tensor in self.extra_tensors.items():
                if tensor.numel():
                    parts.append(Part(f"extra/{name}", dtype_name(tensor.dtype, name), flat_view(tensor)))
        if self.per_rank is not None:
            data = host_empty(len(self.per_rank), torch.uint8)
            bytes_of(data)[:] = self.per_rank
            parts.append(Part(f"per_rank/{world.index}", "U8", data))
        return parts

    def records(
        self, states: dict[str, dict[str, Any]], coordinates: list[list[tuple[int, int]]], per_rank: list[int]
    ) -> dict[str, TensorRecord]:
        """The manifest's tensors: which file holds which elements, for all ranks.

        Args:
            states: Keys and dtypes of sharded optimizer states, by parameter.
            coordinates: Every rank's :attr:`coordinates`.
            per_rank: Bytes of every rank's own values, -1 for none.
        """
        ranges: dict[str, list[Range]] = {}
        for flat, included, members in self._sections():
            mesh = self._mesh_of(flat)
            for rank, places in enumerate(coordinates):
                shard_rank, replica = places[mesh]
                for index, first, count in written_ranges(
                    flat.layout, included, shard_rank, replica, flat.groups.replicate_size
                ):
                    ranges.setdefault(members[index].name, []).append(Range(rank, first, count))
        result = {}
        for entry in self.saved:
            if entry.flat is None and entry.numel:
                ranges[entry.name] = [Range(0, 0, entry.numel)]
            found = tuple(sorted(ranges.get(entry.name, []), key=lambda part: part.first))
            kind = "sharded" if entry.flat is not None else "replicated"
            result[entry.name] = TensorRecord(entry.dtype, entry.shape, kind, found)
        for entry in self.saved:
            for key, dtype in states.get(entry.name, {}).items():
                if isinstance(dtype, str):
                    record = result[entry.name]
                    result[state_name(entry.name, key)] = TensorRecord(dtype, record.shape, record.kind, record.ranges)
        for name, tensor in self.extra_tensors.items():
            where = (Range(0, 0, tensor.numel()),) if tensor.numel() else ()
            result[f"extra/{name}"] = TensorRecord(
                dtype_name(tensor.dtype, name), tuple(tensor.shape), "replicated", where
            )
        for rank, count in enumerate(per_rank):
            if count >= 0:
                result[f"per_rank/{rank}"] = TensorRecord("U8", (count,), "per_rank", (Range(rank, 0, count),))
        return result


def _mesh_key(groups: Any) -> tuple[int, int, int, int]:
    return id(groups.shard), groups.shard_size, id(groups.replicate), groups.replicate_size


def take(model: nn.Module, optimizer: Any, *, extra: Any, per_rank: Any, trainable_only: bool) -> Snapshot:
    """Look at everything that is to be saved. Local: no messages, nothing copied but ``extra`` and ``per_rank``."""
    state = model_state.collect(model)
    model_state.refuse_unready(state)
    model_state.warn_extra_state(model)
    left_out = []
    if trainable_only:
        left_out = [t.name for t in state.tensors if not t.is_buffer and not t.tensor.requires_grad]
    for entry in state.tensors:
        if entry.flat is None and entry.tensor.is_meta:
            raise CheckpointError("a tensor is on the meta device and has no values", parameter=entry.name)
    tensors: dict[str, torch.Tensor] = {}
    tree = encode_value(extra, "extra", tensors)
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    meshes: list[Any] = []
    for flat in state.flats:
        if _mesh_key(flat.groups) not in [_mesh_key(groups) for groups in meshes]:
            meshes.append(flat.groups)
    return Snapshot(
        model=state,
        left_out=left_out,
        optimizer=optimizer_state.collect(optimizer, state, set(left_out)) if optimizer is not None else None,
        extra=tree,
        extra_tensors=copies,
        per_rank=None if per_rank is None else pack(per_rank, "per_rank"),
        meshes=meshes,
        coordinates=[(g.shard_rank, dist.get_rank(g.replicate) if g.replicate is not None else 0) for g in meshes],
    )


def structure_digest(structure: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(structure, sort_keys=True).encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------------- when ranks differ


def merge(
    structures: list[dict[str, dict[str, Any]]], owned: list[list[str]], ranks: tuple[int, ...]
) -> dict[str, dict[str, Any]]:
    """One structure for all ranks, or an error that names the first thing in which they differ, and the ranks.

    A rank that holds no element of a parameter may lack its optimizer state, or have another.
    """
    merged = dict(structures[0])
    for kind in structures[0]:
        if kind == "optimizer state":
            continue
        for key in dict.fromkeys(key for structure in structures for key in structure[kind]):
            _compare(kind, key, [structure[kind].get(key) for structure in structures], ranks)
    states: dict[str, Any] = {}
    holders = [set(names) for names in owned]
    for name in dict.fromkeys(name for structure in structures for name in structure["optimizer state"]):
        values = [structure["optimizer state"].get(name) for structure in structures]
        holding = [i for i in range(len(values)) if name in holders[i]]
        if not holding:
            holding = [next(i for i, value in enumerate(values) if value is not None)]
        keys = dict.fromkeys(key for i in holding for key in values[i] or {})
        for key in keys:
            _compare(
                f"optimizer state '{key}' of", name, [(values[i] or {}).get(key) for i in holding],
                tuple(ranks[i] for i in holding),
            )  # fmt: skip
        if keys:
            states[name] = values[holding[0]]
    merged["optimizer state"] = states
    return merged


def _compare(kind: str, key: str, values: list[Any], ranks: tuple[int, ...]) -> None:
    if all(value == values[0] for value in values):
        return
    absent = [rank for rank, value in zip(ranks, values) if value is None]
    if absent:
        present = [rank for rank, value in zip(ranks, values) if value is not None]
        problem = f"{kind} '{key}' is there on {_listed(present)} and not on {_listed(absent)}"
    else:
        other = next(rank for rank, value in zip(ranks, values) if value != values[0])
        problem = f"{kind} '{key}' differs between rank {ranks[0]} and rank {other}"
    raise RankMismatchError(
        problem,
        parameter=key if kind.startswith(("tensor", "optimizer")) else None,
        cure="pass what differs between ranks as per_rank=; extra= is the same everywhere"
        if kind == "extra"
        else "every rank must save the same model, optimizer and arguments",
    )


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
