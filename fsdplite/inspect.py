"""Looking at a wrapped model: what was wrapped, what is alive, and what happens in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import events as tracing
from .arguments import expect_module
from .errors import FSDPError
from .flat_param import FlatParameter
from .fsdp_unit import state_of
from .events import Event, Trace
from .keywords import known_keywords

__all__ = ["UnitInfo", "rest_report", "trace", "units"]


@dataclass(frozen=True)
class UnitInfo:
    """One unit.

    Attributes:
        name: Dotted name; ``""`` for the root.
        module: The wrapped module.
        stage: ZeRO stage.
        flats: Its flat parameters, one per dtype, compute dtype and ``requires_grad``.
    """

    name: str
    module: nn.Module
    stage: int
    flats: tuple[FlatParameter, ...]


def units(model: nn.Module) -> list[UnitInfo]:
    """The units of a model, in ``named_modules()`` order."""
    expect_module(model, "units(model), summary(model) or trace(model)")
    found = []
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            found.append(UnitInfo(state.name, module, state.stage.number, tuple(state.flats)))
    if not found:
        raise FSDPError("no module here is wrapped", cure="call fsdp_wrap first")
    return found


def rest_report(model: nn.Module) -> dict[str, Any]:
    """What is alive beside the shards at this moment, on this rank.

    Returns:
        ``full_bytes``: gathered full buffers of units that shard parameters; ``gradient_bytes``: unsharded
        gradients; ``pending_collectives``; ``open_calls``: calls that a backward has reached and not passed;
        ``unsharded_units``: names. At rest after a step all are zero or empty.
    """
    report: dict[str, Any] = {
        "full_bytes": 0,
        "gradient_bytes": 0,
        "pending_collectives": 0,
        "open_calls": 0,
        "unsharded_units": [],
    }
    for info in units(model):
        state = state_of(info.module)
        report["open_calls"] += state.open_calls + int(state.is_active)
        for flat in info.flats:
            report["pending_collectives"] += int(flat.is_pending)
            if flat.is_unsharded and not flat.rests_full:
                report["full_bytes"] += flat.full_bytes
                report["unsharded_units"].append(info.name)
            if flat.gradient is not None:
                report["gradient_bytes"] += flat.gradient.allocated_bytes
                report["pending_collectives"] += int(flat.gradient.is_reducing)
        report["open_calls"] += int(state.schedule.root is state and state.schedule.in_backward)
    return report


@known_keywords
@contextlib.contextmanager
def trace(model: nn.Module, on_event: Callable[[Event], None] | None = None) -> Iterator[Trace]:
    """Record every event of the engine inside the block, in order; also those of saves and loads.

    Args:
        model: Wrapped, or containing wrapped modules.
        on_event: Called with each event as it happens: for progress bars. A background save calls it in its thread.

    Yields:
        A :class:`~fsdplite.events.Trace`: ``print(trace)`` tells the story, ``trace.to_jsonl()`` gives JSON lines,
        ``trace.events`` the events (kind, unit, bytes, time).
    """
    units(model)  # an error here, rather than an empty story
    if tracing.active is not None:
        raise FSDPError("a trace is being recorded already", cure="record one at a time")
    tracing.active = Trace(on_event)
    try:
        yield tracing.active
    finally:
        tracing.active = None
