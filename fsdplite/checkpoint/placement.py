"""Who writes which elements. Pure arithmetic on layouts, the same on every rank."""

from __future__ import annotations

from typing import Sequence

from ..layout import FlatLayout

__all__ = ["written_ranges"]


def written_ranges(
    layout: FlatLayout, included: Sequence[int], shard_rank: int, replica: int, replicas: int
) -> list[tuple[int, int, int]]:
    """What one rank writes of a flat parameter: (parameter, first element, count), without padding and without empties.

    The slices of one shard are held by ``replicas`` ranks. Laid end to end they are cut into as many equal parts, so
    each byte is written once and a rank has at most one range of a parameter.

    Args:
        layout: Of the flat parameter.
        included: Which of its parameters are saved.
        shard_rank: The rank's place in its shard group.
        replica: Its place among the ranks that hold the same slices.
        replicas: How many those are.
    """
    held = [(index, *layout.local_range(index, shard_rank)) for index in included]
    total = sum(high - low for _, low, high in held)
    start, stop = total * replica // replicas, total * (replica + 1) // replicas
    ranges = []
    end = 0
    for index, low, high in held:
        begin, end = end, end + high - low
        first, last = max(begin, start), min(end, stop)
        if first < last:
            ranges.append((index, low + first - begin, last - first))
    return ranges
