"""``recompute="sqrt"`` and a byte budget: the blocks of a model are called in segments.

The modules become subclasses of their own classes whose call goes through the model's :class:`Plan`. Around a unit
the segment is outside: its second run gathers the unit, which then stays until its own backward, so a step has as
many collectives as without (and a segment's units are full at once).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..control import exchange_texts
from ..errors import ConfigError
from ..events import format_bytes
from ..flat_param import owner_of
from ..groups import Groups
from ..saved_weights import is_guard
from ..user_warning import warn_user
from ..watchdog import Waiting
from . import passes
from .budget import Cut, RecomputeWithin, cut_sqrt, cut_within, recompute_within
from .segment import Segment

__all__ = ["Plan", "as_segmented", "recompute_in_segments"]


def as_segmented(recompute: Any) -> Any:
    """``"sqrt"`` or a :class:`RecomputeWithin`; None if ``recompute`` is neither (a policy, say)."""
    if recompute == "sqrt" or isinstance(recompute, RecomputeWithin):
        return recompute
    if isinstance(recompute, tuple) and len(recompute) == 2 and recompute[0] == "auto":
        return recompute_within(recompute[1])
    if recompute == "auto":
        raise ConfigError('recompute="auto" needs a budget', cure='recompute=fsdp.recompute_within("2GiB")')
    if isinstance(recompute, str):
        raise ConfigError(
            "recompute takes a policy, a word or a budget",
            expected='by_class("Block"), "sqrt", or fsdp.recompute_within("2GiB")',
            found=repr(recompute),
        )
    return None


class _Segmented:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not passed on: a registry in the user's base class must not see the class made on the fly."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.__dict__.get("_fsdp_segments")
        if plan is None:  # a slice of a Sequential is an instance of the class and no block
            return super().__call__(*args, **kwargs)
        return plan.run(self, super().__call__, args, kwargs)


class Plan:
    """Which block calls of a forward form a segment. One per model.

    Args:
        choice: ``"sqrt"`` or a budget.
        block_count: Blocks in the model: the calls expected of the first forward.
        groups: Ranks that must cut alike.
    """

    def __init__(self, choice: Any, block_count: int, groups: Groups) -> None:
        self._choice = choice
        self._groups = groups
        self._expected = block_count
        self._cut = cut_sqrt(block_count)
        self._measured: tuple[int, int] | None = None  # bytes one block saves, bytes one segment keeps
        self._is_settled = choice == "sqrt"
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._pass = 0
        self._calls = 0
        self._index: int | None = None
        self._segment: Callable[[], Segment | None] = lambda: None  # weak: the graph keeps it alive
        self._is_inside = False
        self._saved_bytes: list[int] = []
        self._kept_bytes: list[int] = []

    @property
    def cut(self) -> Cut:
        return self._cut

    def run(self, module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call a block, as part of a segment where the forward trains."""
        if self._is_inside or not torch.is_grad_enabled() or not _may_hook():
            return function(*args, **kwargs)
        number = passes.number()
        if number == 0 or number != self._pass:
            self._begin_pass(number)
        index = self._cut.segment_of(self._calls, self._expected)
        self._calls += 1
        if index is None:
            return function(*args, **kwargs)
        segment = self._segment()
        if segment is None or index != self._index:
            self._close(segment)
            segment = Segment(None if self._is_settled else _is_weight)
            self._segment, self._index = weakref.ref(segment), index
        self._is_inside = True
        try:
            return segment.run(module, function, args, kwargs)
        finally:
            self._is_inside = False
            if not self._is_settled:
                self._measure(segment)

    def _begin_pass(self, number: int) -> None:
        """A new forward. Segments do not reach over it, and the cut may be another."""
        self._close(self._segment())
        if self._pass and self._calls > 1 and self._calls != self._expected:
            self._expected = self._calls
            if self._is_settled and self._choice == "sqrt":
                self._cut = cut_sqrt(self._calls)
        self._pass, self._calls, self._index = number, 0, None
        if not self._is_settled and self._saved_bytes:
            self._settle()

    def _close(self, segment: Segment | None) -> None:
        if segment is not None:
            segment.close()
        self._segment = lambda: None

    # ------------------------------------------------------------------ the budget

    def _measure(self, segment: Segment) -> None:
        if segment.saved_bytes:
            kept = segment.kept_bytes()
            saved = {key: count for key, count in segment.saved_bytes[-1].items() if key not in kept}
            self._saved_bytes.append(sum(saved.values()))
            if segment.call_count == 1:
                self._kept_bytes.append(sum(kept.values()))

    def _settle(self) -> None:
        """Cut by what the first forward has shown.

        Collective: one message on the control group; the next forward of the blocks is the same place on all ranks.
        """
        own = [max(self._saved_bytes), max(self._kept_bytes, default=0)]
        everyone = exchange_texts(self._groups, own, Waiting("", "agreement on what to recompute", 0))
        saved, kept = (max(values) for values in zip(*everyone))
        self._cut, peak = cut_within(self._choice.budget_bytes, self._expected, saved, kept)
        self._is_settled = True
        self._saved_bytes, self._kept_bytes = [], []
        if peak > self._choice.budget_bytes and self._groups.rank == self._groups.ranks[0]:
            warn_user(
                f"activations of the blocks need about {format_bytes(peak)} even when all are recomputed, more than "
                f"the budget of {format_bytes(self._choice.budget_bytes)}: one block saves {format_bytes(saved)}"
            )

    def __deepcopy__(self, memo: dict) -> Plan:
        twin = Plan.__new__(Plan)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._forget_pass()
        return twin


def _may_hook() -> bool:
    """Not inside a backward (somebody else recomputes), nor under saved-tensor hooks but those that guard weights.

    A segment of another plan around this block has hooks too: it numbers what its blocks save, and must see it all.
    """
    if torch._C._current_graph_task_id() != -1 or passes.is_replaying():
        return False
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is None or is_guard(top[0])


def _is_weight(tensor: torch.Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter) or owner_of(tensor) is not None


_classes: dict[type, type] = {}


def recompute_in_segments(choice: Any, blocks: list[tuple[str, nn.Module]], groups: Groups) -> Plan:
    """Make the blocks of a model run in segments. To be called when units have their classes."""
    plan = Plan(choice, len(blocks), groups)
    for _, module in blocks:
        cls = type(module)
        if not issubclass(cls, _Segmented):
            if cls not in _classes:
                names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
                _classes[cls] = type(cls.__name__, (_Segmented, cls), {**names, "__slots__": ()})
            module.__class__ = _classes[cls]
        module.__dict__["_fsdp_segments"] = plan
    return plan
