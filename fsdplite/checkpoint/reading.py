"""Reading ranges of tensors out of rank files: merged where they touch, every chunk checked, memory of one block."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Callable

from ..errors import CheckpointError
from .manifest import FileRecord
from .safetensors_file import CHUNK_BYTES, Header, TensorSpec, chunk_checksums, read_header
from .storage import File, FileSystem, read_exactly

__all__ = ["Damage", "RankFile", "Request"]

_BLOCK_BYTES = 128 * CHUNK_BYTES


@dataclass(frozen=True)
class Request:
    """Bytes ``[low, high)`` of a tensor in a file; ``take(offset, view)`` gets them in pieces, in order.

    ``offset`` is relative to ``low``. The view is valid during the call only.
    """

    name: str
    low: int
    high: int
    take: Callable[[int, memoryview], None]


@dataclass(frozen=True)
class Damage:
    """A chunk whose bytes are not those that were written: bytes ``[low, high)`` of a tensor's part in the file."""

    path: str
    tensor: str
    chunk: int
    low: int
    high: int


@dataclass
class _Span:
    """Bytes to read, and what they are for: (request, tensor, its bytes [low, high))."""

    start: int
    stop: int
    uses: list[tuple[Request, TensorSpec, int, int]] = field(default_factory=list)


class RankFile:
    """One open file of a checkpoint, or a foreign safetensors file without checksums.

    Args:
        fs: Where.
        path: Of the file.
        record: What the manifest says of it; None for a foreign file.

    Attributes:
        bytes_read: Of tensor data.
    """

    def __init__(self, fs: FileSystem, path: str, record: FileRecord | None) -> None:
        self.path = path
        self.bytes_read = 0
        self._fs = fs
        self._file: File = fs.open(path)
        try:
            self.header: Header = read_header(fs, self._file, expected=record)
            if record is not None and not self.header.first_chunk and self.header.data_bytes:
                raise CheckpointError("the file has no table of checksums", phase="read", path=path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._fs.close(self._file)

    def expect(self, name: str, dtype: str, count: int) -> None:
        """Raise unless the file's part of a tensor is what the manifest lists."""
        spec = self.header.tensors.get(name)
        if spec is None or (spec.dtype, spec.numel) != (dtype, count):
            raise CheckpointError(
                "a file does not hold what the manifest lists",
                expected=f"{count} elements of {dtype}",
                found="nothing" if spec is None else f"{spec.numel} elements of {spec.dtype}",
                parameter=name,
                phase="read",
                path=self.path,
            )

    def read(self, requests: list[Request], buffer: memoryview, on_damage: Callable[[Damage], None]) -> None:
        """Read and check what is requested, in file order.

        Args:
            requests: At most one for each tensor.
            buffer: At least :data:`BUFFER_BYTES` of memory to read into.
            on_damage: Called for a damaged chunk; if it returns, the bytes are handed out all the same.
        """
        for span in self._spans(requests):
            view = buffer[: span.stop - span.start]
            read_exactly(self._fs, self._file, self.header.size_bytes + span.start, view)
            self.bytes_read += len(view)
            for request, spec, low, high in span.uses:
                begin = spec.begin - span.start
                self._check(spec, low, high, view[begin + low : begin + high], on_damage)
                first, last = max(low, request.low), min(high, request.high)
                request.take(first - request.low, view[begin + first : begin + last])

    def _spans(self, requests: list[Request]) -> list[_Span]:
        checked = bool(self.header.first_chunk)
        spans: list[_Span] = []
        for request in sorted(requests, key=lambda r: self._spec(r.name).begin):
            spec = self._spec(request.name)
            low, high = request.low, request.high
            if checked:  # to check part of a chunk all of it is needed
                low = low // CHUNK_BYTES * CHUNK_BYTES
                high = min(-(-high // CHUNK_BYTES) * CHUNK_BYTES, spec.size_bytes)
            while low < high:
                last = spans[-1] if spans else None
                if last is not None and last.stop == spec.begin + low and last.stop - last.start < _BLOCK_BYTES:
                    room = _BLOCK_BYTES - (last.stop - last.start)
                    # A piece ends where a chunk does, or with the tensor.
                    stop = high if high - low <= room else low + room // CHUNK_BYTES * CHUNK_BYTES
                    if stop > low:
                        last.stop = spec.begin + stop
                        last.uses.append((request, spec, low, stop))
                        low = stop
                        continue
                stop = min(high, low + _BLOCK_BYTES)
                spans.append(_Span(spec.begin + low, spec.begin + stop, [(request, spec, low, stop)]))
                low = stop
        return spans

    def _spec(self, name: str) -> TensorSpec:
        spec = self.header.tensors.get(name)
        if spec is None:
            raise CheckpointError(
                f"tensor '{name}' is not in the file that should hold it", phase="read", path=self.path, parameter=name
            )
        return spec

    def _check(
        self, spec: TensorSpec, low: int, high: int, view: memoryview, on_damage: Callable[[Damage], None]
    ) -> None:
        if not self.header.first_chunk:
            return
        found = chunk_checksums(view)
        for start in range(low, high, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, high)
            chunk = start // CHUNK_BYTES
            if found[(start - low) // CHUNK_BYTES] != self.header.chunk_checksum(spec.name, chunk):
                on_damage(Damage(self.path, spec.name, chunk, start, stop))


BUFFER_BYTES = _BLOCK_BYTES


def refuse_damage(damage: Damage) -> None:
    """For loads: a damaged chunk is an error before its bytes are used."""
    raise CheckpointError(
        f"chunk {damage.chunk} of '{damage.tensor}' is damaged in {os.path.basename(damage.path)}",
        expected="the bytes that were saved",
        found=f"other bytes in {damage.low} to {damage.high} of its part",
        parameter=damage.tensor,
        phase="read",
        path=damage.path,
        cure="load another step (fsdplite.list_checkpoints names them), or restore this file from a copy",
    )
