"""How the blocks of a forward are cut into segments: near sqrt(L), or as few as a byte budget allows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..keywords import known_keywords

__all__ = ["Cut", "RecomputeWithin", "cut_sqrt", "cut_within", "parse_bytes", "recompute_within"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class RecomputeWithin:
    """What :func:`recompute_within` returns."""

    budget_bytes: int


@known_keywords
def recompute_within(budget: int | str) -> RecomputeWithin:
    """For ``fsdp_wrap(..., recompute=...)``: recompute as little as keeps activations of the blocks within a budget.

    The first training step runs as with ``"sqrt"`` and is measured; from the next one on the last blocks keep what
    they save, as many as fit, and the rest is cut into segments. The cut is the same on all ranks: it follows the
    largest of their measurements.

    Args:
        budget: Bytes per rank, a number or text such as ``"2GiB"`` or ``"500MB"``.
    """
    return RecomputeWithin(parse_bytes(budget, "the budget for activations"))


def parse_bytes(value: Any, what: str) -> int:
    """A positive number of bytes from an int, or from text with a unit (MB is 10**6, MiB is 2**20)."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B?\s*", value, re.IGNORECASE)
        if found is not None:
            number, unit, binary = float(found[1]), found[2].upper(), found[3]
            count = int(number * (_BINARY[unit] if binary and unit else _UNITS[unit]))
            if count > 0:
                return count
    raise ConfigError(f"{what} is a number of bytes", expected='for example 2 * 2**30, "2GiB" or "500MB"', found=repr(value))


@dataclass(frozen=True)
class Cut:
    """How many blocks each segment has, in order; the blocks after them are not recomputed."""

    sizes: tuple[int, ...]

    @property
    def recomputed(self) -> int:
        return sum(self.sizes)

    def segment_of(self, call: int, expected: int) -> int | None:
        """The segment of the ``call``-th block call of a forward; None: not recomputed.

        A forward may call more blocks than the ``expected`` ones: they join segments of the usual size.
        """
        if call >= expected and self.sizes:
            return len(self.sizes) + (call - expected) // max(self.sizes)
        for index, size in enumerate(self.sizes):
            if call < size:
                return index
            call -= size
        return None


def _even(blocks: int, size: int) -> tuple[int, ...]:
    """``blocks`` in as few segments as their size allows, of nearly equal size."""
    if not blocks:
        return ()
    count = -(-blocks // size)
    return tuple(blocks // count + (index < blocks % count) for index in range(count))


def cut_sqrt(blocks: int) -> Cut:
    """About sqrt(L) segments. The last one keeps its activations: backward begins with it."""
    count = math.isqrt(max(blocks, 1) - 1) + 1
    size = -(-blocks // count)
    sizes = _even(blocks, size)
    return Cut(sizes[:-1])


def peak_bytes(blocks: int, kept: int, size: int, saved_bytes: int, input_bytes: int) -> int:
    """The most that activations take, if the last ``kept`` blocks keep theirs and others form segments of ``size``.

    At the end of forward there are the segments' inputs and what the last blocks keep; in backward the inputs and one
    segment, computed again.
    """
    segments = _even(blocks - kept, size)
    again = max(segments, default=0)
    return len(segments) * input_bytes + max(kept, again) * saved_bytes


def cut_within(budget_bytes: int, blocks: int, saved_bytes: int, input_bytes: int) -> tuple[Cut, int]:
    """The cut that recomputes the fewest blocks within a budget, and its estimated peak.

    Where nothing fits, the one with the lowest peak.

    Args:
        budget_bytes: For activations of the blocks.
        blocks: How many blocks a forward calls.
        saved_bytes: What one block saves.
        input_bytes: What one segment keeps.
    """
    lowest = None
    for kept in range(blocks, -1, -1):
        found = min(
            (peak_bytes(blocks, kept, size, saved_bytes, input_bytes), size) for size in range(1, max(blocks, 1) + 1)
        )
        if lowest is None or found[0] < lowest[0]:
            lowest = (*found, kept)
        if found[0] <= budget_bytes:
            return Cut(_even(blocks - kept, found[1])), found[0]
    assert lowest is not None, "there is at least the cut into nothing"
    peak, size, kept = lowest
    return Cut(_even(blocks - kept, size)), peak
