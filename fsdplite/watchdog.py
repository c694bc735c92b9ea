"""Turning a stuck collective into an error that says who waits where, and for whom.

A rank whose collective failed leaves a note in the process group's store and reads what the others left. Ranks
without a note are the missing ones. On gloo the wait itself times out and raises in the program. NCCL waits on the
device, so a thread watches what is pending, prints the same report and aborts the group.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .errors import CollectiveError, unit_label
from .groups import Groups

__all__ = ["Waiting", "diagnose", "watch"]

_GRACE_S = 2.0
_PREFIX = "fsdplite/stuck"


class Waiting:
    """What a rank waits for: the unit, the phase and the step."""

    __slots__ = ("lacking", "phase", "step", "trail", "unit")

    def __init__(
        self,
        unit: str,
        phase: str,
        step: int,
        trail: Callable[[], list[str]] | None = None,
        lacking: Callable[[], str] | None = None,
    ) -> None:
        self.unit = unit
        self.phase = phase
        self.step = step
        # Asked only when the rank is stuck:
        self.trail = trail  # what it did since ranks were last alike
        self.lacking = lacking  # which gradients it lacks of units that have others

    def __str__(self) -> str:
        return f"{self.phase} of unit {unit_label(self.unit)} in step {self.step}"


def diagnose(groups: Groups, waiting: Waiting, cause: BaseException | str) -> CollectiveError:
    """Exchange notes with the other ranks of ``groups`` and return the error to raise."""
    known = {groups.rank: _note(waiting)}
    notes = []
    try:
        known |= _exchange_notes(groups, known[groups.rank])
    except Exception as failure:  # the store lives on a rank that is gone; the report must still come out
        notes = [f"the store cannot be read ({failure})"]
    notes = [f"rank {rank} waits in {note.place}" for rank, note in sorted(known.items())] + notes
    missing = [rank for rank in groups.ranks if rank not in known]
    if missing:
        notes.append("missing: " + ", ".join(f"rank {rank}" for rank in missing))
    else:
        notes.append("no rank is missing: they wait for each other in different places")
    apart = _where_apart({rank: note.trail for rank, note in sorted(known.items())})
    if apart:
        notes.append(f"they came apart here: {apart}")
    elif known[groups.rank].trail:
        notes.append("before: " + ", ".join(known[groups.rank].trail[-4:]))
    look = "Look at the missing ranks' output first." if missing else "An evaluation or a generation has to run on all."
    return CollectiveError(
        f"a collective failed or timed out ({groups.timeout.total_seconds():g} s): {waiting}",
        found="; ".join(notes),
        unit=waiting.unit,
        rank=groups.rank,
        cure=f"every rank must run the same units in the same order, as often as the others. {look} Cause here: {cause}",
    )


@dataclass(frozen=True)
class _Note:
    """What a stuck rank tells the others: where it waits, and what it did before."""

    place: str
    trail: list[str]


def _note(waiting: Waiting) -> _Note:
    lacking = waiting.lacking() if waiting.lacking is not None else ""
    return _Note(str(waiting) + lacking, waiting.trail() if waiting.trail is not None else [])


def _where_apart(trails: dict[int, list[str]]) -> str | None:
    """The first thing that not all ranks did, rank by rank; None if each did what the others did as far as it got."""
    for step in range(max(map(len, trails.values()), default=0)):
        at = {rank: trail[step] for rank, trail in trails.items() if step < len(trail)}
        if len(set(at.values())) > 1:
            return ", ".join(f"rank {rank}: {did}" for rank, did in at.items())
    return None


def _exchange_notes(groups: Groups, own: _Note) -> dict[int, _Note]:
    store = dist.distributed_c10d._get_default_store()
    scope = "-".join(map(str, groups.ranks)) if len(groups.ranks) <= 8 else f"{min(groups.ranks)}x{len(groups.ranks)}"
    store.set(f"{_PREFIX}/{scope}/{groups.rank}", json.dumps([time.time(), own.place, own.trail]))
    waiting_for = [rank for rank in groups.ranks if rank != groups.rank]
    found: dict[int, _Note] = {}
    fresh_after = time.time() - 2 * groups.timeout.total_seconds() - 60  # an older note is from another failure
    deadline = time.monotonic() + _GRACE_S
    while waiting_for and time.monotonic() < deadline:
        for rank in list(waiting_for):
            key = f"{_PREFIX}/{scope}/{rank}"
            if store.check([key]):
                stamp, place, trail = json.loads(store.get(key))
                if stamp >= fresh_after:
                    found[rank] = _Note(place, trail)
                    waiting_for.remove(rank)
        if waiting_for:
            time.sleep(0.05)
    return found


@dataclass(frozen=True)
class _Entry:
    deadline: float
    work: Any
    groups: Groups
    group: Any
    waiting: Waiting


class _Watchdog(threading.Thread):
    """Watches device collectives, which cannot raise where the program waits for them.

    It holds the work itself: the program has waited, in its stream, long before the device is done. It reports at 0.8
    of the timeout, because NCCL's own watchdog ends the process at the timeout.
    """

    def __init__(self) -> None:
        super().__init__(name="fsdplite-watchdog", daemon=True)
        self._lock = threading.Lock()
        self._pending: deque[_Entry] = deque()

    def add(self, work: Any, groups: Groups, group: Any, waiting: Waiting) -> None:
        deadline = time.monotonic() + 0.8 * groups.timeout.total_seconds()
        with self._lock:
            while self._pending and self._pending[0].work.is_completed():
                self._pending.popleft()
            self._pending.append(_Entry(deadline, work, groups, group, waiting))

    def run(self) -> None:
        while True:
            time.sleep(1.0)
            now = time.monotonic()
            with self._lock:
                while self._pending and self._pending[0].work.is_completed():
                    self._pending.popleft()  # NCCL's work keeps its tensors
                late = next((e for e in self._pending if e.deadline < now and not e.work.is_completed()), None)
            if late is not None:
                error = diagnose(late.groups, late.waiting, "no completion on the device")
                print(error, file=sys.stderr, flush=True)
                late.group.abort()
                return


_watchdog: _Watchdog | None = None


def watch(work: Any, groups: Groups, group: Any, waiting: Waiting) -> None:
    """Watch a collective of ``group`` on an accelerator (gloo needs none: its own wait raises)."""
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():
        _watchdog = _Watchdog()
        _watchdog.start()
    _watchdog.add(work, groups, group, waiting)
