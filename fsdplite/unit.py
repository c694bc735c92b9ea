"""A unit: one module whose parameters are gathered and resharded together, around its call.

:class:`FSDPUnit` is what the user's module becomes: a subclass of its own class made on the fly, whose ``__call__``
brackets the original one. The unit's state lives in :class:`UnitState` under one attribute. Backward state belongs
to each forward call (:class:`Call`), never to the unit.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import nn

from . import events
from .errors import ParameterUseError
from .flat_param import FlatParameter, owner_of
from .groups import Groups
from .order import BACKWARD, FORWARD, KINDS, RESIDENT
from .local_slice import engine_access
from .precision import Precision
from .recompute.lost_gradients import refuse_lost_gradients
from .recompute.passes import is_replaying
from .saved_weights import refuses_guard
from .stage import Stage
from .structure import map_tensors, tensors_in

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["Call", "UnitState", "current_task"]

current_task = torch._C._current_graph_task_id


class Call:
    """One forward call of a unit, as backward meets it again. Called as a pre-hook of its outputs' nodes.

    Attributes:
        start, stop: Ticks of the schedule's clock around the call. Autograd runs later nodes first, so in backward
            whatever started after this call stopped is over by the time this call is reached.
        task: The graph task in which it was opened last.
        is_done: A backward has passed it.
    """

    __slots__ = ("__weakref__", "is_done", "is_kept", "start", "stop", "task", "unit")

    def __init__(self, unit: UnitState, start: int) -> None:
        self.unit = unit
        self.start = start
        self.stop = start
        self.task = -1
        self.is_done = False
        self.is_kept = False

    def __call__(self, gradients: Any) -> None:
        task = current_task()
        if self.task != task:  # once per call and graph task, however many outputs receive gradients
            self.task = task
            self.unit.schedule.open(self)

    def reopen(self) -> None:
        """Gather again for a saved weight that backward needs outside the usual order."""
        self.task = current_task()
        self.unit.schedule.open(self)

    def __del__(self) -> None:
        if self.is_kept and not self.is_done:  # the graph is gone and no backward will come
            self.unit.drop_kept(self)


class UnitState:
    """What the engine knows about one wrapped module. Holds the module weakly: saved graphs hold this object."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        flats: list[FlatParameter],
        *,
        groups: Groups,
        stage: Stage,
        precision: Precision,
        reshard_after_forward: bool | None,
        prefetch: int,
        buffers: list[tuple[dict, str]],
        hook_dicts: list[dict],
    ) -> None:
        self.module = weakref.ref(module)
        self.name = name
        self.flats = flats
        self.groups = groups
        self.stage = stage
        self.precision = precision
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self.hook_dicts = hook_dicts
        self.buffers = buffers if precision.buffer_dtype is not None else []
        self.input_dtype = precision.param_dtype if precision.cast_forward_inputs else None
        self.schedule: Schedule
        self.index = 0
        self.requires_sync = True
        self.is_active = False
        self.open_calls = 0
        self.kept_calls = 0
        self._call: Call | None = None
        self._fired = 0
        self._fired_in = -1
        for flat in flats:
            flat.unit = self
        self.count_trainable()

    # ------------------------------------------------------------------ forward

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call ``function`` (the module's own ``__call__`` or method) with full weights."""
        if self.is_active:  # one of the unit's own methods calls another: the weights are there
            return function(*args, **kwargs)
        if torch._C._get_tracing_state() is not None or (torch._C._len_torch_dispatch_stack() and _is_exported()):
            raise ParameterUseError(
                "a unit cannot be traced or exported (torch.jit, torch.export, make_fx): its gathers are in no graph",
                unit=self.name,
                rank=self.groups.rank,
                cure="trace the plain module, before fsdp_wrap or loaded from fsdp.full_state_dict",
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ParameterUseError(
                "torch.func transforms cannot pass through a unit: they trace it without its gathers",
                unit=self.name,
                rank=self.groups.rank,
                cure="apply the transform to the plain module, or inside `with fsdp.full_params(module):`",
            )
        schedule = self.schedule
        is_recompute = current_task() != -1
        if self._expected_any and not torch.is_grad_enabled() and (is_recompute or schedule.runs_with_grad):
            refuse_lost_gradients(self.name, self.flats[0].names[0], self.groups.rank)
        schedule.enter(self, is_recompute)
        call = None
        try:
            call = self._call = Call(self, schedule.tick())  # without gradients too: forward may switch them on
            self.is_active = True
            if events.active is not None:
                events.active.emit("forward_start", self.name)
            if self.flats:
                self._gather(FORWARD)
            if self.input_dtype is not None:
                args, kwargs = self._cast_inputs(args, kwargs)
            if self.buffers:
                with _CastBuffers(self.buffers, self.precision.buffer_dtype):
                    output = function(*args, **kwargs)
            else:
                output = function(*args, **kwargs)
            if self.precision.output_dtype is not None:
                output = map_tensors(_caster(self.precision.output_dtype), output)
            for flat in self.flats:
                flat.check_unwritten()
            expects_backward = self._prepare_backward(call, output)
        except BaseException as failure:
            hooks_refused = schedule.is_guarding and refuses_guard(failure)
            for flat in self.flats:
                flat.settle()
            try:
                self._leave(call, is_recompute, keep=False)
            finally:
                # In recomputation, an exception is how non-reentrant checkpointing stops early.
                schedule.leave(self, is_recompute, has_failed=not is_recompute)
            if hooks_refused:
                raise self._refuse_disabled_hooks() from failure
            raise
        if events.active is not None:
            events.active.emit("forward_stop", self.name)
        if self.flats:
            self._leave(call, is_recompute, keep=self._keeps_after_forward(), expects_backward=expects_backward)
        else:
            self.is_active = False
            self._call = None
            if call is not None:
                call.stop = schedule.tick()
        schedule.leave(self, is_recompute, has_failed=False)
        return output

    def _keeps_after_forward(self) -> bool:
        if self.reshard_after_forward is None:
            return self.schedule.root is self
        return not self.reshard_after_forward

    def _gather(self, kind: int) -> None:
        schedule = self.schedule
        if kind == FORWARD:
            self._follow_requires_grad()
        self._expire_together()
        sends = any(flat.needs_gather for flat in self.flats)
        schedule.announce(kind if sends else RESIDENT, self)
        waiting = schedule.agreement.waiting(self, KINDS[kind])
        for flat in self.flats:
            flat.unshard(waiting)
        schedule.resident[self] = None
        schedule.prefetch_after(self, kind)
        for flat in self.flats:
            flat.wait_unsharded()
            flat.bind_full()
        if events.active is not None:
            events.active.emit("wait", self.name)

    def _refuse_disabled_hooks(self) -> ParameterUseError:
        return ParameterUseError(
            "saved-tensor hooks cannot be switched off inside the forward of a wrapped model, and torch.func.grad and the "
            "like do so: its own ones look after weights that backward reaches by a side door",
            unit=self.name,
            rank=self.groups.rank,
            cure="switch them off around the call: `with torch.autograd.graph.disable_saved_tensors_hooks('...'): "
            "output = model(x)`. Only what units return may carry gradients then",
        )

    def _expire_together(self) -> None:
        """Of what rests full and trains all is gathered again, or nothing. A rank that has no element of a flat parameter
        may have left it out of its optimizer, and does not know then that it has changed."""
        if len(self.flats) > 1 and not self.stage.shards_parameters:
            together = [flat for flat in self.flats if flat.trainable and flat.rests_full]
            if any(flat.needs_gather for flat in together):
                for flat in together:
                    if not flat.is_arriving:
                        flat.gathered_generation = -1

    def _follow_requires_grad(self) -> None:
        with engine_access():
            thawed = next((flat for flat in self.flats if flat.sync_requires_grad()), None)
        if thawed is not None:
            raise ParameterUseError(
                "a frozen parameter was unfrozen while its model runs",
                unit=self.name,
                parameter=thawed.names[0],
                rank=self.groups.rank,
                cure="change requires_grad before the outermost module is called",
            )

    def gather_ahead(self, kind: int) -> bool:
        """Start to gather because this unit is expected next. True if it was not there."""
        waiting = self.schedule.agreement.waiting(self, KINDS[kind])
        self._expire_together()
        started = False
        for flat in self.flats:
            started |= flat.unshard(waiting)
        self.schedule.resident[self] = None
        return started

    def _leave(self, call: Call | None, is_recompute: bool, keep: bool, expects_backward: bool = False) -> None:
        self.is_active = False
        self._call = None
        if call is not None:
            call.stop = self.schedule.tick()
        if is_recompute and self.open_calls:
            return  # backward is inside this unit: it needs the weights right after
        for flat in self.flats:
            flat.bind_users()
        if is_recompute and is_replaying():
            return  # the backward that computes this segment again comes to this unit next: no second gather
        if keep and not is_recompute and expects_backward:
            call.is_kept = True
            self.kept_calls += 1
        elif not (keep and self.schedule.depth > 1):  # else kept until the outermost call returns
            self.reshard()

    def _prepare_backward(self, call: Call | None, output: Any) -> bool:
        """Hook the nodes of all outputs. False if no gradient can come back through any of them."""
        expects_backward = False
        for tensor in tensors_in(output):
            if self.flats:
                self._check_not_a_weight(tensor)
            if not tensor.requires_grad:
                continue
            for hooked in (tensor, tensor._base):  # an in-place change of a view replaces the view's node
                if hooked is not None and hooked.grad_fn is not None:
                    hooked.grad_fn.register_prehook(call)
                    expects_backward = True
        return expects_backward

    def _check_not_a_weight(self, tensor: torch.Tensor) -> None:
        flat = owner_of(tensor)
        if flat is not None and flat.unit is self:
            with engine_access():
                name = next((n for n, l in zip(flat.names, flat.leaves) if l.data_ptr() == tensor.data_ptr()), None)
            raise ParameterUseError(
                "a unit returned one of its own weights, which are gone when its forward ends",
                unit=self.name,
                parameter=name or ", ".join(flat.names),
                rank=self.groups.rank,
                cure="return a copy (weight.clone()), or use the weight outside inside "
                "`with fsdp.full_params(module):`",
            )

    def _cast_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        cast = _caster(self.input_dtype)
        return tuple(map_tensors(cast, arg) for arg in args), {k: map_tensors(cast, v) for k, v in kwargs.items()}

    def current_call(self) -> Call:
        """The call that is running, or that a backward is in, for weights saved by it."""
        if self._call is not None:
            return self._call
        return next((c for c in self.schedule.open_calls if c.unit is self), None) or Call(self, self.schedule.tick())

    # ------------------------------------------------------------------ backward

    def gather_for_backward(self) -> None:
        if self.flats:
            self._gather(BACKWARD)
        if events.active is not None:
            events.active.emit("backward_start", self.name)

    def on_gradient(self, flat: FlatParameter, index: int, gradient: torch.Tensor) -> None:
        """A leaf's gradient is complete."""
        schedule = self.schedule
        if not schedule.in_backward:
            schedule.enter_backward()
        if torch.is_grad_enabled():  # create_graph
            with torch.no_grad():
                flat.gradient.accumulate(index, gradient.detach())
        else:
            flat.gradient.accumulate(index, gradient)
        backward = schedule.backward_id
        if self._fired_in != backward:
            self._fired_in = backward
            self._fired = 0
        if flat.arrived_in[index] != backward:
            flat.arrived_in[index] = backward
            self._fired += 1
            if self._fired == self._expected and not any(self.hook_dicts):
                schedule.complete(self)

    def on_outside_gradient(self, flat: FlatParameter, index: int, gradient: torch.Tensor) -> None:
        """A gradient from a use outside the unit's forward (``full_params``); reduced with the others, or at the end."""
        if not self.schedule.in_backward:
            self.schedule.enter_backward()
        with torch.no_grad():
            flat.gradient.accumulate(index, gradient.detach())

    def count_trainable(self) -> None:
        """How many leaves complete this unit's backward; 0 if frozen weights may be needed after the last of them."""
        with engine_access():
            for flat in self.flats:
                flat.trains = any(leaf.requires_grad for leaf in flat.leaves)
            flags = [leaf.requires_grad for flat in self.flats for leaf in flat.leaves]
        self._expected = len(flags) if all(flags) else 0
        self._expected_any = any(flags)

    @property
    def has_unreduced(self) -> bool:
        return any(flat.gradient is not None and flat.gradient.has_unreduced for flat in self.flats)

    def rest(self) -> None:
        """Modules hold the users' parameters and the full buffers are freed, unless something still needs them."""
        if self.is_active or self.open_calls:
            return
        for flat in self.flats:
            flat.bind_users()
        if not self.kept_calls:
            self.reshard()

    def reshard(self) -> None:
        if self.schedule.keeps_weights:
            return
        for flat in self.flats:
            flat.reshard()
        self.schedule.resident.pop(self, None)

    def finish_call(self, call: Call) -> None:
        """A backward has passed this call."""
        if call.is_kept and not call.is_done:
            self.kept_calls = max(0, self.kept_calls - 1)  # 0 after an error reset it
        call.is_done = True

    def drop_kept(self, call: Call) -> None:
        """The graph of a kept call was dropped without a backward."""
        call.is_done = True
        self.kept_calls = max(0, self.kept_calls - 1)
        if not self.kept_calls:
            self.schedule.rest_when_idle(self)

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict) -> UnitState:
        twin = UnitState.__new__(UnitState)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        module = self.module()
        twin.module = weakref.ref(memo[id(module)]) if id(module) in memo else (lambda: None)
        twin.flats = [copy.deepcopy(flat, memo) for flat in self.flats]
        for flat, original in zip(twin.flats, self.flats):
            flat.unit = twin
            flat.locate(original, memo)
        twin.buffers = [(memo.get(id(d), d), key) for d, key in self.buffers]
        twin.hook_dicts = [memo.get(id(d), d) for d in self.hook_dicts]
        twin.is_active = False
        twin.open_calls = twin.kept_calls = 0
        twin._call = None
        twin._fired_in = -1
        twin.schedule = copy.deepcopy(self.schedule, memo)
        twin.schedule.add_copy(twin, is_root=self.schedule.root is self)
        return twin


def _is_exported() -> bool:
    """Whether operations are being recorded. (torch.compile leaves units out of its graphs.)"""
    keys = torch._C._TorchDispatchModeKey
    modes = (torch._C._get_dispatch_mode(key) for key in (keys.PROXY, keys.FUNCTIONAL))
    return torch.compiler.is_exporting() or any(mode is not None for mode in modes)


class _CastBuffers:
    """Floating buffers in another dtype inside forward; what a module writes into them is kept."""

    def __init__(self, places: list[tuple[dict, str]], dtype: torch.dtype) -> None:
        self._places = places
        self._dtype = dtype

    def __enter__(self) -> None:
        self._saved = []
        for place, key in self._places:
            own = place.get(key)
            if own is not None and own.is_floating_point() and own.dtype != self._dtype:
                shared = next((saved for saved in self._saved if saved[2] is own), None)
                cast = own.to(self._dtype) if shared is None else shared[3]
                self._saved.append((place, key, own, cast, cast._version))
                place[key] = cast

    def __exit__(self, *exc: object) -> None:
        for place, key, own, cast, version in self._saved:
            found = place[key]
            if found is not cast or cast._version != version:
                with torch.no_grad():
                    own.copy_(found)
            place[key] = own


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return cast

