"""FlatLayout: hand-computed layouts of the cases, and properties that hold for any shapes and any world size."""

from __future__ import annotations

import random
from math import prod

import pytest

from fsdplite.layout import FlatLayout

Interval = tuple[int, int]
Shape = tuple[int, ...]

# Shapes, alignment, world size -> local range of every parameter, per rank. Computed by hand.
BY_HAND = {
    "T2 two ranks: 15 elements are 8 and 7": ([(5, 3)], 1, [[(0, 8)], [(8, 15)]]),
    "T2 four ranks: 4, 4, 4 and 3": ([(5, 3)], 1, [[(0, 4)], [(4, 8)], [(8, 12)], [(12, 15)]]),
    "T2 three ranks divide it": ([(5, 3)], 1, [[(0, 5)], [(5, 10)], [(10, 15)]]),
    "G1 two ranks: [3, 0] and [0, 4]": ([(4,)], 1, [[(0, 2)], [(2, 4)]]),
    "G3 one element on four ranks": ([(1,)], 1, [[(0, 1)], [(1, 1)], [(1, 1)], [(1, 1)]]),
    "S1 no dimensions": ([()], 1, [[(0, 1)], [(1, 1)]]),
    "S3 two ranks: 21 elements, 11 each": (
        [(7,), (13,), (1,)],
        1,
        [[(0, 7), (0, 4), (0, 0)], [(7, 7), (4, 13), (0, 1)]],
    ),
    "S3 aligned to 4: starts 0, 8, 24; 26 elements, 13 each": (
        [(7,), (13,), (1,)],
        4,
        [[(0, 7), (0, 5), (0, 0)], [(7, 7), (5, 13), (0, 1)]],
    ),
    "S4 seven elements on four ranks": ([(7,)], 1, [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 7)]]),
    "an empty parameter in the middle": ([(3,), (0, 5), (3,)], 1, [[(0, 3), (0, 0), (0, 0)], [(3, 3), (0, 0), (0, 3)]]),
    "a rank that owns only padding": ([(2,), (2,)], 4, [[(0, 2), (0, 0)], [(2, 2), (0, 0)], [(2, 2), (0, 2)]]),
}


def owned(interval: Interval) -> Interval | None:
    return interval if interval[0] < interval[1] else None


@pytest.mark.parametrize("case", BY_HAND, ids=list(BY_HAND))
def test_layouts_computed_by_hand(case: str) -> None:
    shapes, alignment, expected = BY_HAND[case]
    layout = FlatLayout(shapes, world_size=len(expected), alignment=alignment)
    for rank, ranges in enumerate(expected):
        found = [layout.local_range(index, rank) for index in range(len(shapes))]
        assert [owned(r) for r in found] == [owned(r) for r in ranges], f"rank {rank}"


def test_numbers_of_one_layout() -> None:
    layout = FlatLayout([(3, 3), (), (0,), (5,)], world_size=4, alignment=4)
    assert [slot.offset for slot in layout.slots if slot.numel] == [0, 12, 16]
    assert [slot.numel for slot in layout.slots] == [9, 1, 0, 5]
    assert [slot.shape for slot in layout.slots] == [(3, 3), (), (0,), (5,)]
    assert (layout.numel, layout.padded_numel, layout.shard_numel, layout.padding_numel) == (15, 24, 6, 9)
    assert layout.gaps() == [(9, 12), (13, 16), (21, 24)]
    assert [layout.shard_range(rank) for rank in range(4)] == [(0, 6), (6, 12), (12, 18), (18, 24)]
    assert layout.local_range(3, 2) == (0, 2)
    assert layout.shard_slice(3, 2) == (4, 6)
    assert layout.local_range(3, 3) == (2, 5)
    assert layout.shard_slice(3, 3) == (0, 3)


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 7), (3, 0)]], ids=["no parameters", "empty", "two empty"])
@pytest.mark.parametrize("world_size", [1, 3, 1024])
def test_nothing_to_lay_out(shapes: list[Shape], world_size: int) -> None:
    layout = FlatLayout(shapes, world_size=world_size, alignment=4)
    assert (layout.numel, layout.padded_numel, layout.shard_numel) == (0, 0, 0)
    assert layout.gaps() == []
    for index in range(len(shapes)):
        assert owned(layout.local_range(index, world_size - 1)) is None
        assert layout.shard_slice(index, world_size - 1) == (0, 0)


@pytest.mark.parametrize(("world_size", "alignment"), [(0, 1), (-1, 1), (1, 0)])
def test_sizes_that_make_no_sense_are_errors(world_size: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        FlatLayout([(3,)], world_size=world_size, alignment=alignment)


# --- properties ---------------------------------------------------------------------------------------------------

PRIMES = (2, 3, 5, 7, 11, 13, 17, 97, 101)
WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 31, 64, 127, 1024)


def random_shape(rng: random.Random) -> Shape:
    kind = rng.randrange(6)
    if kind == 0:
        return ()
    if kind == 1:
        return (0,) if rng.random() < 0.5 else (rng.randint(1, 5), 0)
    if kind == 2:
        return (1,)
    if kind == 3:
        return (rng.choice(PRIMES),)
    return tuple(rng.choice(PRIMES[:6]) for _ in range(rng.randint(1, 3)))


def samples() -> list[tuple[list[Shape], int, int]]:
    rng = random.Random(20)
    found = []
    for world_size in (*WORLD_SIZES, *(rng.randint(1, 1024) for _ in range(28))):
        for alignment in (1, 2, 4, 8):
            shapes = [random_shape(rng) for _ in range(rng.randint(0, 9))]
            found.append((shapes, world_size, alignment))
    return found


def test_parameters_and_gaps_tile_the_flat_vector() -> None:
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        pieces = [(slot.offset, slot.stop) for slot in layout.slots if slot.numel] + layout.gaps()
        assert all(start < stop for start, stop in pieces)
        end = 0
        for start, stop in sorted(pieces):
            assert start == end, (shapes, world_size, alignment)
            end = stop
        assert end == layout.padded_numel


def test_offsets_are_aligned_and_in_order() -> None:
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        assert [slot.numel for slot in layout.slots] == [prod(shape) for shape in shapes]
        offsets = [slot.offset for slot in layout.slots if slot.numel]
        assert all(offset % alignment == 0 for offset in offsets)
        assert offsets == sorted(offsets)


def test_padding_is_bounded() -> None:
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        assert layout.numel == sum(map(prod, shapes))
        assert layout.padding_numel == layout.padded_numel - layout.numel
        assert 0 <= layout.padding_numel < len(shapes) * (alignment - 1) + world_size


def test_empty_parameters_cost_nothing() -> None:
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        without = FlatLayout([s for s in shapes if prod(s)], world_size=world_size, alignment=alignment)
        assert layout.padded_numel == without.padded_numel
        assert [slot for slot in layout.slots if slot.numel] == list(without.slots)


def test_shards_are_equal_and_tile_the_flat_vector() -> None:
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        assert layout.shard_numel * world_size == layout.padded_numel
        end = 0
        for rank in range(world_size):
            start, stop = layout.shard_range(rank)
            assert start == end and stop - start == layout.shard_numel
            end = stop
        assert end == layout.padded_numel


def test_local_ranges_tile_every_parameter_in_rank_order() -> None:
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        for index, shape in enumerate(shapes):
            end = 0
            for rank in range(world_size):
                start, stop = layout.local_range(index, rank)
                assert 0 <= start <= stop <= prod(shape)
                if start < stop:
                    assert start == end, (shapes, world_size, alignment, index, rank)
                    end = stop
            assert end == prod(shape)


def test_shard_slices_do_not_overlap_and_fit() -> None:
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        for rank in range(world_size):
            end = 0
            for index in range(len(shapes)):
                low, high = layout.local_range(index, rank)
                start, stop = layout.shard_slice(index, rank)
                assert stop - start == high - low
                if start < stop:
                    assert end <= start and stop <= layout.shard_numel
                    end = stop


def test_parameters_survive_a_round_trip_through_shards() -> None:
    """Scatter numbered elements into shards, join the shards, read the parameters where the slots say."""
    for shapes, world_size, alignment in samples():
        layout = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        flat: list[object] = []
        for rank in range(world_size):
            shard: list[object] = [None] * layout.shard_numel
            for index in range(len(shapes)):
                low, high = layout.local_range(index, rank)
                start, stop = layout.shard_slice(index, rank)
                shard[start:stop] = [(index, element) for element in range(low, high)]
            flat += shard
        for index, slot in enumerate(layout.slots):
            assert flat[slot.offset : slot.stop] == [(index, element) for element in range(slot.numel)]
        for start, stop in layout.gaps():
            assert flat[start:stop] == [None] * (stop - start)


def test_prime_sizes_at_every_small_world_size() -> None:
    for numel in (*PRIMES, 1, 0, 4, 16):
        for world_size in range(1, 33):
            layout = FlatLayout([(numel,)], world_size=world_size)
            sizes = [high - low for low, high in (layout.local_range(0, rank) for rank in range(world_size))]
            share = -(-numel // world_size)
            expected = [min(share, max(numel - rank * share, 0)) for rank in range(world_size)]
            assert sizes == expected


def test_the_same_parameters_lie_in_the_same_place_at_every_world_size() -> None:
    """Loading a checkpoint at another world size and comparing stages rely on it."""
    for shapes, world_size, alignment in samples():
        one = FlatLayout(shapes, world_size=1, alignment=alignment)
        many = FlatLayout(shapes, world_size=world_size, alignment=alignment)
        assert one.slots == many.slots
