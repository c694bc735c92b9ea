"""Events of a step, in order. A no-op unless somebody listens.

The engine calls :func:`emit` behind ``if events.active is not None``, so an untraced step pays one attribute read
per event. ``fsdplite.trace(model)`` (in ``inspect``) turns it on for the duration of a ``with`` block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

__all__ = ["Event", "Trace", "active"]

_STORY = {
    "forward_start": "forward of {unit} starts",
    "forward_stop": "forward of {unit} is over",
    "backward_start": "backward reaches {unit}",
    "all_gather": "{unit}: all-gather of {mib} starts",
    "cast": "{unit}: full parameters of {mib} copied from the resting shard, no collective",
    "from_host": "{unit}: {mib} copied from host memory into this rank's slot",
    "to_host": "{unit}: gradient shard of {mib} copied to host memory",
    "prefetch": "{unit} is the next one: gathered ahead",
    "wait": "{unit}: full parameters are there",
    "reshard": "{unit}: full parameters ({mib}) freed",
    "reduce_scatter": "{unit}: reduce-scatter of {mib} of gradients starts",
    "all_reduce": "{unit}: all-reduce of {mib} over the ranks that hold the same",
    "reduced": "{unit}: gradient shard of {mib} is final",
    "update": "{unit}: its update starts, from a gradient shard of {mib}",
    "check": "all ranks agree on the order of units",
    "backward_stop": "backward is over, everything rests",
    "save": "this rank begins to write {mib} of a checkpoint",
    "written": "{mib} of the checkpoint written",
    "load": "this rank begins to read {mib} of a checkpoint",
    "read": "{mib} of the checkpoint read",
}


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        kind: What happened (see the keys of the story table).
        unit: Dotted name of the unit, ``""`` for the root.
        bytes: Size of the data concerned, 0 where there is none.
        time_ms: Milliseconds since the trace began, on the host's clock.
        elements: Number of elements on the wire for a collective, else 0.
    """

    kind: str
    unit: str
    bytes: int
    time_ms: float
    elements: int = 0


class Trace:
    """The recorded events: readable as a story (``print``) and as JSON lines (:meth:`to_jsonl`).

    Args:
        on_event: Called with each event as it happens, in the thread in which it does.
    """

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self._on_event = on_event
        self._start = time.perf_counter()

    def emit(self, kind: str, unit: str, num_bytes: int = 0, elements: int = 0) -> None:
        event = Event(kind, unit, num_bytes, (time.perf_counter() - self._start) * 1e3, elements)
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def to_jsonl(self) -> str:
        """One JSON object per line."""
        return "\n".join(json.dumps(asdict(event)) for event in self.events)

    def __str__(self) -> str:
        lines: list[str] = []
        for before, event in zip([None, *self.events], self.events):
            if event.kind == "prefetch" and before is not None and before.unit == event.unit:
                lines[-1] += ", ahead of its use"  # the gather that was just told
                continue
            text = _STORY[event.kind].format(unit=event.unit or "(root)", mib=format_bytes(event.bytes))
            lines.append(f"{event.time_ms:9.3f} ms  {text}")
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    size = float(count)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or suffix == "GiB":
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    raise AssertionError("unreachable")


active: Trace | None = None


def emit(kind: str, num_bytes: int) -> None:
    """For events of no unit, from any thread: a trace may end while a background save goes on."""
    trace = active
    if trace is not None:
        trace.emit(kind, "", num_bytes)
