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
_DEAD = "a pass that died"


class Pass:
    """One forward or backward: what ran so far, and what the last one like it ran.

    ``is_surprising``: nothing predicts that it begins now, so its first use is agreed upon.
    """

    __slots__ = ("events", "expected", "is_as_expected", "is_surprising")

    def __init__(self, expected: list[int] | None, is_surprising: bool = False) -> None:
        self.events: list[int] = []
        self.expected = expected
        self.is_as_expected = expected is not None
        self.is_surprising = is_surprising

    def take(self, code: int) -> bool:
        """Record a use. True if the last pass predicted it."""
        position = len(self.events)
        self.events.append(code)
        if self.is_as_expected:
            expected = self.expected
            self.is_as_expected = position < len(expected) and expected[position] == code
        if self.is_surprising:
            self.is_surprising = False
            return False
        return self.is_as_expected

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
        self._running: Hashable = None  # the pass that runs, or that ran last; None after a backward
        self._followers: dict[Hashable, set[Hashable]] = {}  # which passes have begun after which
        self.hash = number
        self.recent: deque[int] = deque(maxlen=4096)  # for the report when hashes differ

    @staticmethod
    def code(unit_index: int, kind: int) -> int:
        return unit_index * len(KINDS) + kind

    @staticmethod
    def decode(code: int) -> tuple[int, int]:
        return divmod(code, len(KINDS))

    def start(self, key: Hashable) -> Pass:
        """A pass begins. Where another one would be as likely, a rank that alone begins this one must not send at once:
        a forward where a backward is due, and whatever follows an error."""
        followed, self._running = self._running, key
        is_surprising = followed is not None and key not in self._followers.setdefault(followed, set())
        if is_surprising:
            self._followers[followed].add(key)
        return Pass(self._last.get(key), is_surprising)

    def interrupt(self) -> None:
        """A pass died, maybe on this rank only."""
        self._followers[_DEAD] = set()
        self._running = _DEAD

    def stop(self, key: Hashable, done: Pass, ends_step: bool = False) -> None:
        self._last[key] = done.events
        if ends_step:
            self._running = None

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
