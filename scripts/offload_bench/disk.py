"""What a disk can do with the reads and writes of a step: the same files, the same requests in the same order, as many
threads and buffers, direct access. Nothing is computed and nothing is checked, so a step can only be slower.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fsdplite.offload.files import BLOCK_BYTES, StateFile, aligned_bytes, view_of

THREADS = 2  # for each direction, as in a step


@dataclass
class RawRate:
    """Bytes per second: of reading, of writing, and of both at once: each request read and then written back."""

    read: float
    write: float
    both: float


class Disk:
    """Files that are read and written as fast as the disk goes.

    Args:
        folder: Where.
        files: How many, one per unit; file systems lock each file by itself.
        region_bytes: Of one kind of state of one unit.
        kinds: Regions in a file.
        request_bytes: Size of each read and write.
        buffers: How many chunks are under way, of a request of each kind.
    """

    def __init__(
        self, folder: str, files: int, region_bytes: int, kinds: int, request_bytes: int, buffers: int
    ) -> None:
        self._request_bytes = min(request_bytes, region_bytes)
        request_bytes = self._request_bytes
        self._files = [StateFile(folder, kinds * region_bytes, 0, "a measurement of the disk") for _ in range(files)]
        self._requests = [
            (file._descriptor, BLOCK_BYTES + kind * region_bytes + start)
            for file in self._files
            for start in range(0, region_bytes, request_bytes)
            for kind in range(kinds)
        ]
        self._memory = [aligned_bytes(request_bytes) for _ in range(kinds * buffers)]
        for memory in self._memory:
            memory.random_(0, 255)
        self.write()  # space that was never written is slower the first time

    @property
    def is_direct(self) -> bool:
        """Whether the file system takes direct access; without it reads may come from memory."""
        return all(file.is_direct for file in self._files)

    def measure(self) -> RawRate:
        moved = len(self._requests) * self._request_bytes
        return RawRate(moved / self.read(), moved / self.write(), 2 * moved / self.both())

    def read(self) -> float:
        """Seconds."""
        return self._one_way(os.preadv, self._memory[:THREADS])

    def write(self) -> float:
        """Seconds."""
        return self._one_way(os.pwritev, self._memory[-THREADS:])

    def both(self) -> float:
        """Seconds. A buffer is free again when what was read into it is written."""
        waiting, full = _queue_of(self._requests), queue.SimpleQueue()
        free = _queue_of([view_of(memory) for memory in self._memory])
        for _ in range(THREADS):
            waiting.put(None)

        def reader() -> None:
            try:
                while (request := waiting.get()) is not None:
                    view = free.get()
                    _whole(os.preadv, request, view)
                    full.put((request, view))
            finally:
                full.put(None)  # one for each reader, and there are as many writers

        def writer() -> None:
            while (item := full.get()) is not None:
                try:
                    _whole(os.pwritev, *item)
                finally:
                    free.put(item[1])

        return _seconds([reader] * THREADS + [writer] * THREADS)

    def _one_way(self, call: Callable, buffers: list) -> float:
        waiting = _queue_of([*self._requests, *[None] * len(buffers)])

        def work(view: memoryview) -> None:
            while (request := waiting.get()) is not None:
                _whole(call, request, view)

        return _seconds([lambda view=view_of(buffer): work(view) for buffer in buffers])

    def close(self) -> None:
        for file in self._files:
            file.close()


def _queue_of(items: list) -> queue.SimpleQueue:
    made: queue.SimpleQueue = queue.SimpleQueue()
    for item in items:
        made.put(item)
    return made


def _whole(call: Callable, request: tuple[int, int], view: memoryview) -> None:
    descriptor, offset = request
    if call(descriptor, [view], offset) != len(view):
        raise OSError("the disk moved less than was asked for")


def _seconds(jobs: list[Callable[[], None]]) -> float:
    failures: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    before = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - before
