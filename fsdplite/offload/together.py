"""Doing something on every rank that may fail on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..control import STATE, exchange, exchange_texts
from ..errors import OffloadError
from ..watchdog import Waiting

__all__ = ["together"]


def together(groups: Any, doing: str, call: Callable[[], None]) -> None:
    """Do something, and raise on all ranks if it fails on any. An interrupt is raised at once, on its rank alone.

    Args:
        groups: Whose ranks do it.
        doing: What, for messages.

    Collective: one message on the control group, and another with the reasons if any rank has failed.
    """
    failure: Exception | None = None
    try:
        call()
    except Exception as problem:
        failure = problem
    waiting = Waiting("", f"agreement on whether all ranks could {doing}", 0)
    merged = exchange(groups, STATE, 0, bytes([failure is not None]), waiting)
    if merged is not None and not merged[0]:
        return
    texts = exchange_texts(groups, None if failure is None else str(failure), waiting)
    if failure is not None:
        raise failure
    failed = next(((rank, text) for rank, text in zip(groups.ranks, texts) if text is not None), None)
    raise OffloadError(
        f"rank {failed[0]} could not {doing}" if failed else f"not every rank is about to {doing}",
        found=failed[1] if failed else None,
        rank=failed[0] if failed else groups.rank,
    )
