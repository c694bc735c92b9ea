"""One step of a plain model on fake tensors: when each unit is used, and what is alive in between.

Nothing is computed and nothing is sharded. The result says how many bytes of activations and gradients live between
the moments that the engine reacts to (a unit's call begins and ends, backward reaches its outputs, a gradient is
complete); :mod:`fsdplite.planning.replay` adds what the engine would hold there, for any number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..errors import ConfigError
from ..flat_spec import FlatSpec
from ..groups import Groups
from ..low_precision import keep_in_fp32, kept_modules
from ..modules import user_name
from ..precision import Precision
from ..recompute import passes
from ..recompute.blocks import find_blocks
from ..recompute.plan import recompute_in_segments
from ..structure import map_tensors, tensors_in
from .blueprint import Blueprint
from .live_bytes import LiveBytes

__all__ = [
    "ENTER", "GRADIENT", "IGNORED", "LEAVE", "OPEN", "STOP", "FakeStep", "StepEvent", "made_up_step", "run_step",
]  # fmt: skip

ENTER, LEAVE, OPEN, GRADIENT, STOP = "enter", "leave", "open", "gradient", "stop"
IGNORED = -1  # in place of a unit: the parameter belongs to none

current_task = torch._C._current_graph_task_id


@dataclass(frozen=True)
class StepEvent:
    """Something that the engine would react to.

    Attributes:
        kind: ENTER and LEAVE a unit's call, OPEN (backward reaches its outputs), GRADIENT (one is complete), STOP.
        unit: Index of the unit.
        call: Number of the call, for ENTER, LEAVE and OPEN.
        flat, index: Which parameter, for GRADIENT.
        bytes: Of the gradient.
        is_recompute: The call happens inside backward.
        is_replay: It is one of a segment of blocks that run again together, and the unit stays for its backward.
        expects_backward: LEAVE: a gradient can come back through the outputs.
        live_bytes: Activations and gradients alive at this moment.
        peak_bytes: Most bytes alive since the event before.
        flops, traffic_bytes, operators: Work since the event before.
    """

    kind: str
    unit: int = 0
    call: int = 0
    flat: int = 0
    index: int = 0
    bytes: int = 0
    is_recompute: bool = False
    is_replay: bool = False
    expects_backward: bool = False
    live_bytes: int = 0
    peak_bytes: int = 0
    flops: int = 0
    traffic_bytes: int = 0
    operators: int = 0


@dataclass(frozen=True)
class FakeStep:
    """Forward and backward of one batch.

    Attributes:
        events: In order.
        input_bytes: Of the batch itself, which lives as long as the step.
        was_run: False if made up from the structure alone, without inputs: then it holds no activations.
    """

    events: tuple[StepEvent, ...]
    input_bytes: int = 0
    was_run: bool = True


def run_step(
    model: nn.Module,
    blueprint: Blueprint,
    precision: Precision,
    args: tuple,
    kwargs: dict,
    loss_of: Callable[..., torch.Tensor],
    mode: FakeTensorMode,
    segments: Any = None,
    methods: tuple[str, ...] = (),
) -> FakeStep:
    """Run forward and backward of a fake model, whose modules are changed for it.

    Args:
        model: What ``fake_copy`` made.
        blueprint: Of this very model.
        args, kwargs: One rank's batch; only shapes, dtypes and ``requires_grad`` matter.
        loss_of: From the model and the batch to a scalar.
        segments: ``"sqrt"`` or a byte budget: blocks are recomputed in segments, outside their units.
        methods: Names of methods that behave as ``forward`` does.

    Raises:
        ConfigError: The model cannot run on fake tensors: it reads a value, say.
    """
    recorder = _Recorder()
    blocks = find_blocks(model) if segments is not None else []
    _prepare(model, blueprint, precision, recorder, mode, methods)
    if segments is not None:
        recompute_in_segments(segments, blocks, Groups())
    with mode:
        args, kwargs = map_tensors(_as_fake, (args, kwargs))
        given = list(tensors_in((args, kwargs)))
        for tensor in [*given, *model.parameters(), *model.buffers()]:
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
    _refuse_uncalled(recorder.events, blueprint)
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in given}
    return FakeStep(tuple(recorder.events), sum(sizes.values()))


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


def _refuse_uncalled(events: list[StepEvent], blueprint: Blueprint) -> None:
    """A wrapped model would refuse the same: nothing gathers a unit that is not called."""
    called = {event.unit for event in events if event.kind == ENTER}
    for event in events:
        if event.kind == GRADIENT and event.unit not in called and event.unit != IGNORED:
            unit = blueprint.partition.units[event.unit]
            raise ConfigError(
                "weights of a unit are used and its module is not called",
                unit=user_name(unit.name),
                parameter=blueprint.specs[event.unit][event.flat].names[event.index][0],
                cure="name the method that is called instead of forward: forward_methods=(...); or call the module",
            )


def made_up_step(blueprint: Blueprint) -> FakeStep:
    """Every unit once, in ``named_modules`` order inside the root, and back: what is known without inputs."""
    below = range(1, len(blueprint.specs))
    events = [StepEvent(ENTER, 0, 0)]
    for unit in below:
        events += [StepEvent(ENTER, unit, unit), StepEvent(LEAVE, unit, unit, expects_backward=True)]
    events.append(StepEvent(LEAVE, 0, 0, expects_backward=True))
    for unit in (0, *reversed(below)):
        events.append(StepEvent(OPEN, unit, unit))
        if unit:
            events += _made_up_gradients(unit, blueprint.specs[unit])
    events += _made_up_gradients(0, blueprint.specs[0])
    for index, spec in enumerate(blueprint.ignored):
        if spec.parameter.requires_grad:
            events.append(_made_up_gradient(IGNORED, 0, index, spec.parameter.numel() * spec.parameter.itemsize))
    events.append(StepEvent(STOP))
    return FakeStep(tuple(events), was_run=False)


def _made_up_gradients(unit: int, specs: list[FlatSpec]) -> list[StepEvent]:
    events = []
    for flat, spec in enumerate(specs):
        for index, parameter in enumerate(spec.parameters if spec.trainable else ()):
            events.append(_made_up_gradient(unit, flat, index, parameter.numel() * spec.compute_dtype.itemsize))
    return events


def _made_up_gradient(unit: int, flat: int, index: int, size: int) -> StepEvent:
    # The gradient itself is alive while it is copied.
    return StepEvent(GRADIENT, unit, flat=flat, index=index, bytes=size, live_bytes=size, peak_bytes=size)


# ---------------------------------------------------------------------------------------------------------- recording


class _FakeLiveBytes(LiveBytes):
    """Answers some questions itself: where a fake tensor lies, which is asked all the time, and whether two states of
    random generators are equal, which are real bytes (let them be).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is torch.ops.aten.equal.default and args[0].dtype == torch.uint8:
            return True
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Recorder:
    def __init__(self) -> None:
        self.live = _FakeLiveBytes()
        self.events: list[StepEvent] = []
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
    """Stands where the engine would stand around a unit's call."""

    def __init__(self, recorder: _Recorder, unit: int, precision: Precision) -> None:
        self.recorder = recorder
        self.unit = unit
        self.input_dtype = precision.param_dtype if precision.cast_forward_inputs else None
        self.output_dtype = precision.output_dtype
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
            args, kwargs = map_tensors(_caster(self.input_dtype), (args, kwargs))
            output = map_tensors(_caster(self.output_dtype), function(*args, **kwargs))
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
) -> None:
    """Weights and buffers in the dtypes that forward sees, and a watch around every unit and on every gradient."""
    _, outermost = kept_modules(model, precision)
    kept = {id(inner) for module in outermost for inner in module.modules()}
    for module in outermost:
        keep_in_fp32(module, precision.param_dtype)
    with mode:
        for position, (unit, specs) in enumerate(zip(blueprint.partition.units, blueprint.specs)):
            for flat, spec in enumerate(specs):
                for index, (parameter, places) in enumerate(zip(spec.parameters, spec.locations)):
                    weight = nn.Parameter(
                        torch.empty(parameter.shape, dtype=spec.compute_dtype), requires_grad=spec.trainable
                    )
                    for holder, key in places:
                        holder._parameters[key] = weight
                    if spec.trainable:
                        weight.register_post_accumulate_grad_hook(_gradient_hook(recorder, position, flat, index))
            for buffer in unit.buffers if precision.buffer_dtype is not None else ():
                value = buffer.module._buffers[buffer.key]
                if value.is_floating_point() and id(buffer.module) not in kept:
                    buffer.module._buffers[buffer.key] = torch.empty(value.shape, dtype=precision.buffer_dtype)
        for index, spec in enumerate(blueprint.ignored):
            if spec.parameter.requires_grad:
                spec.parameter.register_post_accumulate_grad_hook(_gradient_hook(recorder, IGNORED, 0, index))
    for position, unit in enumerate(blueprint.partition.units):
        cls = type(unit.module)
        namespace = {name: _entry_point(cls, name) for name in methods if callable(getattr(cls, name, None))}
        namespace |= {"__module__": cls.__module__, "__slots__": ()}
        unit.module.__class__ = type(cls.__name__, (_Watched, cls), namespace)
        unit.module.__dict__["_fsdp_watch"] = _Watch(recorder, position, precision)


def _gradient_hook(recorder: _Recorder, unit: int, flat: int, index: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(leaf: torch.Tensor) -> None:
        if leaf.grad.is_sparse:  # as gradient_buffer does
            leaf.grad = leaf.grad.to_dense()
        size = leaf.grad.numel() * leaf.grad.element_size()
        recorder.note(GRADIENT, unit=unit, flat=flat, index=index, bytes=size)
        leaf.grad = None
        recorder.live.take()

    return on_gradient


def _as_fake(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


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
