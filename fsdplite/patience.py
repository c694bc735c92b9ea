"""A line for whoever looks at a program that stands still, long before the time-out ends it."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

__all__ = ["is_waiting", "waits_no_more"]

_PATIENCE_S = 30.0
_LOOK_S = 2.0


class _Patience(threading.Thread):
    """Looks from time to time at what the program waits for: nothing is done for a wait that is short."""

    def __init__(self) -> None:
        super().__init__(name="fsdplite-patience", daemon=True)
        self.current: tuple[Any, Any, float] | None = None

    def run(self) -> None:
        told = None
        while True:
            time.sleep(_LOOK_S)
            current = self.current
            if current is None or current is told or time.monotonic() - current[2] < _PATIENCE_S:
                continue
            told = current
            groups, waiting, _ = current
            print(
                f"fsdplite: rank {groups.rank} has waited for {_PATIENCE_S:g} s in {waiting}. Is another rank busy, or does it "
                f"do something else? After {groups.timeout.total_seconds():g} s this becomes an error that says who is missing.",
                file=sys.stderr,
                flush=True,
            )


_patience: _Patience | None = None


def is_waiting(groups: Any, waiting: Any) -> None:
    """A wait on the host begins. The first two ranks of a mesh tell of long ones: one of them may be the missing one."""
    global _patience
    if groups.rank not in groups.ranks[:2]:
        return
    if _patience is None or not _patience.is_alive():
        _patience = _Patience()
        _patience.start()
    _patience.current = (groups, waiting, time.monotonic())


def waits_no_more() -> None:
    """It has ended, well or not."""
    if _patience is not None:
        _patience.current = None
