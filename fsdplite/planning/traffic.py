"""What a step sends: every collective as the engine calls it, and the work in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .memory import Memory

__all__ = ["Program", "Task", "Traffic", "WireCall"]

# Elements that a rank sends in a ring algorithm, as a multiple of (N - 1) / N of the full side.
_RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class WireCall:
    """One collective.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"`` or ``"control"`` (a small message: it
            compares the order of units, or says that an update went well).
        unit: Whose.
        numel: Elements of the full side: what is gathered, scattered or reduced.
        dtype: On the wire.
        ranks: How many take part.
    """

    kind: str
    unit: str
    numel: int
    dtype: torch.dtype
    ranks: int

    @property
    def bytes(self) -> int:
        """Of the full side."""
        return self.numel * self.dtype.itemsize

    @property
    def sent_bytes(self) -> float:
        """What one rank sends if the collective is a ring."""
        return _RING_PASSES.get(self.kind, 2) * self.bytes * (self.ranks - 1) / self.ranks


@dataclass
class Task:
    """One entry of a step's program, in the order in which the host reaches it.

    Attributes:
        kind: ``"compute"``, ``"copy"`` and ``"allocate"`` (the engine's), a collective's kind, ``"to_device"`` or
            ``"to_host"`` (of offloaded shards: they start), ``"wait"`` (for the one with that key), or ``"update"`` (the
            optimizer).
        unit, phase: Where.
        bytes: Of the collective's full side; for computation, read and written.
        flops, operators: Of a computation.
        ranks: Of the collective.
        key: Which collective or copy.
        across_bytes: Of an update, what it moves between the device and its host.
    """

    kind: str
    unit: str
    phase: str
    bytes: int = 0
    flops: int = 0
    operators: int = 0
    ranks: int = 1
    key: Any = None
    across_bytes: int = 0


class Traffic:
    """The collectives of one step on one rank."""

    def __init__(self, calls: Iterable[WireCall]) -> None:
        self.calls = tuple(calls)

    def count(self, kind: str) -> int:
        """Number of calls of a kind."""
        return sum(call.kind == kind for call in self.calls)

    def bytes(self, kind: str | None = None) -> int:
        """Bytes of the full sides of the calls of a kind; of all data calls if None."""
        kinds = [kind] if kind else list(_RING_PASSES)
        return sum(call.bytes for call in self.calls if call.kind in kinds)

    def numel(self, kind: str | None = None) -> int:
        """The same in elements."""
        kinds = [kind] if kind else list(_RING_PASSES)
        return sum(call.numel for call in self.calls if call.kind in kinds)

    @property
    def sent_bytes(self) -> int:
        """What one rank sends in a step if every collective is a ring."""
        return round(sum(call.sent_bytes for call in self.calls))

    @property
    def kinds(self) -> list[str]:
        """The kinds that occur, in order of first appearance."""
        return list(dict.fromkeys(call.kind for call in self.calls))


class Program:
    """A step's collectives and tasks while they are written down.

    Args:
        memory: Knows the phase.
    """

    def __init__(self, memory: Memory) -> None:
        self.calls: list[WireCall] = []
        self.tasks: list[Task] = []
        self.to_device_bytes = self.to_host_bytes = 0  # of offloaded shards
        self._memory = memory

    def restart(self) -> None:
        """The next step is the one that counts."""
        self.calls, self.tasks = [], []
        self.to_device_bytes = self.to_host_bytes = 0

    def send(self, kind: str, unit: str, numel: int, dtype: torch.dtype, ranks: int, key: Any = None) -> None:
        """A collective starts."""
        call = WireCall(kind, unit, numel, dtype, ranks)
        self.calls.append(call)
        self.tasks.append(Task(kind, unit, self._memory.phase, bytes=call.bytes, ranks=ranks, key=key))

    def wait(self, unit: str, key: Any) -> None:
        """The host, or on CUDA the computation, waits for a collective."""
        self.tasks.append(Task("wait", unit, self._memory.phase, key=key))

    def compute(self, unit: str, flops: int, moved_bytes: int, operators: int) -> None:
        """Operators of the model."""
        work = {"bytes": moved_bytes, "flops": flops, "operators": operators}
        self.tasks.append(Task("compute", unit, self._memory.phase, **work))

    def copy(self, unit: str, moved_bytes: int) -> None:
        """The engine copies: into its slot before a gather, a gradient into its buffer, a sum divided."""
        self.tasks.append(Task("copy", unit, self._memory.phase, bytes=moved_bytes, operators=1))

    def allocate(self, unit: str, count: int) -> None:
        """The engine allocates a buffer."""
        self.tasks.append(Task("allocate", unit, self._memory.phase, bytes=count))

    def fetch(self, unit: str, count: int, key: Any) -> None:
        """An offloaded shard is copied to the device, ahead of its gather."""
        self.to_device_bytes += count
        self.tasks.append(Task("to_device", unit, self._memory.phase, bytes=count, key=key))

    def stash(self, unit: str, count: int, key: Any) -> None:
        """A gradient's shard is copied to where it rests."""
        self.to_host_bytes += count
        self.tasks.append(Task("to_host", unit, self._memory.phase, bytes=count, key=key))

    def update(self, moved_bytes: int, operators: int, offloaded_bytes: int) -> None:
        """The optimizer's step. On the host it is given weights and gradients of the device, and weights come back."""
        self.to_host_bytes += 2 * offloaded_bytes
        self.to_device_bytes += offloaded_bytes
        work = {"bytes": moved_bytes, "operators": operators, "across_bytes": 3 * offloaded_bytes}
        self.tasks.append(Task("update", "", self._memory.phase, **work))
