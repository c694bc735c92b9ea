"""The state of units, flat parameters and passes while a step is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .blueprint import PlannedFlat, PlannedUnit
from .setup import Setup

__all__ = ["ReplayedCall", "ReplayedFlat", "ReplayedIgnored", "ReplayedPass", "ReplayedUnit"]


@dataclass(eq=False)
class ReplayedCall:
    unit: ReplayedUnit
    start: int
    stop: int = 0
    is_kept: bool = False
    is_done: bool = False


class ReplayedFlat:
    """One flat parameter's full buffer and gradient buffer."""

    def __init__(self, planned: PlannedFlat, setup: Setup) -> None:
        stage = setup.stage
        self.planned = planned
        self.aliases_shard = not stage.shards_optimizer and planned.dtype == planned.compute_dtype
        self.rests_full = self.aliases_shard or (stage.shards_optimizer and not stage.shards_parameters)
        self.is_unsharded = self.aliases_shard
        self.is_stale = True
        self.is_arriving = False
        self.is_allocated = False
        self.is_taking = False
        self.is_reducing = False
        self.filled: set[int] = set()
        self.waiting: dict[int, int] = {}
        self.waiting_numel = 0
        self.has_result = False
        self.has_shard = False

    @property
    def needs_gather(self) -> bool:
        if self.aliases_shard:
            return False
        return self.is_arriving or not self.is_unsharded or self.is_stale


class ReplayedUnit:
    def __init__(self, index: int, planned: PlannedUnit, setup: Setup) -> None:
        self.index = index
        self.name = planned.name
        self.flats = [ReplayedFlat(flat, setup) for flat in planned.flats]
        trainable = [flat.planned.trainable for flat in self.flats]
        # Frozen weights may be needed after the last gradient: such a unit is not over with it.
        self.expected = sum(len(f.planned.names) for f in self.flats) if trainable and all(trainable) else 0
        self.is_active = False
        self.open_calls = 0
        self.kept_calls = 0
        self.fired: set[tuple[int, int]] = set()

    @property
    def has_unreduced(self) -> bool:
        return any(flat.filled for flat in self.flats)


class ReplayedIgnored:
    """The gradient of a parameter that no unit owns.

    Attributes:
        numel, size: Elements and bytes.
        sum_dtype: In which it is averaged.
        is_compared: Whether ranks tell each other if they used it.
        has_local: One of this backward, or of an unsynchronised one before, waits for its average.
        has_average: Earlier backwards of this step left one.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.numel = parameter.numel()
        self.size = parameter.numel() * parameter.element_size()
        self.sum_dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.is_compared = parameter.is_floating_point()
        self.has_local = self.has_average = False

    @property
    def sum_bytes(self) -> int:
        return self.numel * self.sum_dtype.itemsize


@dataclass
class ReplayedPass:
    expected: list[int] | None
    events: list[int] = field(default_factory=list)

    @property
    def is_as_expected(self) -> bool:
        return self.expected is not None and self.expected[: len(self.events)] == self.events

    def upcoming(self) -> Iterator[int]:
        if self.is_as_expected:
            yield from self.expected[len(self.events) :]
