"""A simulated step: what takes how long on which lane, in sum and as text."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..events import format_bytes

__all__ = ["COMPUTE", "HOST", "REPLICA", "SHARD", "Span", "Timeline"]

COMPUTE, SHARD, REPLICA, HOST = "compute", "shard group", "replicas", "to host"
_COMMUNICATION = ("all_gather", "reduce_scatter", "all_reduce", "to_device", "to_host")


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Attributes:
        lane: ``"compute"``, ``"shard group"``, ``"replicas"`` or ``"to host"``.
        kind: A task's kind; ``"wait"`` on the compute lane is exposed communication.
        unit, phase: Where.
        start_s, stop_s: Seconds since the step began.
        bytes: Of a collective's full side.
    """

    lane: str
    kind: str
    unit: str
    phase: str
    start_s: float
    stop_s: float
    bytes: int = 0

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of the slowest rank. ``print`` shows a summary, :meth:`to_dict` all of it.

    Attributes:
        spans: In order of their start on each lane.
        world_size: Ranks.
        peak_bytes: Of the plan.
    """

    spans: tuple[Span, ...]
    world_size: int
    peak_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds from the first to the last task."""
        return max((span.stop_s for span in self.spans), default=0.0)

    @property
    def compute_s(self) -> float:
        """Seconds that the computation itself takes."""
        return sum(s.duration_s for s in self.spans if s.lane == COMPUTE and s.kind != "wait")

    @property
    def exposed_s(self) -> float:
        """Seconds that the computation waits for collectives, and for copies of what is offloaded."""
        return sum(s.duration_s for s in self.spans if s.lane == COMPUTE and s.kind == "wait")

    @property
    def communication_s(self) -> float:
        """Seconds that these take, hidden or not."""
        return sum(s.duration_s for s in self.spans if s.kind in _COMMUNICATION)

    def by_phase(self) -> dict[str, float]:
        """Seconds of the compute lane, waits included, by phase."""
        found: dict[str, float] = {}
        for span in self.spans:
            if span.lane == COMPUTE:
                found[span.phase] = found.get(span.phase, 0.0) + span.duration_s
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "world_size": self.world_size,
            "step_s": self.step_s,
            "compute_s": self.compute_s,
            "exposed_s": self.exposed_s,
            "communication_s": self.communication_s,
            "phases_s": self.by_phase(),
            "peak_bytes": self.peak_bytes,
            "spans": [asdict(span) for span in self.spans],
        }

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0), show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        step = self.step_s or 1.0
        rows = [("step", self.step_s), ("computation", self.compute_s), ("exposed communication", self.exposed_s),
                ("communication in all", self.communication_s), *self.by_phase().items()]  # fmt: skip
        for what, seconds in rows:
            table.add_row(what, f"{seconds * 1e3:,.2f} ms", f"{100 * seconds / step:.0f}%")
        table.add_row("peak memory", format_bytes(self.peak_bytes), f"of each of {self.world_size} ranks")
        console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=False)
        console.print(table)
        return console.file.getvalue()
