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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .files import aligned_bytes
from .stores import DiskStore

__all__ = ["Job", "Part", "StepReport", "Stream", "Workers"]

_THREADS = 2  # for each direction


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

    def regions(self, part: Part) -> dict[str, torch.Tensor]:
        """The buffer as whole blocks of bytes, one tensor per region."""
        return {
            key: memory[: part.store.span(key, part.start, part.stop)[1]]
            for key, memory in zip(part.keys, self.memory)
        }


class _Pass:
    """Parts on their way through the buffers. A buffer takes the next part at once when its last one is stored, on the
    thread that stored it: nothing waits for an update to end."""

    def __init__(self, parts: Sequence[Part], start_reading: Callable[[Part, _Slot], list[Job]]) -> None:
        self._waiting = deque(parts)
        self._start_reading = start_reading
        self._lock = threading.Lock()
        self._coming: queue.SimpleQueue[tuple[Part, _Slot] | None] = queue.SimpleQueue()

    def refill(self, slot: _Slot) -> None:
        """A buffer is free."""
        with self._lock:
            if self._waiting:
                part = self._waiting.popleft()
                slot.reads = self._start_reading(part, slot)
                self._coming.put((part, slot))

    def next(self) -> tuple[Part, _Slot] | None:
        """The next part in order, once its read has been asked for; None if the pass was stopped."""
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
        regions: Most regions that a part has.
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
        self, parts: Sequence[Part], update: Callable[[Part, dict[str, torch.Tensor]], None], report: StepReport
    ) -> None:
        """Bring each part in, in order, call ``update(part, regions)``, and take it back.

        Returns when everything is stored. If anything fails, waits for what is under way and raises it.
        """
        passing = _Pass(parts, lambda part, slot: self._start_reading(part, slot, report))
        try:
            for slot in self._slots:
                passing.refill(slot)
            for _ in parts:
                coming = passing.next()
                if coming is None:
                    break  # a write has failed, which is raised below
                part, slot = coming
                for job in slot.reads:
                    job.wait()
                before = time.perf_counter()
                typed = {
                    key: memory.view(part.store.dtypes[key])[: part.stop - part.start]
                    for key, memory in slot.regions(part).items()
                }
                update(part, typed)
                report.update_s += time.perf_counter() - before
                self._start_writing(part, slot, report, passing)
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

    def _start_reading(self, part: Part, slot: _Slot, report: StepReport) -> list[Job]:
        jobs = []
        for key, memory in slot.regions(part).items():
            if key in part.new_keys:
                memory.zero_()
                continue
            offset, _ = part.store.span(key, part.start, part.stop)
            jobs.append(self._readers.submit(self._timed(part.store.file.read, offset, memory, report, "read")))
        return jobs

    def _start_writing(self, part: Part, slot: _Slot, report: StepReport, passing: _Pass) -> None:
        regions = slot.regions(part)
        left = [len(regions)]

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

        calls = [
            self._timed(part.store.file.write, part.store.span(key, part.start, part.stop)[0], memory, report, "write")
            for key, memory in regions.items()
        ]
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
