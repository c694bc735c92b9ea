"""Streaming one rank's file: data in blocks, checksums on the same pass, the header into the hole before them, last."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Callable

import torch

from .safetensors_file import CHUNK_BYTES, build_header, chunk_checksums, lay_out
from .storage import File, FileSystem, read_exactly, write_exactly
from .tensor_bytes import host_blocks

__all__ = ["BLOCK_BYTES", "Part", "Written", "write_rank_file"]

BLOCK_BYTES = 128 * CHUNK_BYTES  # 3 MiB


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
    file = fs.create(path)
    try:
        blocks = _Blocks(fs, file, header_bytes, progress)
        checksums: list[int] = []
        for spec in specs:
            for view in host_blocks(data[spec.name], BLOCK_BYTES):
                checksums += chunk_checksums(view)
                blocks.add(view)
        blocks.flush()
        header = build_header(specs, checksums=checksums)
        write_exactly(fs, file, 0, memoryview(header))
        fs.flush(file)
    finally:
        fs.close(file)
    _check_header(fs, path, header)
    return Written(blocks.offset, len(header), zlib.crc32(header), len(specs), blocks.offset - len(header))


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
