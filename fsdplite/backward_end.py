"""How the engine learns that a backward is over, also when it dies."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["BackwardEnd"]


class BackwardEnd:
    """Called by autograd when a graph task ends well; destroyed without a call when it dies of an exception."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = weakref.ref(schedule)
        self._backward = schedule.backward_id
        self._was_called = False

    def __call__(self) -> None:
        self._was_called = True
        schedule = self._schedule()
        if schedule is not None and schedule.in_backward and schedule.backward_id == self._backward:
            schedule.finish_backward()

    def __del__(self) -> None:
        if self._was_called:
            return
        schedule = self._schedule()
        if schedule is not None and schedule.in_backward and schedule.backward_id == self._backward:
            schedule.abandon_backward()
