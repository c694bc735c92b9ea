"""``fsdp.simulate``: a step in time, from a plan and a topology.

The plan's program is walked in the host's order. Computation runs on one lane; collectives of the shard group queue on
a second, behind the copies of offloaded shards that they wait for, those of the replicas on a third, and gradients on
their way to the host on a fourth. A wait holds the computation until what it waits for is over: that time is exposed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..errors import ConfigError
from ..keywords import known_keywords
from .prediction import Plan
from .timeline import COMPUTE, HOST, REPLICA, SHARD, Span, Timeline
from .topology import Topology

__all__ = ["simulate"]


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
