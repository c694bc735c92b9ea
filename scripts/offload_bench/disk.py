"""What a directory's disk can do, measured with the same block sizes and the same number of threads as a step uses."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fsdplite.offload.files import BLOCK_BYTES, StateFile, aligned_bytes

THREADS = 2


@dataclass
class RawRate:
    """Bytes per second: of reading, of writing, and of both at once: every block read and written back."""

    read: float
    write: float
    both: float


class Disk:
    """Files that are read and written as fast as the disk goes.

    Args:
        folder: Where.
        file_bytes: Size of each.
        files: How many; as many as a step uses, because file systems lock each file by itself.
        buffer_bytes: Size of each read and write.
    """

    def __init__(self, folder: str, file_bytes: int, files: int, buffer_bytes: int) -> None:
        self._buffer_bytes = min(buffer_bytes, file_bytes)
        per_file = file_bytes // self._buffer_bytes
        self._files = [StateFile(folder, file_bytes, 0, "a measurement of the disk") for _ in range(files)]
        self._blocks = [
            (file, BLOCK_BYTES + block * self._buffer_bytes) for file in self._files for block in range(per_file)
        ]
        self._count = len(self._blocks)
        self._buffers = [aligned_bytes(self._buffer_bytes) for _ in range(2 * THREADS)]
        for buffer in self._buffers:
            buffer.random_(0, 255)
        self._run(self._writers(0, self._count))  # space that was never written is slower the first time

    @property
    def is_direct(self) -> bool:
        """Whether the file system takes direct access; without it reads may come from memory."""
        return all(file.is_direct for file in self._files)

    def measure(self) -> RawRate:
        moved = self._count * self._buffer_bytes
        both = self._run([self._copier(thread) for thread in range(2 * THREADS)])
        read, write = self._run(self._readers(0, self._count)), self._run(self._writers(0, self._count))
        return RawRate(moved / read, moved / write, 2 * moved / both)

    def _copier(self, thread: int) -> Callable[[], None]:
        def run() -> None:
            for file, offset in self._blocks[thread :: 2 * THREADS]:
                file.read(offset, self._buffers[thread])
                file.write(offset, self._buffers[thread])

        return run

    def _jobs(self, call: str, first: int, stop: int, buffers: list) -> list[Callable[[], None]]:
        def job(thread: int) -> Callable[[], None]:
            def run() -> None:
                for block in range(first + thread, stop, THREADS):
                    file, offset = self._blocks[block]
                    getattr(file, call)(offset, buffers[thread])

            return run

        return [job(thread) for thread in range(THREADS)]

    def _readers(self, first: int, stop: int) -> list[Callable[[], None]]:
        return self._jobs("read", first, stop, self._buffers[:THREADS])

    def _writers(self, first: int, stop: int) -> list[Callable[[], None]]:
        return self._jobs("write", first, stop, self._buffers[THREADS:])

    def _run(self, jobs: list[Callable[[], None]]) -> float:
        threads = [threading.Thread(target=job) for job in jobs]
        before = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - before

    def close(self) -> None:
        for file in self._files:
            file.close()


def default_folder() -> str:
    """A directory of its own on the disk of the working directory: a temporary one may be memory."""
    return tempfile.mkdtemp(prefix="fsdplite-bench-", dir=os.getcwd())
