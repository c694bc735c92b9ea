"""What a model would be wrapped into: units and flat parameters for any number of shards, nothing allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..flat_spec import FlatSpec, group_parameters
from ..layout import FlatLayout
from ..low_precision import kept_modules
from ..modules import user_name
from ..partition import ParamSpec, Partition, partition
from ..policy import Policy
from ..precision import Precision

__all__ = ["Blueprint", "Named", "PlannedFlat", "PlannedUnit", "draw"]


@dataclass(frozen=True)
class PlannedFlat:
    """One flat parameter on one rank.

    Attributes:
        layout: Where each parameter lies, and what each rank owns.
        names: Canonical dotted names.
        dtype, compute_dtype, wire_dtype: Of the shard, of gathered weights, of the gradient on the wire.
        trainable: Whether it has gradients.
    """

    layout: FlatLayout
    names: tuple[str, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype
    trainable: bool

    @property
    def buffer_dtype(self) -> torch.dtype:
        """In which gradients are summed."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def shard_bytes(self) -> int:
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def full_bytes(self) -> int:
        return self.layout.padded_numel * self.compute_dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        return self.layout.padded_numel * self.buffer_dtype.itemsize if self.trainable else 0

    def local_numel(self, rank: int) -> int:
        """Elements of parameters, without padding, that a rank owns."""
        ranges = (self.layout.local_range(index, rank) for index in range(len(self.layout.slots)))
        return sum(high - low for low, high in ranges)

    def largest_local_numel(self, rank: int) -> int:
        """Elements of the largest part of one parameter that a rank owns."""
        ranges = (self.layout.local_range(index, rank) for index in range(len(self.layout.slots)))
        return max((high - low for low, high in ranges), default=0)


@dataclass(frozen=True)
class PlannedUnit:
    """One unit on one rank.

    Attributes:
        name: Dotted name; ``""`` for the root.
        module_class: Class name of its module.
        flats: Its flat parameters.
        tensor_buffer_bytes: Registered buffers (running statistics, tables), whole on every rank.
    """

    name: str
    module_class: str
    flats: tuple[PlannedFlat, ...]
    tensor_buffer_bytes: int = 0

    @property
    def numel(self) -> int:
        return sum(flat.layout.numel for flat in self.flats)

    @property
    def padding_numel(self) -> int:
        return sum(flat.layout.padding_numel for flat in self.flats)

    @property
    def shard_bytes(self) -> int:
        return sum(flat.shard_bytes for flat in self.flats)

    @property
    def full_bytes(self) -> int:
        return sum(flat.full_bytes for flat in self.flats)

    @property
    def buffer_bytes(self) -> int:
        return sum(flat.buffer_bytes for flat in self.flats)


@dataclass
class Blueprint:
    """The units of a model, before anybody knows over how many ranks they are sharded.

    Attributes:
        partition: The engine's own: which modules become units and what each owns.
        specs: Per unit, its flat parameters.
        ignored: Parameters that no unit owns.
    """

    partition: Partition
    specs: list[list[FlatSpec]]
    ignored: list[ParamSpec] = field(default_factory=list)
    ignored_buffer_bytes: int = 0

    def units(self, shard_size: int) -> list[PlannedUnit]:
        """The units on each of ``shard_size`` ranks."""
        found = []
        for unit, specs in zip(self.partition.units, self.specs):
            flats = tuple(_flat(spec, shard_size) for spec in specs)
            size = sum(_bytes(buffer.module._buffers[buffer.key]) for buffer in unit.buffers)
            found.append(PlannedUnit(user_name(unit.name), _class_name(unit.module), flats, size))
        return found


class Named(Policy):
    """Exactly the modules of these names; there may be none."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def check(self, named_modules: Any) -> list[str]:
        return []

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        return name in self._names

    def describe(self) -> str:
        return f"exactly {', '.join(sorted(map(repr, self._names))) or 'one unit'}"


def draw(model: nn.Module, policy: Any, precision: Precision, ignored: Any = (), methods: Any = ()) -> Blueprint:
    """Partition a model as ``fsdp_wrap`` would. Nothing is changed.

    Raises:
        PolicyError, WrapError, ConfigError: As ``fsdp_wrap`` does.
    """
    found = partition(model, policy, ignored=ignored, entry_points=methods)
    kept, _ = kept_modules(model, precision)
    specs = [group_parameters(unit.params, precision, kept) for unit in found.units]
    size = sum(_bytes(buffer.module._buffers[buffer.key]) for buffer in found.ignored_buffers)
    return Blueprint(found, specs, found.ignored_params, size)


def _flat(spec: FlatSpec, shard_size: int) -> PlannedFlat:
    names = tuple(names[0] for names in spec.names)
    layout = spec.layout(shard_size)
    return PlannedFlat(layout, names, spec.dtype, spec.compute_dtype, spec.wire_dtype, spec.trainable)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _class_name(module: nn.Module) -> str:
    return type(module).__name__
