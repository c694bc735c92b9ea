"""``fsdp.simulate``: a step in time, from a plan and a topology.

The plan's program is walked in the host's order. Computation runs on one lane; collectives of the shard group queue on
a second, behind the copies of offloaded shards that they wait for, those of the replicas on a third, and gradients on
their way to the host on a fourth. A wait holds the computation until what it waits for is over: that time is exposed.
"""

from __future__ import annotations

import io
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from ..events import format_bytes
from ..keywords import known_keywords
from .prediction import Plan
from .topology import Topology

__all__ = ["Span", "Timeline", "simulate"]

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


@known_keywords
def simulate(plan: Plan, topology: Topology | None = None) -> Timeline:
    """Play a plan's step on a cluster.

    Args:
        plan: Made with ``inputs``, or there is no computation to hide communication behind.
        topology: Rates and links; None: eight H100 a node with 400 Gb/s each.

    Returns:
        A :class:`Timeline`. For another number of ranks simulate ``plan.but(world_size=n)``.
    """
    topology = Topology() if topology is None else topology
    if not isinstance(plan, Plan):
        raise ConfigError("simulate takes a plan", expected="what fsdp.plan returned", found=type(plan).__name__)
    if not isinstance(topology, Topology):
        raise ConfigError("simulate takes a topology", expected="fsdp.Topology(...)", found=type(topology).__name__)
    clock = _Clock(plan, topology)
    for task in plan.tasks:
        clock.play(task)
    return Timeline(tuple(clock.spans), plan.question.world_size, plan.peak_bytes)


class _Clock:
    """Where each lane is."""

    def __init__(self, plan: Plan, topology: Topology) -> None:
        setup = plan.question.setup
        self.topology = topology
        self.shard_size, self.size = setup.shard_size, setup.size
        self.slowest = topology.slowest(setup.size)
        self.now = 0.0  # of the computation, which issues everything
        self.free = {SHARD: 0.0, REPLICA: 0.0, HOST: 0.0}
        question = plan.question
        offload = question.offload
        self.updates_on_host = question.device != "cpu" and (offload.params or offload.optimizer) is not None
        self.disk_bytes = plan.disk_bytes
        self.done: dict[Hashable, float] = {}
        self.spans: list[Span] = []

    def play(self, task: Any) -> None:
        topology = self.topology
        if task.kind == "update":
            self._compute(task, self._update_s(task))
        elif task.kind in ("compute", "copy"):
            seconds = self.slowest * topology.compute_s(task.flops, task.bytes, task.operators)
            self._compute(task, seconds)
        elif task.kind == "allocate":
            self._compute(task, task.bytes / topology.first_touch)
        elif task.kind == "control":
            self._compute(task, topology.control_s)
        elif task.kind == "wait":
            self._wait(task, self.done.pop(task.key, self.now))
        elif task.kind in ("to_device", "to_host"):
            lane = SHARD if task.kind == "to_device" else HOST
            self._occupy(lane, task, task.bytes / topology.host_bandwidth)
        else:
            self._start(task)

    def _update_s(self, task: Any) -> float:
        """On the host it takes that memory's rate, and copies before and after; a disk works beside it."""
        topology = self.topology
        seconds = self.slowest * topology.compute_s(task.flops, task.bytes, task.operators)
        if self.updates_on_host:
            seconds = task.bytes / topology.host_memory_bandwidth + task.across_bytes / topology.host_bandwidth
        return max(seconds, self.disk_bytes / topology.disk_bandwidth)

    def _compute(self, task: Any, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(Span(COMPUTE, task.kind, task.unit, task.phase, self.now, self.now + seconds, task.bytes))
            self.now += seconds

    def _wait(self, task: Any, until: float) -> None:
        if until > self.now:
            self.spans.append(Span(COMPUTE, "wait", task.unit, task.phase, self.now, until))
            self.now = until

    def _start(self, task: Any) -> None:
        between = self.shard_size > 1 and task.kind == "all_reduce" and task.ranks < self.size
        lane = REPLICA if between else SHARD
        stride = self.shard_size if between else 1
        seconds = self.topology.collective_s(task.kind, task.bytes, task.ranks, stride, self.size // task.ranks)
        self._occupy(lane, task, seconds)

    def _occupy(self, lane: str, task: Any, seconds: float) -> None:
        """What starts waits for what the lane does already."""
        start = max(self.now, self.free[lane])
        stop = start + seconds
        self.spans.append(Span(lane, task.kind, task.unit, task.phase, start, stop, task.bytes))
        self.free[lane] = stop
        if task.key is not None and self.topology.overlaps:
            self.done[task.key] = stop
        else:
            self._wait(task, stop)
