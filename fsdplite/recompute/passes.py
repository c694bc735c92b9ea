"""Which forward is running, and whether a backward is computing a segment again. The engine says so here."""

from __future__ import annotations

__all__ = ["begin", "end", "is_replaying", "number", "replaying"]

_begun = 0
_running = 0
_replays = 0


def begin() -> None:
    """An outermost forward of a wrapped model begins."""
    global _begun, _running
    _begun += 1
    _running += 1


def end() -> None:
    global _running
    _running -= 1


def number() -> int:
    """Of the forward that is running; 0 if none is."""
    return _begun if _running else 0


class replaying:
    """While a segment is computed again for a backward, gathered units stay until that backward has passed them."""

    def __enter__(self) -> None:
        global _replays
        _replays += 1

    def __exit__(self, *exc: object) -> None:
        global _replays
        _replays -= 1


def is_replaying() -> bool:
    return _replays > 0
