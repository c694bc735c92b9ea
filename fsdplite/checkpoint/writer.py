"""Streaming one rank's file: data in blocks, checksums on the same pass, the header into the hole before them, last."""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable

import torch

from .safetensors_file import CHUNK_BYTES, TensorSpec, build_header, chunk_checksums, lay_out
from .storage import File, FileSystem, read_exactly, write_exactly
from .tensor_bytes import host_blocks

__all__ = ["BLOCK_BYTES", "Part", "Written", "write_rank_file"]

BLOCK_BYTES = 128 * CHUNK_BYTES  # 3 MiB
_THREADED_BYTES = BLOCK_BYTES // 8
_MOST_THREADS = 4  # a CRC-32 takes about as long as writing to memory; fast disks need several


@dataclass(frozen=True)
class Part:
    """One tensor of a file: a name and a plain one-dimensional tensor."""

    name: str
    dtype: str
    data: torch.Tensor


@dataclass(frozen=True)
class Written:
    """What the manifest has to know about a file, and what it is checked against."""

    size_bytes: int
    header_bytes: int
    header_crc32: int
    tensor_count: int
    data_bytes: int


class _Blocks:
    """Gathers small pieces, so that a thousand biases are one write."""

    def __init__(self, fs: FileSystem, file: File, offset: int, progress: Callable[[int], None]) -> None:
        self._fs = fs
        self._file = file
        self._offset = offset
        self._progress = progress
        self._small = bytearray()

    def add(self, view: memoryview) -> None:
        if len(view) >= BLOCK_BYTES // 2:
            self.flush()
            self._write(view)
            return
        self._small += view
        if len(self._small) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._small:
            self._write(memoryview(self._small))
            self._small = bytearray()

    def _write(self, view: memoryview) -> None:
        write_exactly(self._fs, self._file, self._offset, view)
        self._offset += len(view)
        self._progress(len(view))

    @property
    def offset(self) -> int:
        return self._offset + len(self._small)


class _Worker(threading.Thread):
    """Computes checksums, in the order in which it is given views."""

    def __init__(self) -> None:
        super().__init__(name="fsdplite-checksums")
        self.views: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

    def run(self) -> None:
        while (view := self.views.get()) is not None:
            self.results.put(chunk_checksums(view))


class _Checksums:
    """Computes checksums while the same bytes are being written: those of large blocks in threads.

    Not a pool of the standard library: those refuse work while the interpreter exits, and a save is finished then.
    """

    def __init__(self, is_threaded: bool) -> None:
        count = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) - 1)) if is_threaded else 0
        self._workers = [_Worker() for _ in range(count)]
        self._results: list[list[int] | _Worker] = []  # in order: known, or the next one of a worker
        for worker in self._workers:
            worker.start()

    def begin(self, view: memoryview) -> None:
        """Take the next block. Its memory must stay as it is until :meth:`finish`."""
        if not self._workers or len(view) < _THREADED_BYTES:
            self._results.append(chunk_checksums(view))
            return
        chunks = -(-len(view) // CHUNK_BYTES)
        share = -(-chunks // len(self._workers)) * CHUNK_BYTES
        for worker, start in zip(self._workers, range(0, len(view), share)):
            worker.views.put(view[start : start + share])
            self._results.append(worker)

    def finish(self) -> list[int]:
        """Wait for all that was begun; the checksums of all chunks so far."""
        known: list[int] = []
        for result in self._results:
            known += result.results.get() if isinstance(result, _Worker) else result
        self._results = [known]
        return known

    def close(self) -> None:
        for worker in self._workers:
            worker.views.put(None)
        for worker in self._workers:
            worker.join()


def write_rank_file(
    fs: FileSystem, path: str, parts: list[Part], progress: Callable[[int], None] = lambda count: None
) -> Written:
    """Create, fill, flush and close one file.

    Args:
        fs: Where.
        path: Must not exist.
        parts: In any order; the file has its own.
        progress: Told the bytes of each write; may raise to stop.

    Memory: one block, and one more for tensors on a device.
    """
    specs = lay_out((part.name, part.dtype, (part.data.numel(),), part.data.numel()) for part in parts)
    data = {part.name: part.data for part in parts}
    header_bytes = len(build_header(specs))
    checksums = _Checksums(is_threaded=any(spec.size_bytes >= _THREADED_BYTES for spec in specs))
    file = fs.create(path)
    try:
        header = b""
        if fs.is_remote:  # written from start to end, so the data are looked at twice
            for view in _views(specs, data, checksums):
                checksums.begin(view)
            header = build_header(specs, checksums=checksums.finish())
            write_exactly(fs, file, 0, memoryview(header))
        blocks = _Blocks(fs, file, header_bytes, progress)
        for view in _views(specs, data, checksums):
            if not header:
                checksums.begin(view)
            blocks.add(view)
        blocks.flush()
        if not header:
            header = build_header(specs, checksums=checksums.finish())
            write_exactly(fs, file, 0, memoryview(header))
        fs.flush(file)
    finally:
        checksums.close()
        fs.close(file)
    _check_header(fs, path, header)
    return Written(blocks.offset, len(header), zlib.crc32(header), len(specs), blocks.offset - len(header))


def _views(specs: list[TensorSpec], data: dict[str, torch.Tensor], checksums: _Checksums) -> Iterator[memoryview]:
    for spec in specs:
        tensor = data[spec.name]
        for view in host_blocks(tensor, BLOCK_BYTES):
            yield view
            if tensor.device.type != "cpu":
                checksums.finish()  # the next block comes into the same memory


def _check_header(fs: FileSystem, path: str, header: bytes) -> None:
    """The header filled a hole: only reading shows whether all of it arrived."""
    file: Any = fs.open(path)
    try:
        found = bytearray(len(header))
        read_exactly(fs, file, 0, memoryview(found))
    finally:
        fs.close(file)
    if found != header:
        raise OSError(5, "a write stored less than it said", path)
