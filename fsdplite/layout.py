"""Where each parameter lies in a flat vector, and which part of it each rank owns.

Pure arithmetic on element counts: no tensors, no process group. The engine, the planner and checkpoints share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Sequence

__all__ = ["FlatLayout", "Slot"]


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat vector, in elements.

    Attributes:
        shape: Original shape.
        numel: Number of elements (1 for shape ``()``, 0 if any dimension is 0).
        offset: First element in the flat vector.
    """

    shape: tuple[int, ...]
    numel: int
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel


class FlatLayout:
    """Parameters end to end, each starting on an aligned element, padded to a multiple of the world size.

    Every rank owns an interval of ``shard_numel`` elements, so a rank's part of a parameter is an interval too
    (possibly empty). Padding lies between parameters and at the end; it is zero and stays zero.

    Args:
        shapes: Original shapes, in the order in which they are laid out.
        world_size: Number of shards.
        alignment: Every parameter starts at a multiple of this many elements.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], *, world_size: int, alignment: int = 1) -> None:
        if world_size < 1 or alignment < 1:
            raise ValueError(f"world_size and alignment must be positive, got {world_size} and {alignment}")
        slots = []
        end = 0
        for shape in shapes:
            numel = prod(shape)
            offset = -(-end // alignment) * alignment if numel else end
            slots.append(Slot(tuple(int(d) for d in shape), numel, offset))
            end = offset + numel
        self.slots: tuple[Slot, ...] = tuple(slots)
        self.world_size = world_size
        self.alignment = alignment
        self.numel = sum(slot.numel for slot in slots)
        self.padded_numel = -(-end // world_size) * world_size
        self.shard_numel = self.padded_numel // world_size

    @property
    def padding_numel(self) -> int:
        """Elements of the flat vector that belong to no parameter."""
        return self.padded_numel - self.numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Half-open interval of the flat vector that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        """Half-open interval of parameter ``index``'s own elements that ``rank`` owns; ``(n, n)`` if none."""
        slot = self.slots[index]
        start, stop = self.shard_range(rank)
        low = min(max(start - slot.offset, 0), slot.numel)
        high = min(max(stop - slot.offset, 0), slot.numel)
        return low, high

    def shard_slice(self, index: int, rank: int) -> tuple[int, int]:
        """Where :meth:`local_range` lies inside ``rank``'s shard."""
        low, high = self.local_range(index, rank)
        if low == high:
            return 0, 0
        base = self.slots[index].offset - rank * self.shard_numel
        return base + low, base + high

    def gaps(self) -> list[tuple[int, int]]:
        """Intervals of the flat vector that hold padding."""
        gaps = []
        end = 0
        for slot in self.slots:
            if slot.numel:
                if slot.offset > end:
                    gaps.append((end, slot.offset))
                end = slot.stop
        if self.padded_numel > end:
            gaps.append((end, self.padded_numel))
        return gaps

    def __repr__(self) -> str:
        return (
            f"FlatLayout({len(self.slots)} parameters, numel={self.numel}, padding={self.padding_numel}, "
            f"world_size={self.world_size}, shard_numel={self.shard_numel})"
        )
