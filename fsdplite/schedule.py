"""What the units of one model share: the order, prefetch, one backward at a time, and its end.

Three idempotent triggers end a unit's backward: its counted gradients (``UnitState.on_gradient``), the opening of a
call that had stopped before the unit's call started (``open``), and the end of the whole backward
(``finish_backward``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import events, optimizer_hooks
from .agreement import Agreement
from .backward_end import BackwardEnd
from .errors import FSDPError
from .flat_param import FlatParameter
from .groups import Groups
from .ignored import IgnoredGradients
from .order import BACKWARD, FORWARD, KINDS, REDUCE, Order, Pass
from .local_slice import engine_access
from .recompute import passes
from .replicas import refuse_unequal_replicas
from .saved_weights import guard_saved_weights, stop_guarding
from .unfilled import Unfilled
from .unit import Call, UnitState, current_task

__all__ = ["Schedule"]

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Schedule:
    """See the module docstring. One per outermost wrapped module.

    Attributes:
        units: In the order in which they were made; ``unit.index`` is the place.
        root: The unit of the outermost wrapped module.
        resident: Units whose full buffers may be there (an ordered set).
        open_calls: Forward calls that this backward has reached and not yet passed.
        depth: Nesting of unit calls at the moment.
        is_guarding: The running forward tags the weights that autograd saves (see ``saved_weights``).
        keeps_weights: Nothing is freed: a graph of a backward (``create_graph=True``) may still need the weights.
        step: Number of backwards finished, for messages.
    """

    def __init__(self, root: UnitState, number: int, on_cpu: bool) -> None:
        self.units: list[UnitState] = []
        self.root = root
        self.order = Order(number)
        self.agreement = Agreement(self)
        self.resident: dict[UnitState, None] = {}
        self.open_calls: list[Call] = []
        self.depth = 0
        self.step = 0
        self.in_backward = False
        self.backward_id = 0
        self.divide_factor: float | None = None
        self.ignored = IgnoredGradients(self)
        self.unfilled = Unfilled()
        self.trusts_replicas = True  # set by wrap: False until replicas that nobody made equal have been compared
        self.regroup: Any = None  # set by wrap: splits a frozen flat parameter when some of it is unfrozen
        self.offload: Any = None  # set by wrap: where an offloaded optimizer keeps its state
        self.updates: Callable[[], Any] = lambda: None  # an optimizer's updates that start in backward
        self.is_guarding = False
        self._on_cpu = on_cpu
        self._clock = 0
        self._copies = 0
        self._forward: Pass | None = None
        self._forward_key: Any = None
        self._backward: Pass | None = None
        self._in_flight: list[FlatParameter] = []
        self._complete_later: list[UnitState] = []  # have all their gradients, and units inside them that do not
        self._prefetch_later: UnitState | None = None
        self.keeps_weights = False
        self._renews_keeping = False
        self._idle: list[UnitState] = []

    @property
    def runs_with_grad(self) -> bool:
        """Whether a forward is running whose outermost call began with gradients enabled."""
        return self._forward is not None and self._forward_key[2]

    @property
    def groups(self) -> Groups:
        return self.root.groups

    def add(self, unit: UnitState) -> None:
        unit.index = len(self.units)
        unit.schedule = self
        self.units.append(unit)

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    # ------------------------------------------------------------------ forward

    def enter(self, unit: UnitState, is_recompute: bool) -> None:
        """A unit is called. The outermost call opens a pass."""
        if self.depth == 0 and not is_recompute:
            self._begin_forward(unit)
        self.depth += 1

    def _begin_forward(self, unit: UnitState) -> None:
        optimizer_hooks.restore()
        if self.in_backward:
            self.abandon_backward()  # its end never came, and neither did its destruction
        self._rest_idle()
        self.follow_requires_grad()
        if self.unfilled:
            self.unfilled.refuse(self.groups.rank)
        if not self.trusts_replicas:
            refuse_unequal_replicas(self.groups, [flat for u in self.units for flat in u.flats], self.ignored)
            self.trusts_replicas = True
        for lane in {id(flat.gather_lane): flat.gather_lane for u in self.units for flat in u.flats}.values():
            lane.wait_for_compute()  # the optimizer's writes come before the casts of this step
        with_grad = torch.is_grad_enabled()
        self._forward_key = ("forward", unit.index, with_grad, self._is_stale())
        self._forward = self.order.start(self._forward_key)
        self.is_guarding = guard_saved_weights()
        passes.begin()

    def _is_stale(self) -> bool:
        """Whether this pass gathers what rests full (stages 1 and 2): passes that do and that do not differ."""
        return any(flat.rests_full and flat.needs_gather for unit in self.units for flat in unit.flats)

    def leave(self, unit: UnitState, is_recompute: bool, has_failed: bool) -> None:
        """A unit's call is over. After the outermost one only what a backward will need stays gathered."""
        self.depth -= 1
        if self.depth or is_recompute or self._forward is None:
            return
        passes.end()
        if self.is_guarding:
            stop_guarding()
            self.is_guarding = False
        if has_failed:
            self._forward = None
            self.order.interrupt()
            self._settle()
            self.keeps_weights = False
            for resident in list(self.resident):
                resident.kept_calls = 0
                resident.rest()
            return
        self.order.stop(self._forward_key, self._forward)
        self._forward = None
        for resident in list(self.resident):
            if not resident.kept_calls:
                resident.rest()

    def follow_requires_grad(self) -> None:
        """Regroup what was unfrozen. Collective where there is something, as ``split_frozen``."""
        if self.depth or self.in_backward:
            return  # too late: a unit that meets one says so
        frozen_no_more = []
        with engine_access():
            for unit in self.units:
                for flat in unit.flats:
                    if not flat.trainable and flat.sync_requires_grad():
                        frozen_no_more.append(flat)
        self.ignored.follow_requires_grad()
        for flat in frozen_no_more:
            self.regroup(flat)
            self.order.forget()

    # ------------------------------------------------------------------ order and prefetch

    def announce(self, kind: int, unit: UnitState) -> None:
        """Record a use. One that no record predicts is agreed upon with the other ranks before any collective."""
        if self.in_backward and (updates := self.updates()) is not None:
            updates.refuse_use(unit)
        code = Order.code(unit.index, kind)
        self.order.note(code)
        current = self._backward if self.in_backward else self._forward
        if current is None or not current.take(code):
            self.agreement.agree(code, unit, KINDS[kind])

    def prefetch_after(self, unit: UnitState, kind: int) -> None:
        """Start to gather the next units of the recorded order, ``unit.prefetch`` of them."""
        depth = unit.prefetch
        current = self._backward if self.in_backward else self._forward
        if not depth or current is None or not current.is_as_expected:
            return
        if self._in_flight and self._on_cpu and unit.stage.shards_gradients:
            # The host will wait for that reduction before long; until then its buffer (and the transport's copy of
            # it) would be alive beside what is gathered ahead.
            self._prefetch_later = unit
            return
        for code in current.upcoming():
            index, coming = Order.decode(code)
            if coming not in (FORWARD, BACKWARD):
                continue
            following = self.units[index]
            if following is unit or not following.flats:
                continue
            if following.gather_ahead(kind) and events.active is not None:
                events.active.emit("prefetch", following.name)
            depth -= 1
            if not depth:
                return

    # ------------------------------------------------------------------ backward

    def enter_backward(self) -> None:
        """The first event of a backward: ask autograd for a call at its end."""
        self.in_backward = True
        self.backward_id += 1
        with engine_access():
            for unit in self.units:
                for flat in unit.flats:
                    flat.sync_requires_grad()  # what was frozen since the forward gets no gradient
                    if flat.gradient is not None:
                        flat.gradient.begin()
        self._backward = self.order.start(self._backward_key())
        torch.autograd.Variable._execution_engine.queue_callback(BackwardEnd(self))

    def _backward_key(self) -> Any:
        return ("backward", tuple(unit.index for unit in self.units if not unit.requires_sync))

    def open(self, call: Call) -> None:
        """Backward reaches the outputs of a call: close what is over, gather, prefetch."""
        if not self.in_backward:
            self.enter_backward()
        if torch.is_grad_enabled() or (self.keeps_weights and keeps_graph()):
            # Nodes made under create_graph read weights without a tag; these stay until a backward drops its graph.
            self.keeps_weights = self._renews_keeping = True
        unit = call.unit
        unit.open_calls += 1  # before others are closed, or the same unit would be freed and gathered again
        for other in [c for c in self.open_calls if c.start > call.stop]:
            self._close(other)
        if self._complete_later:
            self._complete_delayed()
        if call in self.open_calls:
            unit.open_calls -= 1
        else:
            self.open_calls.append(call)
        unit.gather_for_backward()

    def _close(self, call: Call) -> None:
        self.open_calls.remove(call)
        call.unit.open_calls -= 1
        call.unit.finish_call(call)
        if not call.unit.open_calls:
            self._finish_unit(call.unit)

    def complete(self, unit: UnitState) -> None:
        """All gradients of a unit have arrived: none of its open calls needs the weights any more."""
        if unit.open_calls:
            calls = [c for c in self.open_calls if c.unit is unit]
            if all(call.task != current_task() for call in calls):
                return  # from reentrant checkpoints inside the unit, and others may bring gradients again
            start = min(call.start for call in calls)
            if any(call.start > start and call.unit is not unit for call in self.open_calls):
                self._complete_later.append(unit)  # ranks may use other parameters of the units inside: those go first
                return
            for call in calls:
                self.open_calls.remove(call)
                unit.finish_call(call)
            unit.open_calls = 0
        self._finish_unit(unit)
        self._complete_delayed()

    def _complete_delayed(self) -> None:
        """A unit is over: others may have waited for it."""
        delayed, self._complete_later = self._complete_later, []
        for unit in delayed:
            self.complete(unit)

    def _finish_unit(self, unit: UnitState) -> None:
        unit.rest()  # first: the reduction needs no weights
        if unit.requires_sync and unit.has_unreduced:
            self._reduce(unit)

    def _reduce(self, unit: UnitState) -> None:
        self.announce(REDUCE, unit)
        for flat in unit.flats:
            gradient = flat.gradient
            if gradient is None or not (gradient.has_unreduced or flat.trains):
                continue  # all others are sent, zeros if need be: another rank may have gradients there
            if gradient.is_reducing or flat.stage.shards_gradients:
                self.finish_reductions()  # at most one in flight beside the one that fills next
            gradient.start_reduce(self.agreement.waiting(unit, KINDS[REDUCE]))
            self._in_flight.append(flat)
        current = self._backward
        if self._on_cpu and current is not None and current.is_as_expected:
            if all(Order.decode(code)[1] != BACKWARD for code in current.upcoming()):
                self.finish_reductions()  # no unit is left to overlap with

    def finish_reductions(self) -> None:
        while self._in_flight:
            flat = self._in_flight[0]
            flat.gradient.finish_reduce(self.divide_factor or flat.groups.size)
            self._in_flight.pop(0)
            if (updates := self.updates()) is not None:
                updates.reduced(flat, self._backward)
        unit, self._prefetch_later = self._prefetch_later, None
        if unit is not None:
            self.prefetch_after(unit, BACKWARD)

    def finish_backward(self) -> None:
        """The end of a backward: leftovers, the order check, gradients bound, everything at rest."""
        try:
            self._finish_backward()
        except BaseException as failure:
            self.abandon_backward()
            if isinstance(failure, FSDPError):
                self.order.forget()
            raise

    def _finish_backward(self) -> None:
        for call in self.open_calls:
            call.unit.open_calls = 0
            call.unit.finish_call(call)
        self.open_calls.clear()
        self._complete_later.clear()
        for unit in self.units:
            for flat in unit.flats:
                if flat.gradient is not None:
                    flat.gradient.resume()  # what zero_grad dropped must not be sent
        for unit in reversed(self.units):
            if unit.requires_sync and unit.has_unreduced:
                self._reduce(unit)
        if any(unit.requires_sync for unit in self.units):
            flats = [flat for unit in self.units for flat in unit.flats if flat.trainable]
            used = self.agreement.compare(flats)
            self.finish_reductions()
            if self.root.requires_sync:
                self.ignored.reduce(used[sum(len(flat.users) for flat in flats) :])
            bound = self._bind(flats, used)
        else:
            bound = []
            self.finish_reductions()
        for unit in self.units:
            for flat in unit.flats:
                if flat.gradient is not None and flat.gradient.has_unreduced:
                    flat.gradient.bind_pending()
        if not self.root.requires_sync:
            self.ignored.bind_pending()
        if (updates := self.updates()) is not None:
            updates.finish()
        self.order.stop(self._backward_key(), self._backward, ends_step=True)
        self._backward = None
        self.in_backward = False
        self.step += 1
        self.keeps_weights, self._renews_keeping = self._renews_keeping, False
        for unit in list(self.resident):
            unit.rest()
        if events.active is not None:
            events.active.emit("backward_stop", self.root.name)
        optimizer_hooks.flip_again()
        for flat, indices in bound:
            flat.post_accumulate_hooks.run(indices, flat.users)

    def _bind(self, flats: list[FlatParameter], used: bytearray) -> list[tuple[FlatParameter, list[int]]]:
        for lane in {id(flat.gather_lane): flat.gradient.lane for flat in flats}.values():
            lane.compute_waits()
        bound = []
        start = 0
        for flat in flats:
            stop = start + len(flat.users)
            bound.append((flat, flat.gradient.bind(used[start:stop])))
            start = stop
        return bound

    def abandon_backward(self) -> None:
        """A backward died: what it has sent is waited for, what it brought is dropped, everything rests."""
        self.keeps_weights = self._renews_keeping = False
        self.order.interrupt()
        if (updates := self.updates()) is not None:
            updates.abandon()
        for call in self.open_calls:
            call.unit.open_calls = 0
            call.unit.finish_call(call)
        self.open_calls.clear()
        self._complete_later.clear()
        self._in_flight.clear()
        self._prefetch_later = None
        self._settle()
        self._backward = None
        self.in_backward = False
        for unit in self.units:
            unit.open_calls = 0
            unit.kept_calls = 0
            for flat in unit.flats:
                if flat.gradient is not None:
                    flat.gradient.abandon()
        self.ignored.abandon()
        for unit in list(self.resident):
            unit.rest()

    # ------------------------------------------------------------------ rest

    def _settle(self) -> None:
        """After an error: let every gather end, well or not, so that nothing is pending and memory can be freed."""
        for unit in self.resident:
            for flat in unit.flats:
                flat.settle()

    def rest_when_idle(self, unit: UnitState) -> None:
        """Free a kept unit whose graph is gone; later, if the engine is in the middle of something."""
        if self.depth or self.in_backward:
            self._idle.append(unit)
        else:
            unit.rest()

    def _rest_idle(self) -> None:
        while self._idle:
            self._idle.pop().rest()

    def rest_all(self) -> None:
        """Free everything gathered, also what waits for a backward (it will be gathered again)."""
        if self.depth or self.in_backward:
            return
        self.keeps_weights = False
        for unit in list(self.resident):
            unit.kept_calls = 0
            unit.rest()

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict) -> Schedule:
        self._copies += 1
        twin = Schedule(None, self.order.number * 31 + self._copies, self._on_cpu)
        memo[id(self)] = twin
        twin.divide_factor = self.divide_factor
        twin.regroup = self.regroup
        twin.offload = self.offload
        twin.unfilled = self.unfilled.copy()
        twin.trusts_replicas = self.trusts_replicas
        twin.step = self.step
        twin.ignored = IgnoredGradients(twin)
        twin.ignored.copy_from(self.ignored, memo)
        return twin

    def add_copy(self, unit: UnitState, is_root: bool) -> None:
        """A copied unit joins its copied schedule; a copy without the root takes its outermost unit for one."""
        self.units.append(unit)
        self.units.sort(key=lambda u: u.index)
        for index, member in enumerate(self.units):
            member.index = index
        if is_root or self.root is None or unit.name.count(".") <= self.root.name.count("."):
            self.root = unit
