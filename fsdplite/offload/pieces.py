"""How a shard is cut for an update: chunks that fit into a buffer, and the pieces of parameters in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ..layout import FlatLayout
from .files import BLOCK_BYTES

__all__ = ["Chunk", "Piece", "batches", "by_parameter", "chunk_numel_within", "cut", "piece_numel_within"]

# Parameters are cut at multiples of this many elements from their start. Vectorised kernels treat a last part that
# fills no vector in another way, which may round otherwise: it has to be the same elements as without cuts.
_VECTOR_NUMEL = 128
# An update makes several temporary tensors as long as what it is given: short beside a buffer, and long enough that the
# calls cost little (a third of a millisecond each, measured beside threads that read and write).
_LARGEST_PIECE_NUMEL = 2**20

Item = TypeVar("Item")


@dataclass(eq=False)
class Piece:
    """Consecutive elements of one parameter in one chunk.

    Attributes:
        index: Of the parameter in its flat parameter.
        start, stop: In the shard.
        offset: Of ``start`` in this rank's slice of the parameter.
        place: Of ``start`` in the store.
    """

    index: int
    start: int
    stop: int
    offset: int
    place: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def place_stop(self) -> int:
        return self.place + self.numel


@dataclass(eq=False)
class Chunk:
    """Elements ``[start, stop)`` of a store; ``start`` is at a block's start, whatever the dtype."""

    start: int
    stop: int
    pieces: list[Piece] = field(default_factory=list)


def by_parameter(chunks: list[Chunk]) -> dict[int, list[Piece]]:
    """The pieces of each parameter that has any, by its index, in order."""
    pieces: dict[int, list[Piece]] = {}
    for chunk in chunks:
        for piece in chunk.pieces:
            pieces.setdefault(piece.index, []).append(piece)
    return pieces


def chunk_numel_within(buffer_bytes: int, itemsize: int) -> int:
    """Elements of a chunk: a multiple of a block in every dtype, at least one block of single bytes."""
    return max(buffer_bytes // itemsize // BLOCK_BYTES, 1) * BLOCK_BYTES


def piece_numel_within(chunk_numel: int) -> int:
    """Elements of the longest piece: an eighth of a chunk, at most 4 MiB of fp32."""
    return min(chunk_numel // 8, _LARGEST_PIECE_NUMEL)


def batches(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes add up to at most ``most``; a larger one is alone."""
    batch: list[Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def cut(layout: FlatLayout, rank: int, chunk_numel: int, piece_numel: int) -> tuple[list[Chunk], int]:
    """The chunks of what one rank holds of each parameter, and how many elements the store has.

    In the store slices lie one after another as in the shard, but each at a multiple of ``_VECTOR_NUMEL``.
    """
    chunks: list[Chunk] = []
    end = 0
    for index in range(len(layout.slots)):
        first, last = layout.shard_slice(index, rank)
        if first == last:
            continue
        begin = -(-end // _VECTOR_NUMEL) * _VECTOR_NUMEL
        end = begin + last - first
        place = begin
        while place < end:
            number = place // chunk_numel
            if not chunks or chunks[-1].start != number * chunk_numel:
                chunks.append(Chunk(number * chunk_numel, number * chunk_numel))
            stop = min(end, (number + 1) * chunk_numel, place + piece_numel)
            offset = place - begin
            chunks[-1].pieces.append(Piece(index, first + offset, first + stop - begin, offset, place))
            chunks[-1].stop = place = stop
    return chunks, end
