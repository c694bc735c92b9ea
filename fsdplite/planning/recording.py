"""A plain model's step on fake tensors, seen by modules: one recording serves every policy whose units were watched.

Nothing is computed and nothing is sharded. A dispatch mode counts the bytes alive at every operator; what stands around
watched modules and on every gradient notes the moments to which the engine reacts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..errors import ConfigError
from ..groups import Groups
from ..low_precision import keep_in_fp32, kept_modules
from ..modules import user_name
from ..precision import Precision
from ..recompute import passes
from ..recompute.blocks import find_blocks
from ..recompute.plan import recompute_in_segments
from ..structure import map_tensors, tensors_in
from .blueprint import Blueprint
from .fake_copy import unregistered_tensors
from .fake_step import ENTER, GRADIENT, IGNORED, LEAVE, OPEN, STOP, FakeStep, StepEvent
from .repeated_work import RepeatedWork

__all__ = ["Recording", "record_step"]

current_task = torch._C._current_graph_task_id


@dataclass(frozen=True)
class Recording:
    """Forward and backward of one batch.

    Attributes:
        events: In order. ``unit`` is an index into ``modules``, and of a gradient into ``parameters``.
        modules: Names of the modules whose calls were noted.
        parameters: Names of parameters.
        units: Of the modules, those that were units: floating inputs and outputs were cast around them.
        casts: Of the modules, those around which a unit casts something.
        input_bytes: Of the batch itself, which lives as long as the step.
    """

    events: tuple[StepEvent, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    units: frozenset[str]
    casts: frozenset[str]
    input_bytes: int

    def serves(self, blueprint: Blueprint) -> bool:
        """Whether a step with these units would be the same but for what was noted."""
        wanted = {unit.name for unit in blueprint.partition.units}
        return wanted <= set(self.modules) and not (wanted ^ self.units) & self.casts

    def step_of(self, blueprint: Blueprint) -> FakeStep:
        """The moments of these units. What lies between them is added up.

        Raises:
            ConfigError: A unit has gradients and was not called.
        """
        index_of = {unit.name: index for index, unit in enumerate(blueprint.partition.units)}
        units = [index_of.get(name) for name in self.modules]
        places = _places(blueprint)
        found: list[StepEvent] = []
        skipped: list[StepEvent] = []
        called: set[int] = set()
        for event in self.events:
            if event.kind == GRADIENT:
                unit, flat, index = places[self.parameters[event.unit]]
                if unit not in called and unit != IGNORED:
                    _refuse_uncalled(blueprint, unit, self.parameters[event.unit])
                changes = {"unit": unit, "flat": flat, "index": index}
            elif event.kind == STOP:
                changes = {}
            elif (unit := units[event.unit]) is None:
                skipped.append(event)
                continue
            else:
                called.add(unit)
                changes = {"unit": unit}
            if skipped:
                changes["peak_bytes"] = max(e.peak_bytes for e in (*skipped, event))
                for name in ("flops", "traffic_bytes", "operators"):
                    changes[name] = sum(getattr(e, name) for e in (*skipped, event))
                skipped.clear()
            found.append(replace(event, **changes))
        return FakeStep(tuple(found), self.input_bytes)


def _places(blueprint: Blueprint) -> dict[str, tuple[int, int, int]]:
    """Where each parameter is: unit, flat parameter, index."""
    places = {}
    for position, specs in enumerate(blueprint.specs):
        for flat, spec in enumerate(specs):
            for index, names in enumerate(spec.names):
                places[names[0]] = position, flat, index
    for index, spec in enumerate(blueprint.ignored):
        places[user_name(spec.name)] = IGNORED, 0, index
    return places


def _refuse_uncalled(blueprint: Blueprint, unit: int, parameter: str) -> None:
    """A wrapped model would refuse the same: nothing gathers a unit that is not called."""
    raise ConfigError(
        "weights of a unit are used and its module is not called",
        unit=user_name(blueprint.partition.units[unit].name),
        parameter=parameter,
        cure="name the method that is called instead of forward: forward_methods=(...); or call the module",
    )


def record_step(
    model: nn.Module,
    blueprint: Blueprint,
    precision: Precision,
    args: tuple,
    kwargs: dict,
    loss_of: Callable[..., torch.Tensor],
    mode: FakeTensorMode,
    segments: Any = None,
    methods: tuple[str, ...] = (),
    watched: Iterable[str] = (),
) -> Recording:
    """Run forward and backward of a fake model, whose modules are changed for it.

    Args:
        model: What ``fake_copy`` made.
        blueprint: Of this very model.
        args, kwargs: One rank's batch; only shapes, dtypes and ``requires_grad`` matter.
        loss_of: From the model and the batch to a scalar.
        segments: ``"sqrt"`` or a byte budget: blocks are recomputed in segments, outside their units.
        methods: Names of methods that behave as ``forward`` does.
        watched: Names of modules whose calls are noted beside those of the units.

    Raises:
        ConfigError: The model cannot run on fake tensors: it reads a value, say.
    """
    recorder = _Recorder(mode)
    blocks = find_blocks(model) if segments is not None else []
    names = _prepare(model, blueprint, precision, recorder, mode, methods, watched)
    if segments is not None:
        recompute_in_segments(segments, blocks, Groups())
    with mode:
        args, kwargs = map_tensors(functools.partial(_as_fake, {}), (args, kwargs))
        given = list(tensors_in((args, kwargs)))
        for tensor in [*given, *model.parameters(), *model.buffers(), *unregistered_tensors(model)]:
            recorder.live.exclude(tensor)
    try:
        with _undisturbed(), mode, recorder.live, torch.enable_grad():
            # What a budget allows is known after one step.
            for _ in range(1 if segments in (None, "sqrt") else 2):
                recorder.restart()
                _forward_and_backward(recorder, model, args, kwargs, loss_of)
    except ConfigError:
        raise
    except Exception as failure:
        raise ConfigError(
            "the model cannot run on fake tensors",
            found=f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
            + _place_of(failure, model),
            cure="check inputs= (a tensor, a tuple, a dict, or (args, kwargs)); a forward that reads values of tensors "
            "(.item(), if x.sum() > 0) cannot be planned with its activations: leave inputs out",
        ) from failure
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in given}
    return Recording(
        events=tuple(recorder.events),
        modules=tuple(names),
        parameters=tuple(_places(blueprint)),
        units=frozenset(unit.name for unit in blueprint.partition.units),
        casts=frozenset(names[index] for index in recorder.casts),
        input_bytes=sum(sizes.values()),
    )


def _place_of(failure: BaseException, model: nn.Module) -> str:
    """The innermost module that was running."""
    names = {id(module): name for name, module in model.named_modules()}
    place, trace = "", failure.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        if names.get(id(running)):
            place = f", in '{user_name(names[id(running)])}' ({type(running).__name__})"
        trace = trace.tb_next
    return place


def _forward_and_backward(
    recorder: _Recorder, model: nn.Module, args: tuple, kwargs: dict, loss_of: Callable[..., torch.Tensor]
) -> None:
    passes.begin()
    try:
        loss = loss_of(model, *args, **kwargs)
    finally:
        passes.end()
    if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
        raise ConfigError(
            "the loss is not a scalar that needs gradients",
            found=type(loss).__name__ if not isinstance(loss, torch.Tensor) else f"shape {tuple(loss.shape)}",
            cure="pass loss_of=, a function of the model and the batch that returns a scalar",
        )
    loss.backward()
    recorder.note(STOP)


# ---------------------------------------------------------------------------------------------------------- recording


class _Recorder:
    def __init__(self, mode: FakeTensorMode) -> None:
        self.live = RepeatedWork(mode)
        self.events: list[StepEvent] = []
        self.casts: set[int] = set()
        self.calls = 0

    def restart(self) -> None:
        """The next step is the one that counts."""
        self.live.take()
        self.events.clear()

    def note(self, kind: str, **details: Any) -> None:
        live = self.live.live
        peak, flops, traffic, operators = self.live.take()
        work = {"flops": flops, "traffic_bytes": traffic, "operators": operators}
        self.events.append(StepEvent(kind, live_bytes=live, peak_bytes=peak, **work, **details))


class _Call:
    """One call of a unit; called itself as a pre-hook of its outputs' nodes."""

    def __init__(self, recorder: _Recorder, unit: int) -> None:
        self.recorder = recorder
        self.unit = unit
        self.number = recorder.calls
        self.task = -1
        recorder.calls += 1

    def __call__(self, gradients: Any) -> None:
        task = current_task()
        if self.task != task:
            self.task = task
            self.recorder.note(OPEN, unit=self.unit, call=self.number)


class _Watch:
    """Stands where the engine would stand around a unit's call; or around a module that may be one."""

    def __init__(self, recorder: _Recorder, unit: int, precision: Precision, is_unit: bool) -> None:
        self.recorder = recorder
        self.unit = unit
        self.input_dtype = precision.param_dtype if precision.cast_forward_inputs else None
        self.output_dtype = precision.output_dtype
        self.is_unit = is_unit
        self.is_active = False

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if self.is_active:
            return function(*args, **kwargs)
        is_recompute = current_task() != -1
        call = _Call(self.recorder, self.unit)
        self.recorder.note(ENTER, unit=self.unit, call=call.number, is_recompute=is_recompute)
        self.is_active = True
        expects_backward = False
        try:
            args, kwargs = self._cast(self.input_dtype, (args, kwargs))
            output = self._cast(self.output_dtype, function(*args, **kwargs))
            expects_backward = self._hook(call, output)
        finally:
            self.is_active = False
            self.recorder.note(
                LEAVE,
                unit=self.unit,
                call=call.number,
                is_recompute=is_recompute,
                is_replay=is_recompute and passes.is_replaying(),
                expects_backward=expects_backward,
            )
        return output

    def _cast(self, dtype: torch.dtype | None, values: Any) -> Any:
        if dtype is None:
            return values
        if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors_in(values)):
            self.recorder.casts.add(self.unit)
        return map_tensors(_caster(dtype), values) if self.is_unit else values

    def _hook(self, call: _Call, output: Any) -> bool:
        found = False
        for tensor in tensors_in(output):
            if not (torch.is_grad_enabled() and tensor.requires_grad):
                continue
            for hooked in (tensor, tensor._base):
                if hooked is not None and hooked.grad_fn is not None:
                    hooked.grad_fn.register_prehook(call)
                    found = True
        return found


class _Watched:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not passed on: a registry in the user's base class must not see the class made on the fly."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_fsdp_watch"].run(super().__call__, args, kwargs)


def _entry_point(cls: type, name: str) -> Any:
    original = getattr(cls, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_fsdp_watch"].run(functools.partial(original, self), args, kwargs)

    return method


def _prepare(
    model: nn.Module,
    blueprint: Blueprint,
    precision: Precision,
    recorder: _Recorder,
    mode: FakeTensorMode,
    methods: tuple[str, ...],
    watched: Iterable[str],
) -> list[str]:
    """Weights and buffers in the dtypes that forward sees, a watch on every gradient and around units and others.

    Returns:
        The names of all modules with a watch, as their number says.
    """
    numbers = {name: number for number, name in enumerate(_places(blueprint))}
    _, outermost = kept_modules(model, precision)
    kept = {id(inner) for module in outermost for inner in module.modules()}
    for module in outermost:
        keep_in_fp32(module, precision.param_dtype)
    with mode:
        for unit, specs in zip(blueprint.partition.units, blueprint.specs):
            for spec in specs:
                for parameter, names, places in zip(spec.parameters, spec.names, spec.locations):
                    weight = nn.Parameter(
                        torch.empty(parameter.shape, dtype=spec.compute_dtype), requires_grad=spec.trainable
                    )
                    for holder, key in places:
                        holder._parameters[key] = weight
                    if spec.trainable:
                        weight.register_post_accumulate_grad_hook(_gradient_hook(recorder, numbers[names[0]]))
            for buffer in unit.buffers if precision.buffer_dtype is not None else ():
                value = buffer.module._buffers[buffer.key]
                if value.is_floating_point() and id(buffer.module) not in kept:
                    buffer.module._buffers[buffer.key] = torch.empty(value.shape, dtype=precision.buffer_dtype)
        for spec in blueprint.ignored:
            if spec.parameter.requires_grad:
                hook = _gradient_hook(recorder, numbers[user_name(spec.name)])
                spec.parameter.register_post_accumulate_grad_hook(hook)
    modules = {unit.name: unit.module for unit in blueprint.partition.units}
    units = len(modules)
    others = dict(model.named_modules())
    modules |= {name: others[name] for name in watched if name not in modules}
    for position, module in enumerate(modules.values()):
        cls = type(module)
        namespace = {name: _entry_point(cls, name) for name in methods if callable(getattr(cls, name, None))}
        namespace |= {"__module__": cls.__module__, "__slots__": ()}
        module.__class__ = type(cls.__name__, (_Watched, cls), namespace)
        module.__dict__["_fsdp_watch"] = _Watch(recorder, position, precision, position < units)
    return list(modules)


def _gradient_hook(recorder: _Recorder, number: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(leaf: torch.Tensor) -> None:
        is_sparse = leaf.grad.is_sparse
        if is_sparse:  # as gradient_buffer does
            leaf.grad = leaf.grad.to_dense()
        size = leaf.grad.numel() * leaf.grad.element_size()
        recorder.note(GRADIENT, unit=number, bytes=size, is_sparse=is_sparse)
        leaf.grad = None
        recorder.live.take()

    return on_gradient


def _as_fake(known: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """The same for what is given twice, as tokens that are labels too."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.is_nested:
        raise ConfigError("inputs hold a nested tensor, whose sizes are values", cure="plan with a padded one")
    if id(tensor) not in known:
        strides = {"stride": tensor.stride()} if tensor.layout is torch.strided else {}
        empty = torch.empty_strided if strides else torch.empty
        fake = empty(tensor.shape, **strides, dtype=tensor.dtype, device="cpu")
        known[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    return known[id(tensor)]


def _caster(dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return tensor.to(dtype)

    return cast


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Compiled blocks run as they are written: what a compiler saves is not known beforehand. Garbage waits."""
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level, collects = log.level, gc.isenabled()
    log.setLevel(logging.CRITICAL)  # what fails is raised, and need not be printed as well
    gc.disable()  # thousands of short-lived fakes make it run all the time
    try:
        with eager:
            yield
    finally:
        log.setLevel(level)
        if collects:
            gc.enable()
