"""``plan.fits("80GiB")``: yes, or the cheapest changes that would make it fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DoesNotFitError, FSDPError, unit_label
from ..events import format_bytes
from ..recompute.budget import parse_bytes
from .changes import Change, Price, candidates, price

if TYPE_CHECKING:
    from .prediction import Plan

__all__ = ["Remedy", "check_fits"]

_LISTED = 5
_TOGETHER = 6


@dataclass(frozen=True)
class Remedy:
    """A change, or several together, and what they do.

    Attributes:
        text: The options to write.
        peak_bytes: With them.
        saved_bytes: Less than without.
        price: In computation, traffic and ranks.
        note: A price that is no number.
    """

    text: str
    peak_bytes: int
    saved_bytes: int
    price: Price
    note: str

    def __str__(self) -> str:
        cost = ", ".join(filter(None, [str(self.price), self.note])) or "no traffic or computation"
        saving = f"saves {format_bytes(self.saved_bytes)}, leaves {format_bytes(self.peak_bytes)}"
        return f"{self.text}: {saving}; costs {cost}"


def check_fits(plan: Plan, budget: Any) -> bool:
    """True, or an error with what would help.

    Raises:
        DoesNotFitError: Its ``remedies`` are the cheapest single changes that fit, or else one combination that does.
    """
    limit = parse_bytes(budget, "a memory budget")
    if plan.peak_bytes <= limit:
        return True
    tried = [(change, changed) for change in candidates(plan.question) if (changed := _try(plan, change)) is not None]
    single = [_remedy(plan, (change,), changed) for change, changed in tried if changed.peak_bytes <= limit]
    single.sort(key=lambda remedy: remedy.price.weight)
    remedies = single[:_LISTED]
    smallest = None
    if not remedies:
        together, smallest = _combine(plan, [change for change, _ in tried], limit)
        remedies = [together] if together is not None else []
    raise DoesNotFitError(
        f"the step needs {format_bytes(plan.peak_bytes)} and has {format_bytes(limit)}",
        expected=f"at most {limit:,} bytes",
        found=f"{plan.peak_bytes:,} bytes in {plan.peak_phase} at unit {unit_label(plan.peak_unit)}"
        + "".join(f"; {note}" for note in plan.notes),
        unit=plan.peak_unit,
        cure=_cure(remedies, smallest),
        remedies=tuple(remedies),
    )


def _cure(remedies: list[Remedy], smallest: Plan | None) -> str:
    if remedies:
        return "".join(f"\n    {remedy}" for remedy in remedies)
    assert smallest is not None
    return (
        f"no combination of options reaches it; the least found is {format_bytes(smallest.peak_bytes)}, in "
        f"{smallest.peak_phase} at unit {unit_label(smallest.peak_unit)}"
    )


def _try(plan: Plan, change: Change) -> Plan | None:
    """The changed plan; None if the change does nothing, saves nothing or cannot be made."""
    try:
        question = change.apply(plan.question)
        changed = plan.answer(question) if question is not None else None
    except FSDPError:
        return None
    return changed if changed is not None and changed.peak_bytes < plan.peak_bytes else None


def _combine(plan: Plan, changes: list[Change], limit: int) -> tuple[Remedy | None, Plan]:
    """Take the change that saves most for its price, again and again; then drop what turns out not to be needed."""
    chosen: list[Change] = []
    current = plan
    while current.peak_bytes > limit and len(chosen) < _TOGETHER:
        options = []
        for change in changes:
            if change not in chosen and (changed := _try(current, change)) is not None:
                saved = current.peak_bytes - changed.peak_bytes
                options.append((saved / (0.01 + max(0.0, price(current, changed).weight)), change, changed))
        if not options:
            return None, current
        _, change, current = max(options, key=lambda option: option[0])
        chosen.append(change)
    if current.peak_bytes > limit:
        return None, current
    for change in list(chosen):
        rest = [other for other in chosen if other is not change]
        without = _apply_all(plan, rest)
        if without is not None and without.peak_bytes <= limit:
            chosen, current = rest, without
    return _remedy(plan, tuple(chosen), current), current


def _apply_all(plan: Plan, changes: list[Change]) -> Plan | None:
    question = plan.question
    for change in changes:
        question = change.apply(question) or question
    try:
        return plan.answer(question)
    except FSDPError:
        return None


def _remedy(plan: Plan, changes: tuple[Change, ...], changed: Plan) -> Remedy:
    return Remedy(
        text=", ".join(change.text for change in changes),
        peak_bytes=changed.peak_bytes,
        saved_bytes=plan.peak_bytes - changed.peak_bytes,
        price=price(plan, changed),
        note=", ".join(change.note for change in changes if change.note),
    )
