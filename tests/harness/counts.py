"""A counter of collectives that does not read the library's own trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
    "all_gather": "all_gather_list",
    "reduce_scatter": "reduce_scatter_list",
    "all_to_all": "all_to_all_list",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
# Which argument holds the elements that count: the full side, so that a unit's number is its padded size.
_FULL_SIDE = {"all_gather": 0, "reduce_scatter": 1, "all_to_all": 1}
_INTEGERS = (torch.uint8, torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class Collective:
    """One call: its kind, the elements of its full side, and their dtype."""

    kind: str
    elements: int
    dtype: torch.dtype


class Counts:
    """Context manager: `with Counts() as counts: ...`, then `counts.of("all_gather")`.

    Control messages (small integer tensors through `all_reduce`, `all_gather`, `broadcast`) go to `control`, everything
    else to `calls`, in order. `reductions` are the calls that sum gradients, by whichever collective: reduce-scatter,
    all-to-all or all-reduce of floating-point data.
    """

    def __init__(self) -> None:
        self.calls: list[Collective] = []
        self.control: list[Collective] = []
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> Counts:
        for name, kind in KINDS.items():
            original = getattr(dist, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(dist, name, self._counting(original, kind))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()

    def _counting(self, original: Any, kind: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._record(kind, [*args, *kwargs.values()])
            return original(*args, **kwargs)

        return counted

    def _record(self, kind: str, values: list[Any]) -> None:
        tensors = [value for value in values if isinstance(value, Tensor)]
        lists = [value for value in values if isinstance(value, list)]
        if kind in _FULL_SIDE and len(tensors) >= 2:
            # Output and input may be given by keyword in any order: the full side is the larger one.
            full = max(tensors[:2], key=lambda tensor: tensor.numel())
        else:
            full = tensors[0] if tensors else lists[0][0]
        call = Collective(kind, full.numel(), full.dtype)
        small_integers = full.dtype in _INTEGERS and full.numel() <= 4096
        control = small_integers and kind in ("all_reduce", "all_gather_list", "broadcast")
        (self.control if control else self.calls).append(call)

    def clear(self) -> None:
        """Forget what was counted so far."""
        self.calls.clear()
        self.control.clear()

    def of(self, *kinds: str) -> list[Collective]:
        """The data calls of these kinds, in order."""
        return [call for call in self.calls if call.kind in kinds]

    @property
    def gathers(self) -> list[int]:
        """Elements of each all-gather, in order."""
        return [call.elements for call in self.of("all_gather", "all_gather_list")]

    @property
    def reductions(self) -> list[int]:
        """Elements of each call that sums floating-point data over ranks, in order."""
        kinds = ("reduce_scatter", "reduce_scatter_list", "all_to_all", "all_to_all_list", "all_reduce", "reduce")
        return [call.elements for call in self.of(*kinds)]

    def by_kind(self) -> Counter[str]:
        """Number of data calls per kind."""
        return Counter(call.kind for call in self.calls)
