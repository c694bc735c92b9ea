"""Asking the other ranks: do we run the same units, and which parameters did any of us use?"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from . import events
from .control import ORDER, USE, exchange, exchange_texts
from .errors import RankMismatchError, unit_label
from .gradient_buffer import CHANGED, DROPPED, HAD, KEPT, LACKED, UNCHANGED, USED
from .order import KINDS, OUTSIDE, REDUCE, Order
from .watchdog import Waiting

if TYPE_CHECKING:
    from .flat_param import FlatParameter
    from .groups import Groups
    from .schedule import Schedule
    from .unit import UnitState

__all__ = ["Agreement"]

_UNEQUAL_SUMS = (
    "ranks add gradients to different ones: zero_grad() was called on some of them only",
    "gradients of earlier backwards on all ranks, or on none",
    "call zero_grad() on every rank, at the same point of the step, and then run this step again",
)
# What must not be true on different ranks, and what it means if it is.
_UNEQUAL = {
    HAD | LACKED: _UNEQUAL_SUMS,
    KEPT | DROPPED: _UNEQUAL_SUMS,
    CHANGED | UNCHANGED: (
        "parameters were changed on some ranks only: optimizer.step() was skipped on the others",
        "a step on all ranks, or on none",
        "decide alike on all ranks: reduce what decides (a loss that is not finite, say), or ask fsdp.LossScaler, which "
        "skips on all of them; then load a checkpoint, as the parameters have come apart",
    ),
}
_IS_USED = bytes(flags & USED for flags in range(256))
_IS_UNEQUAL = bytes(any(flags & both == both for both in _UNEQUAL) for flags in range(256))
_WHAT_WAS_THERE = {
    HAD: "a gradient was there",
    LACKED: "none was there",
    KEPT: "an unreduced one was kept",
    DROPPED: "an unreduced one was dropped",
    CHANGED: "a step changed it",
    UNCHANGED: "nothing changed it",
}


class Agreement:
    """The cross-rank questions of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = weakref.ref(schedule)

    def waiting(self, unit: UnitState, phase: str) -> Waiting:
        """What a rank says it waits for, should it get stuck."""
        return Waiting(unit.name, phase, self._schedule().step, self._trail, self._lacking)

    def agree(self, code: int, unit: UnitState, phase: str) -> None:
        """Before a collective that no record predicts: raise on every rank unless all are about to do the same.

        Collective: one message on the control group.
        """
        waiting = self.waiting(unit, f"agreement before {phase}")
        value = code * 0x9E3779B97F4A7C15 + self._schedule().order.number
        if exchange(unit.groups, USE, value, b"", waiting) is None:
            self._report(unit.groups, waiting)

    def agree_on_extra(self, what: str, unit: UnitState) -> None:
        """The same for a collective outside forward and backward: one of ``OUTSIDE``."""
        self.agree((len(KINDS) << 32) + unit.index * len(OUTSIDE) + OUTSIDE.index(what), unit, what)

    def compare(self, flats: list[FlatParameter]) -> bytes:
        """At the end of a synchronised backward: was the order the same everywhere since the last comparison?

        Args:
            flats: Those with trainable parameters. Ignored parameters follow.

        Returns:
            Per parameter: 1 if any rank has a gradient of it.

        Raises:
            RankMismatchError: The order differs, or gradients of earlier backwards are there on some ranks only.

        Collective: one message on the control group.
        """
        schedule = self._schedule()
        groups = schedule.groups
        waiting = self.waiting(schedule.root, "order check at the end of backward")
        # Each rank divides its own shard, so a divisor that differs would show nowhere.
        value = schedule.order.hash ^ hash(schedule.divide_factor or 0.0)
        flags = bytearray().join(flat.gradient.flags() for flat in flats) + schedule.ignored.flags()
        merged = exchange(groups, ORDER, value, flags, waiting)
        if merged is None:
            self._report(groups, waiting)
        if (index := merged.translate(_IS_UNEQUAL).find(1)) >= 0:
            self._refuse_unequal(flats, index, merged[index], flags, waiting)
        if events.active is not None and groups.control is not None:
            events.active.emit("check", schedule.root.name, len(flags))
        schedule.order.restart_hash()
        return merged.translate(_IS_USED)

    def _refuse_unequal(
        self, flats: list[FlatParameter], index: int, merged: int, flags: bytearray, waiting: Waiting
    ) -> None:
        """Since the last comparison ranks have done other things to a parameter or its gradient."""
        groups = self._schedule().groups
        unequal = next(both for both in _UNEQUAL if merged & both == both)
        problem, expected, cure = _UNEQUAL[unequal]
        names = [name for flat in flats for name in flat.names] + self._schedule().ignored.names
        told = zip(groups.ranks, exchange_texts(groups, flags[index], waiting))
        found = [(rank, [text for flag, text in _WHAT_WAS_THERE.items() if own & flag & unequal]) for rank, own in told]
        raise RankMismatchError(
            problem,
            expected=expected,
            found="; ".join(f"rank {rank}: {', '.join(texts)}" for rank, texts in found if texts),
            parameter=names[index],
            rank=groups.rank,
            cure=cure,
        )

    def _trail(self) -> list[str]:
        schedule = self._schedule()
        return [self._describe(code) for code in schedule.order.recent] if schedule is not None else []

    def _describe(self, code: int) -> str:
        index, kind = Order.decode(code)
        return f"{KINDS[kind]} of unit {unit_label(self._schedule().units[index].name)}"

    def _report(self, groups: Groups, waiting: Waiting) -> None:
        """Ranks mean different things: exchange what each did since the last comparison, and raise everywhere."""
        schedule = self._schedule()
        own = [str(waiting), list(schedule.order.recent), self._unfinished(), schedule.divide_factor]
        texts, histories, unfinished, factors = zip(*exchange_texts(groups, own, waiting))
        differ = None
        for position in range(max(len(history) for history in histories)):
            codes = [history[position] if position < len(history) else None for history in histories]
            if len(set(codes)) > 1:
                differ = codes
                texts = [now if code is None else self._describe(code) for code, now in zip(codes, texts)]
                break
        found = "; ".join(f"rank {rank}: {text}" for rank, text in zip(groups.ranks, texts))
        if differ is None and len(set(factors)) > 1:
            raise RankMismatchError(
                "ranks divide gradients by different numbers",
                found="; ".join(
                    f"rank {rank}: {factor or 'the number of ranks'}" for rank, factor in zip(groups.ranks, factors)
                ),
                rank=groups.rank,
                cure="call set_gradient_divide_factor with the same number on every rank",
            )
        self._refuse_unequal_use(groups, differ or [], unfinished, found)
        raise RankMismatchError(
            f"ranks run different units in step {waiting.step}",
            expected="every rank runs the same units in the same order",
            found=found,
            unit=waiting.unit,
            rank=groups.rank,
            cure="remove what makes the order depend on the rank or its data; a unit that only some ranks need must "
            "run on all of them (its output may be multiplied by 0)",
        )

    def _unfinished(self) -> dict[str, list[str]]:
        """By unit, the first parameters that still lack a gradient in this backward, where others have theirs."""
        schedule = self._schedule()
        lacking: dict[str, list[str]] = {}
        for unit in schedule.units if schedule.in_backward else ():
            flats = [flat for flat in unit.flats if flat.trains]
            arrived = [(name, at) for flat in flats for name, at in zip(flat.names, flat.arrived_in)]
            missing = [name for name, at in arrived if at != schedule.backward_id]
            if 0 < len(missing) < len(arrived):
                lacking[str(unit.index)] = missing[:5]
        return lacking

    def _lacking(self) -> str:
        """The same in words, for a rank that is stuck: the others may have reduced such a unit."""
        schedule = self._schedule()
        return "".join(
            f", without a gradient of {', '.join(names)} of unit {unit_label(schedule.units[int(index)].name)}, which "
            "has others"
            for index, names in (self._unfinished() if schedule is not None else {}).items()
        )

    def _refuse_unequal_use(self, groups: Groups, codes: list, unfinished: tuple, found: str) -> None:
        """Some ranks have all gradients of a unit and others do not, because they used other parameters of it."""
        reduced = {Order.decode(code) for code in codes if code is not None}
        units = [str(index) for index, kind in reduced if kind == REDUCE]
        for rank, lacking in zip(groups.ranks, unfinished):
            for index in (index for index in units if index in lacking):
                names = lacking[index]
                unit = self._schedule().units[int(index)].name
                raise RankMismatchError(
                    f"ranks use different parameters of unit {unit_label(unit)}, which has units inside it or is called by "
                    "several calls of the model",
                    expected="each parameter of the unit used on all ranks, or on none",
                    found=f"rank {rank} has no gradient of {', '.join(names)}; {found}",
                    unit=unit,
                    parameter=names[0],
                    rank=groups.rank,
                    cure="use it on every rank (add its output times 0), or make the smallest module that holds "
                    "all such parameters a unit without units inside it: there ranks may use different ones",
                )
