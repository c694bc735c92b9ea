"""Safetensors headers: built before the data are there, and read without trust. Bytes only, no torch, no numpy.

A rank file keeps the CRC-32 of every chunk of every tensor in its ``__metadata__``, as text of a width that is known
from the shapes. So the data can be streamed first, behind room for a header that is written last, and one checksum of
the header proves the whole file.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any, Iterable

from ..errors import CheckpointError
from .crc32 import crc32_of_chunks
from .dtypes import ITEMSIZE
from .storage import File, FileSystem, read_exactly

__all__ = [
    "CHUNK_BYTES",
    "Header",
    "TensorSpec",
    "build_header",
    "chunk_checksums",
    "chunk_count",
    "lay_out",
    "parse_header",
    "read_header",
]

# To check part of a chunk all of it is read. A range touches at most two chunks it does not want whole: at 24 KiB that
# is below 5% of a range of 1 MiB, and below 64 KiB for the smaller ones.
CHUNK_BYTES = 24 * 1024
MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64
_TABLE = "crc32"
_CHUNK = "chunk_bytes"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor in a file: bytes ``[begin, end)`` of its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return self.size_bytes // ITEMSIZE[self.dtype]


@dataclass
class Header:
    """What a file says about itself.

    Attributes:
        size_bytes: Of the header with its length: where the data begin.
        data_bytes: Of all tensors.
        tensors: By name, in file order.
        metadata: ``__metadata__``.
        checksum: CRC-32 of the first ``size_bytes`` of the file.
        first_chunk: Per tensor, where its chunks begin in the table of checksums.
    """

    size_bytes: int
    data_bytes: int
    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]
    checksum: int
    first_chunk: dict[str, int] = field(default_factory=dict)

    @property
    def file_bytes(self) -> int:
        return self.size_bytes + self.data_bytes

    def chunk_checksum(self, name: str, chunk: int) -> int:
        """The stored CRC-32 of one chunk of a tensor."""
        start = 8 * (self.first_chunk[name] + chunk)
        return int(self.metadata[_TABLE][start : start + 8], 16)


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> list[TensorSpec]:
    """Give (name, dtype, shape, numel) places: largest elements first, so each is aligned and nothing is padded."""
    specs = []
    end = 0
    for name, dtype, shape, numel in sorted(tensors, key=lambda t: (-ITEMSIZE[t[1]], t[0])):
        begin, end = end, end + numel * ITEMSIZE[dtype]
        specs.append(TensorSpec(name, dtype, tuple(shape), begin, end))
    return specs


def build_header(specs: list[TensorSpec], *, checksums: list[int] | None = None, chunked: bool = True) -> bytes:
    """Header with its length. With ``chunked`` it holds the table of checksums: zeros until they are known."""
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise CheckpointError("a name stands twice in one file", found=sorted(n for n in names if names.count(n) > 1))
    for name in names:
        if name == "__metadata__" or not _is_text(name):
            raise CheckpointError(
                f"a safetensors file cannot hold a tensor that is called {name!r}",
                expected="another name than __metadata__, in characters that UTF-8 has",
                cure="rename it",
            )
    metadata = {"format": "pt"}
    if chunked:
        count = sum(chunk_count(spec.size_bytes) for spec in specs)
        metadata[_CHUNK] = str(CHUNK_BYTES)
        metadata[_TABLE] = "".join(f"{value:08x}" for value in checksums or [0] * count)
    entries: dict[str, Any] = {"__metadata__": metadata}
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [spec.begin, spec.end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            "a safetensors header may have 100,000,000 bytes", found=f"{len(text)} bytes for {len(specs)} tensors"
        )
    return len(text).to_bytes(8, "little") + text


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a pair
        return False
    return True


def chunk_checksums(view: memoryview) -> list[int]:
    """CRC-32 of each chunk of bytes that begin at a chunk's start."""
    return crc32_of_chunks(view, CHUNK_BYTES)


def parse_header(raw: bytes, file_bytes: int, path: str) -> Header:
    """Check and read a header with its length. Every defect is a :class:`CheckpointError` that names the file."""
    try:
        return _parse(raw, file_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as problem:
        raise _not_intact(f"{problem}", path) from None


def _not_intact(found: str, path: str) -> CheckpointError:
    return CheckpointError("this is not an intact safetensors file", found=found, phase="read", path=path)


def _parse(raw: bytes, file_bytes: int) -> Header:
    text = raw[8:]
    if not text.startswith(b"{"):
        raise ValueError("the header does not begin with {")
    entries = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    metadata = entries.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds something other than text")
    specs = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in ITEMSIZE:
            raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
        numel = 1
        for size in shape:
            if type(size) is not int or size < 0:
                raise ValueError(f"tensor {name!r} has shape {shape}")
            numel *= size
        if type(begin) is not int or type(end) is not int or end - begin != numel * ITEMSIZE[dtype]:
            raise ValueError(f"tensor {name!r} of shape {shape} and dtype {dtype} lies at bytes {begin} to {end}")
        specs.append(TensorSpec(name, dtype, shape, begin, end))
    specs.sort(key=lambda spec: (spec.begin, spec.end))
    end = 0
    for spec in specs:
        if spec.begin != end:
            raise ValueError(f"tensor {spec.name!r} begins at byte {spec.begin}, the one before ends at {end}")
        end = spec.end
    if len(raw) + end != file_bytes:
        raise ValueError(f"header and tensors have {len(raw) + end} bytes, the file has {file_bytes}")
    header = Header(len(raw), end, {spec.name: spec for spec in specs}, metadata, zlib.crc32(raw))
    if _TABLE in metadata and _CHUNK in metadata:  # one of them alone is somebody else's
        if metadata[_CHUNK] != str(CHUNK_BYTES):
            raise ValueError(f"chunks of {metadata[_CHUNK]} bytes, expected {CHUNK_BYTES}")
        count = 0
        for spec in specs:
            header.first_chunk[spec.name] = count
            count += chunk_count(spec.size_bytes)
        if len(metadata[_TABLE]) != 8 * count:
            raise ValueError(f"checksums of {len(metadata[_TABLE]) // 8} chunks, expected {count}")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def read_header(fs: FileSystem, file: File, *, expected: Any = None) -> Header:
    """Read a file's header. ``expected`` is the manifest's record of the file (``size``, ``header_crc32``)."""
    size = fs.size(file.path)
    if expected is not None and size != expected.size_bytes:
        raise CheckpointError(
            "a file does not have the size that the manifest lists",
            expected=f"{expected.size_bytes} bytes",
            found=f"{size} bytes",
            phase="read",
            path=file.path,
        )
    prefix = bytearray(8)
    if size < 8:
        raise _not_intact(f"{size} bytes", file.path)
    read_exactly(fs, file, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise _not_intact(f"a header of {length} bytes in a file of {size}", file.path)
    raw = bytearray(8 + length)
    raw[:8] = prefix
    read_exactly(fs, file, 8, memoryview(raw)[8:])
    if expected is not None and zlib.crc32(raw) != expected.header_crc32:
        raise CheckpointError(
            "the header of a file is damaged, or the file belongs to another save",
            expected=f"checksum {expected.header_crc32:08x}",
            found=f"{zlib.crc32(raw):08x}",
            phase="read",
            path=file.path,
        )
    return parse_header(bytes(raw), size, file.path)
