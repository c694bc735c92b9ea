"""``fsdp.plan``: what a sharded step will hold and send, without a device and without a process group."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..events import Trace
from ..keywords import known_keywords
from ..modules import user_name
from .blueprint import Blueprint, PlannedUnit
from .fake_copy import unregistered_tensors
from .fake_step import GRADIENT, IGNORED
from .fits import check_fits
from .measurement import Comparison, compare
from .memory import PHASES, Peak
from .optimizer_cost import measure_optimizer, resolve_optimizer
from .page import as_page
from .question import Question, ask, ask_again
from .replay import Replay
from .report import as_dict, as_table
from .traffic import Task, Traffic

__all__ = ["Plan", "Resting", "answer", "apart", "plan"]

T = TypeVar("T")


@dataclass(frozen=True)
class Resting:
    """Bytes that one rank holds between steps; gradients only until ``zero_grad``.

    Attributes:
        parameters: Shards, in the dtype that the optimizer sees.
        gradients: Shards of gradients.
        optimizer: Optimizer state.
        gathered: Full parameters that rest gathered (stages 1 and 2).
        buffers: Buffers of modules, and tensors that they hold without having registered them.
        ignored: Parameters that no unit owns.
        host: What is offloaded to host memory, mirrors and buffers for files included. On a CPU it is the same memory,
            and counted above (parameters, gradients, optimizer) or here.
        disk: Optimizer state in files.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    buffers: int
    ignored: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes of the device that computes."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.buffers + self.ignored


@dataclass(frozen=True, eq=False)
class Plan:
    """The prediction for one rank. ``print(plan)`` shows it, :meth:`to_dict` is for machines.

    Attributes:
        units: The units, the root first: parameters, padding, bytes of shard, full buffer and reduction buffer.
        resting: Bytes between steps.
        peaks: By phase (``"forward"``, ``"backward"``, ``"end of backward"``, ``"step"``): bytes, the unit, the parts.
        traffic: Every collective of one step, and their bytes.
        tasks: Computation and communication in program order.
        to_device_bytes, to_host_bytes: Shards that are copied in a step because something is offloaded.
        disk_bytes: Optimizer state, and masters, that a step reads and writes, together.
        full_peak_bytes: Most bytes of gathered parameters at a time.
        input_bytes: Of one microbatch.
        optimizer: Name of the optimizer.
        has_activations: Whether inputs were given; without them peaks hold no activations.
        notes: What is known to be missing in the numbers.
    """

    units: tuple[PlannedUnit, ...]
    resting: Resting
    peaks: dict[str, Peak]
    traffic: Traffic
    tasks: tuple[Task, ...]
    to_device_bytes: int
    to_host_bytes: int
    disk_bytes: int
    full_peak_bytes: int
    input_bytes: int
    optimizer: str
    has_activations: bool
    notes: tuple[str, ...]
    question: Question

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment of a step."""
        return max(peak.bytes for peak in self.peaks.values())

    @property
    def peak_phase(self) -> str:
        """The phase that holds the peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase].bytes)

    @property
    def peak_unit(self) -> str:
        """The unit that runs at the peak; ``""`` is the root."""
        return self.peaks[self.peak_phase].unit

    @property
    def numel(self) -> int:
        """Parameters of the model that units own."""
        return sum(unit.numel for unit in self.units)

    @property
    def padding_numel(self) -> int:
        return sum(unit.padding_numel for unit in self.units)

    def but(self, **changes: Any) -> Plan:
        """The plan for the same model with options changed; a fake step is run again only if it has to be.

        Raises:
            ConfigError, UnknownOptionError: As :func:`plan` does.
        """
        return answer(ask_again(self.question, changes))

    @staticmethod
    def answer(question: Question) -> Plan:
        """The plan for another question."""
        return answer(question)

    def fits(self, budget: int | str) -> bool:
        """True if the step stays within a budget per rank: bytes, or text such as ``"80GiB"``.

        Raises:
            DoesNotFitError: It does not. The message, and ``.remedies``, hold the cheapest changes that would fit, with
                what each saves and costs.
        """
        return check_fits(self, budget)

    @known_keywords
    def compare(self, model: nn.Module, step: Callable[[], Any] | None = None, *, warm_up: int = 3) -> Comparison:
        """Put what a wrapped model holds and sends beside the prediction.

        Args:
            model: Wrapped as planned.
            step: One whole training step: forward, backward, ``optimizer.step()``, ``zero_grad()``. None: only what
                can be read off the model is compared.
            warm_up: Steps before the one that is measured.

        Returns:
            A :class:`Comparison`; ``print`` shows it. On CPU the peak is that of the storages that operators touch, on
            CUDA that of the allocator.

        Collective: whatever ``step`` does; all ranks must call it alike.
        """
        return compare(self, model, step, warm_up)

    @known_keywords
    def to_html(self, *, timeline: Any = None, comparison: Comparison | None = None, trace: Trace | None = None) -> str:
        """One HTML page, self-contained: memory by phase, units and traffic, and what else is given.

        Args:
            timeline: Of :func:`fsdplite.simulate`.
            comparison: Of :meth:`compare`.
            trace: Of :func:`fsdplite.trace`, recorded in a real step.

        Raises:
            ConfigError: One of the three is something else.
        """
        return as_page(self, timeline, comparison, trace)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return as_dict(self)

    def __str__(self) -> str:
        return as_table(self)


def apart(function: Callable[..., T]) -> Callable[..., T]:
    """Outside of any inference mode, where tensors are made on the CPU, and without a trace in random generators: the
    first optimizer of a process, say, imports the compiler, which draws numbers.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        state = random.getstate()
        try:
            elsewhere = torch.get_default_device().type != "cpu"  # else a context that costs time would change nothing
            place = torch.device("cpu") if elsewhere else contextlib.nullcontext()
            with torch.inference_mode(False), torch.random.fork_rng(devices=[]), place:
                return function(*args, **kwargs)
        finally:
            random.setstate(state)

    return call


@apart
def plan(model: Any, *, world_size: int | None = None, **options: Any) -> Plan:
    """Predict memory and traffic of a sharded step. No process group, no device, nothing allocated.

    Args:
        model: A module (on any device, meta too; it is not changed), or a function without arguments that builds one,
            which is called under the meta device and may return ``(module, make_batch)`` or
            ``(module, make_batch, loss_of)`` as for ``fsdplite parity``.
        world_size: Number of ranks; may be left out if ``mesh`` is given.
        stage, policy, precision, recompute, prefetch, reshard_after_forward, ignored, forward_methods: As for
            ``fsdp_wrap``.
        optimizer: A class, the name of one in ``torch.optim``, a function from parameters to an optimizer, or None.
        offload: None, or an ``Offload``. Host memory and disk are counted apart from the device, except on a CPU.
        mesh: ``(replicas, shards)`` or a ``DeviceMesh``; None: one replica.
        inputs: One rank's microbatch: a tensor, a tuple of positional or a dict of keyword arguments, or
            ``(args, kwargs)``. Only shapes and dtypes matter. None: activations are left out.
        loss_of: From the model and the inputs to a scalar. None: the output if it is one, or its ``loss``, else the
            mean of its floating tensors squared.
        microbatches, no_sync: Backwards per step, and whether all but the last run without synchronisation.
        device: ``"cuda"``, or ``"cpu"``: gloo, which copies what it reduces.
        rank: Whose memory.

    Returns:
        A :class:`Plan` of one step like all that follow the first two, in a loop that drops gradients after each step.

    Raises:
        ConfigError, PolicyError, WrapError: An option, the policy or the model cannot be used; says what can.
    """
    return answer(ask(model, world_size, options))


@apart
def answer(question: Question) -> Plan:
    """Replay a question's step."""
    blueprint, step = question.run()
    setup = question.setup
    units = blueprint.units(setup.shard_size)
    name, make = resolve_optimizer(question.optimizer, question.device)
    used = {(event.unit, event.flat, event.index) for event in step.events if event.kind == GRADIENT}
    order = {user_name(name): position for position, (name, _) in enumerate(question.model.named_parameters())}
    update = _update(units, blueprint, make, question.rank % setup.shard_size, used, order)
    buffers = sum(unit.tensor_buffer_bytes for unit in units) + blueprint.ignored_buffer_bytes
    buffers += sum(map(_bytes, unregistered_tensors(question.model)))
    ignored = sum(_bytes(spec.parameter) for spec in blueprint.ignored)
    rest = _resting(question, units, blueprint, used, update, buffers, ignored)
    resting = {
        "parameter shards": rest.parameters,
        "optimizer state": rest.optimizer,
        "module buffers": buffers,
        "ignored parameters": ignored,
        "batch": step.input_bytes,
    }
    if question.device == "cpu":
        resting["offloaded, beside"] = rest.host
    whole = [spec.parameter for spec in blueprint.ignored]
    offload = question.offload
    leaves = question.device != "cpu" and offload.optimizer is not None and offload.params is None
    work = update.traffic_bytes, update.operators, update.parameter_bytes if leaves else 0
    transient = 0 if _updates_on_host(question) else update.transient_bytes
    replay = Replay(units, setup, step, resting, transient, work, whole)
    replay.run()
    return Plan(
        units=tuple(units),
        resting=rest,
        peaks={phase: replay.memory.peaks[phase] for phase in PHASES if phase in replay.memory.peaks},
        traffic=Traffic(replay.program.calls),
        tasks=tuple(replay.program.tasks),
        to_device_bytes=replay.program.to_device_bytes,
        to_host_bytes=replay.program.to_host_bytes,
        disk_bytes=2 * rest.disk,
        full_peak_bytes=replay.memory.full_peak_bytes,
        input_bytes=step.input_bytes,
        optimizer=name,
        has_activations=step.was_run,
        notes=_notes(question, step.was_run),
        question=question,
    )


def _notes(question: Question, was_run: bool) -> tuple[str, ...]:
    if not was_run:
        return ("without activations, since no inputs were given",)
    kind = nn.LSTM if question.device == "cpu" else nn.RNNBase  # where one kernel runs all steps
    found = [f"'{user_name(name)}' ({type(module).__name__})" if name else "the model"
             for name, module in question.model.named_modules() if isinstance(module, kind)]  # fmt: skip
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (f"without what kernels keep from forward for backward in {', '.join(found[:3])}{more}",) if found else ()


def _updates_on_host(question: Question) -> bool:
    """Whether the optimizer works in another memory than that of the device."""
    offload = question.offload
    return question.device != "cpu" and (offload.params is not None or offload.optimizer is not None)


def _resting(
    question: Question,
    units: list[PlannedUnit],
    blueprint: Blueprint,
    used: set[tuple[int, int, int]],
    update: _Update,
    buffers: int,
    ignored: int,
) -> Resting:
    stage, offload = question.setup.stage, question.offload
    rests_full = stage.shards_optimizer and not stage.shards_parameters
    reduced = {(unit, flat) for unit, flat, _ in used if unit != IGNORED}
    parameters = sum(unit.shard_bytes for unit in units)
    gradients = sum(units[unit].flats[flat].shard_bytes for unit, flat in reduced)
    optimizer, host, disk = update.state_bytes, 0, 0
    masters = 0  # of those, what is kept beside the optimizer's state
    if offload.params is not None:
        mirrored = [flat for unit in units for flat in unit.flats if flat.compute_dtype != flat.dtype]
        host += sum(flat.layout.shard_numel * flat.compute_dtype.itemsize for flat in mirrored)
        masters = sum(flat.shard_bytes for flat in mirrored if flat.trainable)
    if offload.optimizer == "nvme":
        disk, optimizer, parameters = optimizer + masters, 0, parameters - masters
        host += offload.buffers * offload.buffer_bytes * (update.state_tensors + (masters > 0))
    if question.device != "cpu":
        if offload.params is not None:
            host, parameters, gradients = host + parameters + gradients, 0, 0
        if _updates_on_host(question):
            host, optimizer = host + optimizer, 0
    gradients += sum(_bytes(blueprint.ignored[index].parameter) for unit, _, index in used if unit == IGNORED)
    return Resting(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        gathered=sum(unit.full_bytes for unit in units) if rests_full else 0,
        buffers=buffers,
        ignored=ignored,
        host=host,
        disk=disk,
    )


@dataclass(frozen=True)
class _Update:
    """The optimizer on one rank: bytes kept, bytes for a moment, bytes read and written, operators, kinds of state, and
    bytes of what it updates.
    """

    state_bytes: int
    transient_bytes: int
    traffic_bytes: int
    operators: int
    state_tensors: int
    parameter_bytes: int


def _update(
    units: list[PlannedUnit],
    blueprint: Blueprint,
    make: Any,
    rank: int,
    used: set[tuple[int, int, int]],
    order: dict[str, int],
) -> _Update:
    """``order`` is that in which the optimizer updates parameters."""
    found = []
    for unit, flat, index in used:
        if unit == IGNORED:
            spec = blueprint.ignored[index]
            found.append((order[user_name(spec.name)], spec.parameter.dtype, spec.parameter.numel()))
        else:
            planned = units[unit].flats[flat]
            low, high = planned.layout.local_range(index, rank)
            found.append((order[planned.names[index]], planned.dtype, high - low))
    parts = [(dtype, numel) for _, dtype, numel in sorted(found, key=lambda part: part[0])]
    costs = {dtype: measure_optimizer(make, dtype) for dtype in {dtype for dtype, _ in parts}}
    state = transient = largest = traffic = 0.0
    operators = sum(cost.operators for cost in costs.values())
    last = 0.0
    for dtype, numel in parts:
        cost = costs[dtype]
        state += cost.state_per_element * numel + cost.state_per_parameter
        transient += cost.transient_per_element * numel
        largest = max(largest, cost.transient_of_one * numel + last)
        last = cost.transient_of_last * numel
        traffic += cost.traffic_per_element * numel
        operators += cost.operators_per_parameter
    kinds = max((round(costs[dtype].state_per_element / dtype.itemsize) for dtype in costs), default=0)
    size = sum(numel * dtype.itemsize for dtype, numel in parts)
    return _Update(round(state), round(transient + largest), round(traffic), round(operators), kinds, size)


def _bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()
