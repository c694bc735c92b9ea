"""Machines and the links between them, as far as the time of a step depends on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, inf, log, log2, sqrt
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..keywords import known_keywords

if TYPE_CHECKING:
    from .prediction import Plan

__all__ = ["Link", "Topology"]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@known_keywords
@dataclass(frozen=True)
class Link:
    """What connects ranks.

    Attributes:
        bandwidth: Bytes per second that one rank can send, and receive, through it.
        latency: Seconds for a message to pass it.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        numbers = _is_number(self.bandwidth) and _is_number(self.latency)
        if not (numbers and self.bandwidth > 0 and self.latency >= 0):
            raise ConfigError("a link has a bandwidth and a latency", expected="> 0 and >= 0", found=repr(self))


@known_keywords
@dataclass(frozen=True)
class Topology:
    """A cluster. The defaults are those of eight H100 a node, each with a 400 Gb/s network card.

    Rates are what is achieved, not what is on the data sheet. Ranks that follow each other share a node.

    Attributes:
        ranks_per_node: Ranks that share a node.
        flops: Floating point operations per second of one rank, in the compute dtype.
        memory_bandwidth: Bytes per second of a rank's own memory.
        first_touch: Bytes per second at which memory is got from the operating system, where engine buffers come from
            there: on a CPU. Infinite where an allocator keeps them.
        operator_s: Least time of one operator: launching it on a GPU, calling it on a CPU.
        intra, inter: Links within a node, and of a rank to other nodes.
        host_bandwidth: Bytes per second between a rank's device and its host, for what is offloaded.
        host_memory_bandwidth: Bytes per second of a rank's share of the host's memory, for updates there.
        disk_bandwidth: Bytes per second of a rank's share of a disk, for state there.
        launch_s: Host time to start a collective, which on a CPU the computation pays.
        scatter_passes: How often a reduce-scatter moves its bytes: once in a ring, twice in gloo (an all-reduce).
        control_s: Time of a small message, as at the end of each backward.
        overlaps: Whether collectives run beside the computation. False: they take its time, as threads on few cores do.
        straggler: How much slower the slowest rank computes, as a share: all others wait for it.
        jitter: Standard deviation of a rank's computation between two collectives, as a share; the slowest of N ranks
            is about sqrt(2 ln N) deviations late.
    """

    ranks_per_node: int = 8
    flops: float = 4e14
    memory_bandwidth: float = 2.5e12
    first_touch: float = inf
    operator_s: float = 4e-6
    intra: Link = Link(3.7e11, 3e-6)
    inter: Link = Link(5e10, 1e-5)
    host_bandwidth: float = 2.5e10
    host_memory_bandwidth: float = 1e11
    disk_bandwidth: float = 5e9
    launch_s: float = 2e-5
    scatter_passes: float = 1.0
    control_s: float = 2e-4
    overlaps: bool = True
    straggler: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            expected = "a number >= 0"
            if field.name in ("intra", "inter"):
                expected, fits = "a Link(bandwidth, latency)", isinstance(value, Link)
            elif field.name == "overlaps":
                expected, fits = "True or False", isinstance(value, bool)
            elif field.name == "ranks_per_node":
                expected, fits = "an int > 0", type(value) is int and value > 0
            elif field.name in ("flops", "first_touch") or field.name.endswith("_bandwidth"):
                expected, fits = "a number > 0", _is_number(value) and value > 0
            else:
                fits = _is_number(value) and 0 <= value < inf
            if not fits:
                raise ConfigError(f"Topology.{field.name} cannot be {value!r}", expected=expected)

    def compute_s(self, flops: float, moved_bytes: float, operators: int) -> float:
        """Time of some operators: arithmetic or memory, whichever takes longer, and no less than their launches."""
        return max(flops / self.flops, moved_bytes / self.memory_bandwidth, operators * self.operator_s)

    @known_keywords
    def calibrated(self, plan: Plan, compute_s: float, update_s: float | None = None) -> Topology:
        """The same links, with rates at which a plan's computation takes as long as it was measured to take.

        ``flops`` and ``operator_s`` keep their proportion; ``memory_bandwidth`` follows from the optimizer's step.

        Args:
            plan: Of the model and batch that were measured.
            compute_s: Measured seconds of forward and backward of the plain model.
            update_s: Measured seconds of the optimizer's step over the plan's share of the parameters.

        Raises:
            ConfigError: A time is none, or the plan has no computation because it was made without ``inputs``.
        """
        for name, seconds in (("compute_s", compute_s), ("update_s", update_s)):
            if not (_is_number(seconds) and 0 < seconds < inf) and (name, seconds) != ("update_s", None):
                raise ConfigError(f"{name} is a measured time", expected="seconds, > 0", found=repr(seconds))
        found = self
        updates = [task for task in plan.tasks if task.kind == "update"]
        if update_s is not None and updates:
            found = replace(found, memory_bandwidth=sum(task.bytes for task in updates) / update_s)
        work = [task for task in plan.tasks if task.kind == "compute"]
        if not work:
            raise ConfigError("the plan has no computation to take a time", cure="plan with inputs=")
        ratio = 1.0
        for _ in range(50):  # memory's rate stands, so the others are found by going there
            scaled = replace(found, flops=found.flops * ratio, operator_s=found.operator_s / ratio)
            predicted = sum(scaled.compute_s(task.flops, task.bytes, task.operators) for task in work)
            ratio *= predicted / compute_s
        return scaled

    def slowest(self, ranks: int) -> float:
        """How much longer the slowest of some ranks takes, as a factor."""
        return 1 + self.straggler + self.jitter * (sqrt(2 * log(ranks)) if ranks > 1 else 0.0)

    def collective_s(self, kind: str, full_bytes: float, ranks: int, stride: int = 1, groups: int = 1) -> float:
        """Time of a collective that groups of ranks run side by side: that of the group whose ranks lie worst.

        Every byte of the full side enters each node once, through the cards of the group's ranks there, and each rank
        once, within the node; an all-reduce does both twice. Latency is that of a ring within a node and, between
        nodes, of a ring or a tree, whichever is shorter.

        Args:
            kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
            full_bytes: Of the full side.
            ranks: Members of the group.
            stride: Distance between them: 1 for neighbours, the number of shards for replicas.
            groups: How many such groups there are.
        """
        if ranks < 2:
            return 0.0
        passes = {"all_reduce": 2.0, "reduce_scatter": self.scatter_passes}.get(kind, 1.0)
        worst = max(
            self._once_s(full_bytes, ranks, placement)
            for placement in _placements(ranks, stride, groups, self.ranks_per_node)
        )
        return self.launch_s + passes * worst

    def _once_s(self, full_bytes: float, ranks: int, placement: tuple[int, int, int]) -> float:
        """Time of moving every byte once, over a group placed like this."""
        nodes, most, least = placement
        hops = (most - 1) * self.intra.latency
        within = full_bytes * (ranks - 1) / ranks / self.intra.bandwidth if most > 1 else 0.0
        between = 0.0
        if nodes > 1:  # the node with the fewest cards takes longest to get what it has not
            between = full_bytes * (ranks - least) / ranks / (least * self.inter.bandwidth)
            hops += min(nodes - 1, 2 * ceil(log2(nodes))) * self.inter.latency
        return max(within, between) + hops


@lru_cache(maxsize=1024)
def _placements(ranks: int, stride: int, groups: int, ranks_per_node: int) -> frozenset[tuple[int, int, int]]:
    """Of every group: nodes that it touches, and the most and the fewest of its ranks on one of them."""
    found = set()
    for group in range(groups):
        first = group // stride * stride * ranks + group % stride
        counts = Counter((first + stride * member) // ranks_per_node for member in range(ranks))
        found.add((len(counts), max(counts.values()), min(counts.values())))
    return frozenset(found)
