"""What the engine would do and hold during a recorded step, for one rank of any mesh.

The rules are those of ``schedule``, ``unit``, ``flat_param`` and ``gradient_buffer``, reduced to bytes: the order is
recorded and replayed for prefetch, kept units stay, a reduction waits for the one before. Steps are repeated until
the order is known; the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..order import BACKWARD, FORWARD, REDUCE, RESIDENT, Order
from .blueprint import PlannedUnit
from .fake_step import ENTER, GRADIENT, IGNORED, LEAVE, OPEN, STOP, FakeStep, StepEvent
from .memory import BACKWARD_END, FULL, PHASES, SHARDS, UPDATE, Memory
from .reductions import Reductions
from .replay_state import ReplayedCall, ReplayedFlat, ReplayedIgnored, ReplayedPass, ReplayedUnit
from .setup import Setup
from .traffic import Program

__all__ = ["Replay"]

_CONTROL_BYTES = 1024  # a message of up to 1008 flags
_CONTROL_HEAD = 16
_STEPS = 3  # the first records the order, the second prefetches by it, the third is like all that follow


class Replay:
    """One rank's step.

    Args:
        units: Of the model, the root first.
        setup: How it is wrapped.
        step: What the plain model does in one microbatch.
        resting: Bytes that are there all the time, by kind.
        update_bytes: What the optimizer's step needs for a moment.
        update_work: Bytes that it reads and writes, its operators, and bytes of the shards that it updates elsewhere.
        ignored: Parameters that no unit owns.

    Attributes:
        memory: Peaks by phase.
        program: Collectives of the step and the work in between, in the order of the host.
    """

    def __init__(
        self,
        units: list[PlannedUnit],
        setup: Setup,
        step: FakeStep,
        resting: dict[str, int],
        update_bytes: int,
        update_work: tuple[int, int, int],
        ignored: Iterable[torch.Tensor],
    ) -> None:
        self.setup = setup
        self.step = step
        self.units = [ReplayedUnit(index, unit, setup) for index, unit in enumerate(units)]
        self.memory = Memory(resting)
        self.program = Program(self.memory)
        self._reductions = Reductions(setup, self.memory, self.program, self._prefetch_what_waited)
        self._update_bytes = update_bytes
        self._update_work = update_work
        self._ignored = [ReplayedIgnored(parameter) for parameter in ignored]
        self._records: dict[object, list[int]] = {}
        self._forward: ReplayedPass | None = None
        self._backward: ReplayedPass | None = None
        self._forward_key: object = None
        self._sync = True
        self._depth = 0
        self._clock = 0
        self._open: list[ReplayedCall] = []
        self._calls_by_number: dict[int, ReplayedCall] = {}
        self._resident: dict[ReplayedUnit, None] = {}
        self._prefetch_later: ReplayedUnit | None = None
        self._running: list[ReplayedUnit] = []

    def run(self) -> Replay:
        """Replay until steps repeat."""
        for _ in range(_STEPS):
            self.memory.restart()
            self.program.restart()
            for flat in self._flats():
                flat.is_stale = flat.is_stale or flat.planned.trainable
            for number in range(self.setup.microbatches):
                self._sync = not self.setup.no_sync or number == self.setup.microbatches - 1
                self._play()
            self._update()
        return self

    def _flats(self) -> Iterable[ReplayedFlat]:
        return (flat for unit in self.units for flat in unit.flats)

    # ------------------------------------------------------------------ the step

    def _play(self) -> None:
        memory = self.memory
        memory.phase = PHASES[0]
        last_gradient = max((i for i, e in enumerate(self.step.events) if e.kind == GRADIENT), default=-1)
        for position, event in enumerate(self.step.events):
            memory.look(event.peak_bytes)
            self.memory.live = event.live_bytes
            if event.operators:
                name = self._running[-1].name if self._running else ""
                self.program.compute(name, event.flops, event.traffic_bytes, event.operators)
            if position >= last_gradient >= 0:
                memory.phase = BACKWARD_END
            elif event.kind in (OPEN, GRADIENT):
                memory.phase = PHASES[1]
            self._react(event)
            memory.look(self.memory.live)

    def _react(self, event: StepEvent) -> None:
        if event.kind == ENTER:
            self._enter(self.units[event.unit], event)
        elif event.kind == LEAVE:
            self._leave(self.units[event.unit], event)
        elif event.kind == OPEN:
            self._reach(self._calls_by_number[event.call])
        elif event.kind == GRADIENT and event.unit == IGNORED:
            self._take_ignored(self._ignored[event.index], event)
        elif event.kind == GRADIENT:
            self._gradient(self.units[event.unit], event)
        elif event.kind == STOP:
            self._finish_backward()

    def _update(self) -> None:
        memory = self.memory
        memory.phase, memory.unit = PHASES[-1], ""
        memory.live = 0
        memory.grow(UPDATE, self._update_bytes)
        memory.add(UPDATE, -self._update_bytes)
        self.program.update(*self._update_work)
        if self.setup.agrees_on_updates:
            self._tell(1)
        for flat in self._flats():
            if flat.has_shard:
                flat.has_shard = False
                if not self.setup.shards_on_host:
                    memory.add(SHARDS, -flat.planned.shard_bytes)
        for ignored in self._ignored:
            memory.add(SHARDS, -ignored.size * ignored.has_average)
            ignored.has_average = False

    # ------------------------------------------------------------------ forward

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _enter(self, unit: ReplayedUnit, event: StepEvent) -> None:
        if self._depth == 0 and not event.is_recompute:
            stale = any(flat.rests_full and flat.needs_gather for u in self.units for flat in u.flats)
            self._forward_key = ("forward", stale)
            self._forward = ReplayedPass(self._records.get(self._forward_key))
        self._depth += 1
        self._calls_by_number[event.call] = ReplayedCall(unit, self._tick())
        unit.is_active = True
        self._running.append(unit)
        self.memory.unit = unit.name
        if unit.flats:
            self._gather(unit, FORWARD)

    def _leave(self, unit: ReplayedUnit, event: StepEvent) -> None:
        call = self._calls_by_number[event.call]
        unit.is_active = False
        self._running.pop()
        call.stop = self._tick()
        keep = self.setup.reshard_after_forward is False
        if self.setup.reshard_after_forward is None:
            keep = unit.index == 0
        if unit.flats and not (event.is_recompute and (unit.open_calls or event.is_replay)):
            if keep and not event.is_recompute and event.expects_backward:
                call.is_kept = True
                unit.kept_calls += 1
            elif not (keep and self._depth > 1):
                self._reshard(unit)
        self._depth -= 1
        if self._running:
            self.memory.unit = self._running[-1].name
        if self._depth or event.is_recompute or self._forward is None:
            return
        self._records[self._forward_key] = self._forward.events
        self._forward = None
        for resident in list(self._resident):
            if not resident.kept_calls:
                self._rest(resident)

    def _gather(self, unit: ReplayedUnit, kind: int) -> None:
        sends = any(flat.needs_gather for flat in unit.flats)
        self._announce(kind if sends else RESIDENT, unit)
        for flat in unit.flats:
            self._unshard(unit, flat)
        self._resident[unit] = None
        self._prefetch_after(unit)
        for flat in unit.flats:
            if flat.is_arriving and (self.setup.shard_size > 1 or self.setup.shards_on_host):
                self.program.wait(unit.name, ("gather", id(flat)))
            flat.is_arriving = False

    def _unshard(self, unit: ReplayedUnit, flat: ReplayedFlat) -> bool:
        if flat.is_unsharded and (not flat.is_stale or flat.aliases_shard):
            return False
        planned = flat.planned
        if not flat.is_unsharded:
            self.memory.grow(FULL, planned.full_bytes)
            self.program.allocate(unit.name, planned.full_bytes)
        slot_bytes = planned.layout.shard_numel * planned.compute_dtype.itemsize
        if self.setup.shards_on_host:
            self.program.fetch(unit.name, slot_bytes, ("gather", id(flat)))
        else:
            self.program.copy(unit.name, planned.shard_bytes + slot_bytes)
        if self.setup.shard_size > 1:
            numel, ranks = planned.layout.padded_numel, self.setup.shard_size
            self.program.send("all_gather", unit.name, numel, planned.compute_dtype, ranks, ("gather", id(flat)))
        flat.is_unsharded = flat.is_arriving = True
        flat.is_stale = False
        return True

    def _reshard(self, unit: ReplayedUnit) -> None:
        for flat in unit.flats:
            if flat.is_unsharded and not flat.rests_full:
                flat.is_unsharded = False
                flat.is_arriving = False
                self.memory.add(FULL, -flat.planned.full_bytes)
        self._resident.pop(unit, None)

    def _rest(self, unit: ReplayedUnit) -> None:
        if unit.is_active or unit.open_calls or unit.kept_calls:
            return
        self._reshard(unit)

    # ------------------------------------------------------------------ order

    def _announce(self, kind: int, unit: ReplayedUnit) -> None:
        current = self._backward or self._forward
        if current is not None:
            current.events.append(Order.code(unit.index, kind))

    def _prefetch_after(self, unit: ReplayedUnit) -> None:
        depth = self.setup.prefetch
        current = self._backward or self._forward
        if not depth or current is None:
            return
        if self._reductions.in_flight and self.setup.on_cpu and self.setup.stage.shards_gradients:
            self._prefetch_later = unit
            return
        for code in current.upcoming():
            index, kind = Order.decode(code)
            following = self.units[index]
            if kind not in (FORWARD, BACKWARD) or following is unit or not following.flats:
                continue
            for flat in following.flats:
                self._unshard(following, flat)
            self._resident[following] = None
            depth -= 1
            if not depth:
                return

    def _prefetch_what_waited(self) -> None:
        unit, self._prefetch_later = self._prefetch_later, None
        if unit is not None:
            self._prefetch_after(unit)

    # ------------------------------------------------------------------ backward

    def _begin_backward(self) -> None:
        if self._backward is None:
            self._backward = ReplayedPass(self._records.get(("backward", self._sync)))
            for unit in self.units:
                unit.fired.clear()

    def _reach(self, call: ReplayedCall) -> None:
        self._begin_backward()
        unit = call.unit
        self.memory.unit = unit.name
        unit.open_calls += 1
        for other in [c for c in self._open if c.start > call.stop]:
            self._open.remove(other)
            other.unit.open_calls -= 1
            self._finish_call(other)
            if not other.unit.open_calls:
                self._finish_unit(other.unit)
        self._open.append(call)
        if unit.flats:
            self._gather(unit, BACKWARD)
        self._running = [unit]

    def _finish_call(self, call: ReplayedCall) -> None:
        if call.is_kept and not call.is_done:
            call.unit.kept_calls = max(0, call.unit.kept_calls - 1)
        call.is_done = True

    def _reduce(self, unit: ReplayedUnit) -> None:
        self._announce(REDUCE, unit)
        for flat in unit.flats:
            if not flat.planned.trainable:
                continue
            if flat.is_reducing or self.setup.stage.shards_gradients:
                self._reductions.finish()
            self._reductions.start(unit, flat)
            self._reductions.in_flight.append((unit, flat))
        current = self._backward
        if self.setup.on_cpu and current is not None and current.is_as_expected:
            if all(Order.decode(code)[1] != BACKWARD for code in current.upcoming()):
                self._reductions.finish()

    def _finish_unit(self, unit: ReplayedUnit) -> None:
        self._rest(unit)
        if self._sync and unit.has_unreduced:
            self._reduce(unit)

    def _gradient(self, unit: ReplayedUnit, event: StepEvent) -> None:
        self._begin_backward()
        self.memory.unit = unit.name
        self._reductions.accumulate(unit, unit.flats[event.flat], event.index, event.bytes)
        if event.index in unit.flats[event.flat].waiting or event.is_sparse:
            self.memory.live = event.live_bytes - event.bytes  # counted there, or a copy that is gone
        # Else autograd holds it until its hook returns, also while the unit's last gradient starts the reduction.
        before = len(unit.fired)
        unit.fired.add((event.flat, event.index))
        if len(unit.fired) == unit.expected and before < unit.expected:
            for call in [c for c in self._open if c.unit is unit]:
                self._open.remove(call)
                self._finish_call(call)
            unit.open_calls = 0
            self._finish_unit(unit)
        self.memory.live = event.live_bytes - event.bytes

    # ------------------------------------------------------------------ the end

    def _finish_backward(self) -> None:
        self._begin_backward()
        for call in self._open:
            call.unit.open_calls = 0
            self._finish_call(call)
        self._open.clear()
        if self._sync:
            for unit in reversed(self.units):
                if unit.has_unreduced:
                    self._reduce(unit)
            flags = sum(len(f.planned.names) for f in self._flats() if f.planned.trainable)
            self._tell(flags + sum(ignored.is_compared for ignored in self._ignored))
            self._reductions.finish()
            self._reduce_ignored()
            for flat in [flat for flat in self._flats() if flat.has_result]:
                self._reductions.bind(flat)
        else:
            self._reductions.finish()
        for flat in self._flats():
            flat.is_taking = False
        self._records[("backward", self._sync)] = self._backward.events
        self._backward = None
        self._running.clear()
        self._calls_by_number.clear()
        for unit in list(self._resident):
            self._rest(unit)

    def _tell(self, flags: int) -> None:
        """A message of so many flags to all ranks."""
        if self.setup.size > 1:
            size = -(-(_CONTROL_HEAD + flags) // _CONTROL_BYTES) * _CONTROL_BYTES
            self.program.send("control", self.units[0].name, size, torch.uint8, self.setup.size)

    def _take_ignored(self, ignored: ReplayedIgnored, event: StepEvent) -> None:
        self._begin_backward()
        if ignored.has_local:  # the sum of both is new
            self.memory.grow(SHARDS, ignored.size)
            self.memory.add(SHARDS, -ignored.size)
        else:
            self.memory.add(SHARDS, ignored.size)
            ignored.has_local = True
        self.memory.live = event.live_bytes - event.bytes

    def _reduce_ignored(self) -> None:
        """One after the other: a copy is summed over ranks, cast, and added to what is there."""
        for ignored in self._ignored:
            if not ignored.has_local:
                continue
            self.memory.grow(SHARDS, ignored.sum_bytes)
            name, size = self.units[0].name, self.setup.size
            self.program.copy(name, ignored.size + ignored.sum_bytes)
            if size > 1:
                self.program.send("all_reduce", name, ignored.numel, ignored.sum_dtype, size)
            if ignored.sum_bytes != ignored.size:
                self.memory.grow(SHARDS, ignored.size)
                self.memory.add(SHARDS, -ignored.sum_bytes)
            if ignored.has_average:
                self.memory.grow(SHARDS, ignored.size)
                self.memory.add(SHARDS, -2 * ignored.size)
            self.memory.add(SHARDS, -ignored.size)
            ignored.has_local, ignored.has_average = False, True
