"""Gradients on their way to the shard, in bytes: the rules of ``gradient_buffer``."""

from __future__ import annotations

from collections.abc import Callable

from ..gradient_buffer import WAITING_FRACTION
from .blueprint import PlannedFlat
from .memory import BUFFERS, COPIES, SHARDS, Memory
from .replay_state import ReplayedFlat, ReplayedUnit
from .setup import Setup
from .traffic import Program

__all__ = ["Reductions"]


class Reductions:
    """Reduction buffers that fill, travel and end in a shard.

    Args:
        setup: How the model is wrapped.
        memory, program: Where bytes and collectives are noted.
        when_idle: Called when nothing is in flight any more.
    """

    def __init__(self, setup: Setup, memory: Memory, program: Program, when_idle: Callable[[], None]) -> None:
        self.setup = setup
        self.memory = memory
        self.program = program
        self.when_idle = when_idle
        self.in_flight: list[tuple[ReplayedUnit, ReplayedFlat]] = []

    def accumulate(self, unit: ReplayedUnit, flat: ReplayedFlat, index: int, size: int) -> None:
        """A gradient of ``size`` bytes is complete."""
        planned = flat.planned
        self.program.copy(unit.name, size + size // planned.compute_dtype.itemsize * planned.buffer_dtype.itemsize)
        if not flat.is_taking:
            if flat.is_reducing:
                self.finish()
            flat.is_taking = True
        if flat.is_allocated:
            flat.filled.add(index)
            return
        if index not in flat.filled:
            flat.filled.add(index)
            flat.waiting_numel += size // planned.compute_dtype.itemsize
            if flat.waiting_numel * WAITING_FRACTION <= planned.layout.padded_numel:
                flat.waiting[index] = size
                self.memory.add(BUFFERS, size)  # it was alive anyway: no moment of its own
                return
        self._allocate(unit, flat)

    def _grow(self, kind: str, unit: ReplayedUnit, count: int) -> None:
        self.memory.grow(kind, count)
        self.program.allocate(unit.name, count)

    def _allocate(self, unit: ReplayedUnit, flat: ReplayedFlat) -> None:
        if self.setup.stage.shards_gradients and self.setup.on_cpu:
            self.finish()
        self._grow(BUFFERS, unit, flat.planned.buffer_bytes)
        flat.is_allocated = True
        self.memory.add(BUFFERS, -sum(flat.waiting.values()))
        flat.waiting.clear()
        flat.waiting_numel = 0

    def start(self, unit: ReplayedUnit, flat: ReplayedFlat) -> None:
        """Send the buffer."""
        setup, planned = self.setup, flat.planned
        if not flat.is_allocated:
            self._allocate(unit, flat)
        flat.filled.clear()
        flat.is_taking = False
        flat.is_reducing = True
        if planned.wire_dtype != planned.buffer_dtype:
            self._grow(COPIES, unit, self._wire_bytes(planned))
        self._grow(SHARDS, unit, planned.layout.shard_numel * planned.wire_dtype.itemsize)
        if setup.shard_size > 1:
            if setup.transport_copies:
                self._grow(COPIES, unit, self._wire_bytes(planned))
            numel, ranks = planned.layout.padded_numel, setup.shard_size
            self.program.send("reduce_scatter", unit.name, numel, planned.wire_dtype, ranks, ("reduce", id(flat)))
        elif setup.replicate_size > 1:
            numel, ranks = planned.layout.shard_numel, setup.replicate_size
            self.program.send("all_reduce", unit.name, numel, planned.wire_dtype, ranks, ("reduce", id(flat)))

    def finish(self) -> None:
        """Wait for everything in flight."""
        while self.in_flight:
            unit, flat = self.in_flight.pop(0)
            self._finish_one(unit, flat)
        self.when_idle()

    def _finish_one(self, unit: ReplayedUnit, flat: ReplayedFlat) -> None:
        setup, planned, memory = self.setup, flat.planned, self.memory
        shard_numel = planned.layout.shard_numel
        if setup.size > 1:
            self.program.wait(unit.name, ("reduce", id(flat)))
        if setup.shard_size > 1 and setup.transport_copies:
            memory.add(COPIES, -self._wire_bytes(planned))
        if setup.shard_size > 1 and setup.replicate_size > 1:
            key, ranks = ("replicate", id(flat)), setup.replicate_size
            self.program.send("all_reduce", unit.name, shard_numel, planned.wire_dtype, ranks, key)
            self.program.wait(unit.name, key)
        on_wire = shard_numel * planned.wire_dtype.itemsize
        summed = shard_numel * planned.buffer_dtype.itemsize
        if planned.wire_dtype != planned.buffer_dtype:
            memory.grow(SHARDS, summed)
        if setup.shards_apart:
            memory.grow(SHARDS, summed)  # copied to where it rests
            memory.add(SHARDS, -summed)
        if setup.shards_on_host:
            memory.add(SHARDS, -summed)
            self.program.stash(unit.name, summed, ("stash", id(flat)))
            flat.has_result = True
        elif flat.has_result or flat.has_shard:
            memory.add(SHARDS, -summed)  # added to what is there
        else:
            flat.has_result = True
        self.program.copy(unit.name, 2 * summed)
        flat.is_reducing = False
        if planned.wire_dtype != planned.buffer_dtype:
            memory.add(SHARDS, -on_wire)
            memory.add(COPIES, -self._wire_bytes(planned))
        self._release(flat)

    def _release(self, flat: ReplayedFlat) -> None:
        if flat.is_allocated:
            flat.is_allocated = False
            self.memory.add(BUFFERS, -flat.planned.buffer_bytes)
        self.memory.add(BUFFERS, -sum(flat.waiting.values()))
        flat.waiting.clear()
        flat.waiting_numel = 0
        flat.is_taking = False

    def _wire_bytes(self, planned: PlannedFlat) -> int:
        return planned.layout.padded_numel * planned.wire_dtype.itemsize

    def bind(self, flat: ReplayedFlat) -> None:
        """The sum becomes the gradient that the optimizer sees, in the master's dtype."""
        planned = flat.planned
        if self.setup.shards_on_host:
            self.program.wait("", ("stash", id(flat)))
        if planned.dtype != planned.buffer_dtype and not self.setup.shards_on_host:
            self.memory.grow(SHARDS, planned.shard_bytes)
            self.memory.add(SHARDS, -planned.layout.shard_numel * planned.buffer_dtype.itemsize)
        flat.has_result = False
        flat.has_shard = True
