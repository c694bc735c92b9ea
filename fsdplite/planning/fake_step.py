"""One step of a plain model: when each unit is used, and what is alive in between.

Bytes of activations and gradients between the moments that the engine reacts to (a unit's call begins and ends, backward
reaches its outputs, a gradient is complete). :mod:`fsdplite.planning.recording` finds them on fake tensors;
:mod:`fsdplite.planning.replay` adds what the engine would hold there, for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..flat_spec import FlatSpec
from .blueprint import Blueprint

__all__ = ["ENTER", "GRADIENT", "IGNORED", "LEAVE", "OPEN", "STOP", "FakeStep", "StepEvent", "made_up_step"]

ENTER, LEAVE, OPEN, GRADIENT, STOP = "enter", "leave", "open", "gradient", "stop"
IGNORED = -1  # in place of a unit: the parameter belongs to none


@dataclass(frozen=True)
class StepEvent:
    """Something that the engine would react to.

    Attributes:
        kind: ENTER and LEAVE a unit's call, OPEN (backward reaches its outputs), GRADIENT (one is complete), STOP.
        unit: Index of the unit.
        call: Number of the call, for ENTER, LEAVE and OPEN.
        flat, index: Which parameter, for GRADIENT.
        bytes: Of the gradient.
        is_sparse: Autograd has a sparse one: the dense one lives no longer than it takes to copy it.
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
    is_sparse: bool = False
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
