"""How a shard is cut for an update: chunks that fit into a buffer, and the pieces of parameters in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..layout import FlatLayout
from .files import BLOCK_BYTES

__all__ = ["Chunk", "Piece", "cut", "chunk_numel_within"]


@dataclass(eq=False)
class Piece:
    """Consecutive elements of one parameter in one chunk.

    Attributes:
        index: Of the parameter in its flat parameter.
        start, stop: In the shard.
        offset: Of ``start`` in this rank's slice of the parameter.
        keys: Regions in which it has state. Empty and without scalars: it has none yet.
        scalars: Its state that has no element per parameter element (step counters).
        has_state: An update, or a load, has given it state.
    """

    index: int
    start: int
    stop: int
    offset: int
    keys: tuple[str, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    has_state: bool = False

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class Chunk:
    """Elements ``[start, stop)`` of a shard; ``start`` is at a block's start, whatever the dtype."""

    start: int
    stop: int
    pieces: list[Piece] = field(default_factory=list)


def chunk_numel_within(buffer_bytes: int, itemsize: int) -> int:
    """Elements of a chunk: a multiple of a block in every dtype, at least one block of single bytes."""
    return max(buffer_bytes // itemsize // BLOCK_BYTES, 1) * BLOCK_BYTES


def cut(layout: FlatLayout, rank: int, chunk_numel: int) -> list[Chunk]:
    """The chunks of one rank's shard, with what it holds of each parameter. Chunks of nothing but padding are left out."""
    slices = []
    for index in range(len(layout.slots)):
        start, stop = layout.shard_slice(index, rank)
        if start < stop:
            slices.append((index, start, stop))
    chunks: list[Chunk] = []
    for start in range(0, layout.shard_numel, chunk_numel):
        stop = min(start + chunk_numel, layout.shard_numel)
        pieces = [
            Piece(index, max(first, start), min(last, stop), max(first, start) - first)
            for index, first, last in slices
            if first < stop and last > start
        ]
        if pieces:
            chunks.append(Chunk(start, stop, pieces))
    return chunks
