"""The state of units, flat parameters and passes while a step is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .blueprint import PlannedFlat, PlannedUnit
from .setup import Setup

__all__ = ["FIRST_FRACTION", "WAITING_NUMEL", "ReplayedCall", "ReplayedFlat", "ReplayedPass", "ReplayedUnit"]

FIRST_FRACTION = 8  # as in gradient_buffer: first gradients wait while they are small beside the buffer
WAITING_NUMEL = 4096  # and later ones for one copy of them all


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
        self.first_numel = max(WAITING_NUMEL, planned.layout.padded_numel // FIRST_FRACTION)
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
