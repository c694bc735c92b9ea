"""``optimizer.state`` of an offloaded optimizer: a mapping like any other optimizer's, whose tensors are elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ..parameter import as_local_slice, info_of

if TYPE_CHECKING:
    from .optimizer import OffloadedOptimizer

__all__ = ["StateView", "guarded"]


class StateView(MutableMapping):
    """Parameters to their states.

    A state that is kept in a file comes as a tensor that is mapped from it: reading it is reading the file, and it
    takes no memory of its own. What is assigned is copied to where it is kept.
    """

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer
        self.loose: dict[torch.Tensor, dict[str, Any]] = {}  # of parameters without a home, in memory
        self._filling: dict[tuple[int, str], torch.Tensor] = {}

    def _home(self, parameter: Any) -> tuple[Any, int]:
        info = info_of(parameter)
        home = self._optimizer.home_of(info.flat) if info is not None else None
        return (home, info.index) if home is not None and home.holds(info.index) else (None, -1)

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        home, index = self._home(parameter)
        if home is None:
            return self.loose[parameter]
        if not home.has_state(index):
            raise KeyError(parameter)
        return home.state_of(index)

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        home, index = self._home(parameter)
        if home is None:
            self.loose[parameter] = state
            return
        filled = set()
        for key, value in state.items():
            place = self._filling.pop((id(parameter), key), None)
            if place is not None and place is value:
                filled.add(key)
        home.set_state(index, state, filled)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        home, index = self._home(parameter)
        if home is None:
            del self.loose[parameter]
        elif home.has_state(index):
            home.drop_state(index)
        else:
            raise KeyError(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            home, index = self._home(parameter)
            if home.has_state(index) if home is not None else parameter in self.loose:
                yield parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def to_fill(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Where a loaded state may be written straight to; None if it has to be assigned."""
        home, index = self._home(parameter)
        if home is None or home.store.dtypes.get(key) != dtype:
            return None
        place = home.region(index, key)
        self._filling[id(parameter), key] = place
        return place


def guarded(state: dict[str, Any], info: Any) -> dict[str, Any]:
    """A state whose tensors refuse to be written to a file as if they were whole."""
    if info is None:
        return state
    return {
        key: as_local_slice(value, info) if isinstance(value, torch.Tensor) and value.dim() else value
        for key, value in state.items()
    }
