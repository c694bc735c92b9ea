"""State that streams through a fixed number of buffers: read ahead, update, write behind.

Threads read and write (the calls release the interpreter's lock) while the caller's thread updates. A buffer goes
from reading over updating to writing; so many chunks are under way as there are buffers, and no more memory is used
whatever the size of the model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .files import aligned_bytes
from .pieces import batches
from .stores import DiskStore

__all__ = ["Job", "Part", "StepReport", "Stream", "Workers"]

_THREADS = 2  # for each direction
# Shorter parts share a buffer: handing each to the threads and back costs more than the disk does.
_JOINT_BYTES = 2**18


@dataclass
class StepReport:
    """What one step moved, and how long each kind of work took, added up over threads.

    Attributes:
        read_bytes, written_bytes: Moved from and to files.
        read_s, write_s: Seconds in reads and in writes.
        update_s: Seconds in updates.
        wall_s: Seconds of the whole step; less than the sum of the three where they overlap.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    update_s: float = 0.0
    wall_s: float = 0.0


@dataclass
class Part:
    """Consecutive elements of one store, as many as fit into a buffer.

    Attributes:
        store: Where they are.
        start, stop: Which, in elements of a region; ``start`` is at a block's start in every region.
        keys: Regions that are needed.
        new_keys: Regions in which nothing is stored yet: they need not be read.
        content: What the caller wants to know again when its turn comes.
    """

    store: DiskStore
    start: int
    stop: int
    keys: tuple[str, ...]
    new_keys: Collection[str]
    content: Any = None

    @property
    def total_bytes(self) -> int:
        """In all regions, in whole blocks."""
        return sum(self.store.span(key, self.start, self.stop)[1] for key in self.keys)

    def requests(
        self, regions: dict[str, torch.Tensor], but: Collection[str] = ()
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Offsets and memory of what is to be moved: of a short store all at once, because its regions are end to end.

        Args:
            regions: Where each is in memory.
            but: Those that stay.
        """
        first, last = regions[self.keys[0]], regions[self.keys[-1]]
        total, is_all = self.total_bytes, self.stop - self.start == self.store.numel
        is_one_memory = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        if is_all and is_one_memory and not but:
            yield self.store.span(self.keys[0], self.start, self.stop)[0], first.as_strided((total,), (1,))
            return
        for key, memory in regions.items():
            if key not in but:
                yield self.store.span(key, self.start, self.stop)[0], memory


class Job:
    __slots__ = ("_call", "_done", "error")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._call()
        except BaseException as problem:
            self.error = problem
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def settle(self) -> None:
        """Until it has run, well or not."""
        self._done.wait()

    def wait(self) -> None:
        self.settle()
        if self.error is not None:
            raise self.error


class Workers:
    """Threads that run jobs in order, until told to stop. Not a pool of the standard library: those refuse work
    while the interpreter exits."""

    def __init__(self, name: str, count: int = _THREADS) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()

    def submit(self, call: Callable[[], None]) -> Job:
        job = Job(call)
        self.put(job)
        return job

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


@dataclass
class _Slot:
    memory: list[torch.Tensor]
    reads: list[Job] = field(default_factory=list)
    writes: list[Job] = field(default_factory=list)

    def regions(self, parts: Sequence[Part]) -> list[dict[str, torch.Tensor]]:
        """The buffer as whole blocks of bytes, one tensor per part and region; those of short parts are end to end."""
        if sum(part.total_bytes for part in parts) > min(_JOINT_BYTES, self.memory[0].numel()):
            (part,) = parts
            spans = {key: part.store.span(key, part.start, part.stop)[1] for key in part.keys}
            return [{key: memory[: spans[key]] for key, memory in zip(part.keys, self.memory)}]
        found, end = [], 0
        for part in parts:
            own: dict[str, torch.Tensor] = {}
            for key in part.keys:
                begin, end = end, end + part.store.span(key, part.start, part.stop)[1]
                own[key] = self.memory[0][begin:end]
            found.append(own)
        return found


class _Pass:
    """Parts on their way through the buffers. A buffer takes the next ones at once when its last are stored, on the
    thread that stored them: nothing waits for an update to end."""

    def __init__(self, batches: Iterable[list[Part]], start_reading: Callable[[list[Part], _Slot], list[Job]]) -> None:
        self._waiting = deque(batches)
        self._start_reading = start_reading
        self._lock = threading.Lock()
        self._coming: queue.SimpleQueue[tuple[list[Part], _Slot] | None] = queue.SimpleQueue()

    def refill(self, slot: _Slot) -> None:
        """A buffer is free."""
        with self._lock:
            if self._waiting:
                parts = self._waiting.popleft()
                slot.reads = self._start_reading(parts, slot)
                self._coming.put((parts, slot))

    def next(self) -> tuple[list[Part], _Slot] | None:
        """The next parts in order, once their read has been asked for; None if the pass was stopped."""
        return self._coming.get()

    def stop(self) -> None:
        """No further part is read."""
        with self._lock:
            self._waiting.clear()
        self._coming.put(None)


class Stream:
    """The buffers and threads of one optimizer.

    Args:
        buffer_bytes: Size of a buffer for one region.
        regions: Most regions that a part has, each in a buffer of its own.
        count: Number of buffers.

    Memory: ``buffer_bytes * regions * count``, and nothing else.
    """

    def __init__(self, buffer_bytes: int, regions: int, count: int) -> None:
        self._size = buffer_bytes, regions
        self._slots = [_Slot([aligned_bytes(buffer_bytes) for _ in range(regions)]) for _ in range(count)]
        self._readers = Workers("fsdplite-read")
        self._writers = Workers("fsdplite-write")
        self._lock = threading.Lock()

    def fits(self, buffer_bytes: int, regions: int) -> bool:
        """Whether parts of this size fit into the buffers."""
        return buffer_bytes <= self._size[0] and regions <= self._size[1]

    def run(
        self,
        parts: Sequence[Part],
        update: Callable[[Sequence[Part], Sequence[dict[str, torch.Tensor]]], None],
        report: StepReport,
    ) -> None:
        """Bring parts in, in order, a long one or several short ones at a time, call ``update``, and take them back.

        Returns when everything is stored. If anything fails, waits for what is under way and raises it.

        Args:
            parts: Their stores have no more regions than the buffers.
            update: Is given parts and, for each, its regions.
            report: Is told what was moved.
        """
        most_bytes = min(_JOINT_BYTES, self._size[0] // 8)
        together = list(batches(parts, lambda part: part.total_bytes, most_bytes))
        passing = _Pass(together, lambda own, slot: self._start_reading(own, slot, report))
        try:
            for slot in self._slots:
                passing.refill(slot)
            for _ in together:
                coming = passing.next()
                if coming is None:
                    break  # a write has failed, which is raised below
                own, slot = coming
                for job in slot.reads:
                    job.wait()
                before = time.perf_counter()
                regions = [
                    {key: memory.view(part.store.dtypes[key])[: part.stop - part.start] for key, memory in found.items()}
                    for part, found in zip(own, slot.regions(own))
                ]
                update(own, regions)
                report.update_s += time.perf_counter() - before
                self._start_writing(own, slot, report, passing)
            for slot in self._slots:
                for job in slot.writes:
                    job.wait()
        except BaseException:
            passing.stop()
            for slot in self._slots:  # nothing may be read or written behind the caller's back
                for job in [*slot.reads, *slot.writes]:
                    job.settle()
            raise
        finally:
            for slot in self._slots:
                slot.reads, slot.writes = [], []

    def _start_reading(self, parts: list[Part], slot: _Slot, report: StepReport) -> list[Job]:
        calls = []
        for part, regions in zip(parts, slot.regions(parts)):
            for key, memory in regions.items():
                if key in part.new_keys:
                    memory.zero_()
            for offset, memory in part.requests(regions, part.new_keys):
                calls.append(self._timed(part.store.file.read, offset, memory, report, "read"))
        return [self._readers.submit(call) for call in _joined(calls, len(parts))]

    def _start_writing(self, parts: list[Part], slot: _Slot, report: StepReport, passing: _Pass) -> None:
        calls = [
            self._timed(part.store.file.write, offset, memory, report, "write")
            for part, regions in zip(parts, slot.regions(parts))
            for offset, memory in part.requests(regions)
        ]
        calls = _joined(calls, len(parts))
        left = [len(calls)]

        def write(call: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    call()
                except BaseException:
                    passing.stop()
                    raise
                with self._lock:
                    left[0] -= 1
                    is_last = left[0] == 0
                if is_last:
                    passing.refill(slot)

            return run

        slot.writes = [Job(write(call)) for call in calls]
        for job in slot.writes:
            self._writers.put(job)

    def _timed(self, call: Any, offset: int, memory: torch.Tensor, report: StepReport, kind: str) -> Callable[[], None]:
        def run() -> None:
            before = time.perf_counter()
            call(offset, memory)
            took = time.perf_counter() - before
            with self._lock:
                if kind == "read":
                    report.read_s += took
                    report.read_bytes += memory.numel()
                else:
                    report.write_s += took
                    report.written_bytes += memory.numel()

        return run

    def close(self) -> None:
        """End the threads and give the buffers back."""
        self._readers.stop()
        self._writers.stop()
        self._slots = []


def _joined(calls: list[Callable[[], None]], parts: int) -> list[Callable[[], None]]:
    """Calls of one part are a job each; those of several short ones are as few jobs as there are threads."""
    if parts == 1:
        return calls

    def one_after_another(some: list[Callable[[], None]]) -> Callable[[], None]:
        def run() -> None:
            for call in some:
                call()

        return run

    return [one_after_another(calls[first::_THREADS]) for first in range(min(_THREADS, len(calls)))]
