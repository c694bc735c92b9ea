"""The order in which units run: recorded, replayed for prefetch, and agreed upon across ranks.

A collective carries no name: if two ranks gather different units of equal size, weights are swapped in silence, and
of different sizes, gloo kills the process. So a use of a unit that the record of the last pass does not predict is
first agreed upon with the other ranks, and every step's order is compared as one hash (``Schedule``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

__all__ = ["BACKWARD", "FORWARD", "KINDS", "OUTSIDE", "REDUCE", "RESIDENT", "Order", "Pass"]

# A use with parameters that are there already (RESIDENT) sends nothing, and must do so on all ranks alike.
FORWARD, BACKWARD, REDUCE, RESIDENT = range(4)
KINDS = ("all-gather in forward", "all-gather in backward", "reduce-scatter", "use of resident parameters")
# Collectives outside forward and backward, which ranks agree upon each time.
OUTSIDE = ("full_params", "full_grad", "full_state_dict", "gradient norm", "regrouping of unfrozen parameters")

_MASK = (1 << 63) - 1


class Pass:
    """One forward or backward: what ran so far, and what the last one like it ran."""

    __slots__ = ("events", "expected", "is_as_expected")

    def __init__(self, expected: list[int] | None) -> None:
        self.events: list[int] = []
        self.expected = expected
        self.is_as_expected = expected is not None

    def take(self, code: int) -> bool:
        """Record a use. True if the last pass predicted it."""
        position = len(self.events)
        self.events.append(code)
        if self.is_as_expected:
            expected = self.expected
            if position < len(expected) and expected[position] == code:
                return True
            self.is_as_expected = False
        return False

    def upcoming(self) -> Iterator[int]:
        """What is expected from here on; nothing after a deviation."""
        if self.is_as_expected:
            yield from self.expected[len(self.events) :]

    def is_over_for(self, unit_index: int) -> bool:
        """Whether the last pass like this one had no further use of a unit from here on; False after a deviation."""
        return self.is_as_expected and all(Order.decode(code)[0] != unit_index for code in self.upcoming())


class Order:
    """The passes of one model, by kind, and a hash over everything since the last comparison."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the model: the same on all ranks, another for every model
        self._last: dict[Hashable, list[int]] = {}
        self.hash = number
        self.recent: deque[int] = deque(maxlen=4096)  # for the report when hashes differ

    @staticmethod
    def code(unit_index: int, kind: int) -> int:
        return unit_index * len(KINDS) + kind

    @staticmethod
    def decode(code: int) -> tuple[int, int]:
        return divmod(code, len(KINDS))

    def start(self, key: Hashable) -> Pass:
        return Pass(self._last.get(key))

    def stop(self, key: Hashable, done: Pass) -> None:
        self._last[key] = done.events

    def note(self, code: int) -> None:
        self.hash = (self.hash * 1_000_003 + code + 1) & _MASK
        self.recent.append(code)

    def restart_hash(self) -> None:
        self.hash = self.number
        self.recent.clear()

    def forget(self) -> None:
        """After units were added or regrouped: nothing recorded is a prediction any more."""
        self._last.clear()
        self.restart_hash()
