"""``optimizer.state`` of an offloaded optimizer: mappings like any other optimizer's, whose tensors are elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import OffloadError
from ..local_slice import LocalSlice, as_local_slice, engine_access, info_of
from .homes import Home
from .values import own_copy

if TYPE_CHECKING:
    from .optimizer import OffloadedOptimizer

__all__ = ["ParameterState", "StateView", "guarded"]


class ParameterState(MutableMapping):
    """The state of one parameter: what is read is what is kept now, and what is written is kept.

    A tensor with an element per element of the slice is a view of memory, or mapped from its file: reading it is
    reading the file, writing into it is writing the file, and it takes no memory of its own. A tensor that is assigned
    is copied to where it is kept. What ``pop`` and ``copy`` return are copies.
    """

    def __init__(self, home: Home, index: int) -> None:
        self._home = home
        self._index = index

    def __getitem__(self, key: str) -> Any:
        return self._home.value(self._index, key)

    def __setitem__(self, key: str, value: Any) -> None:
        with engine_access():
            self._home.set_value(self._index, key, _plain(value))

    def __delitem__(self, key: str) -> None:
        self._home.drop_value(self._index, key)

    def __iter__(self) -> Iterator[str]:
        return self._home.keys(self._index)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return any(key == own for own in self)

    def pop(self, key: str, *default: Any) -> Any:
        """Take a state out. A tensor is a copy in memory."""
        if key not in self and default:
            return default[0]
        value = own_copy(self[key])
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        key = list(self)[-1] if self else None
        return key, self.pop(key)  # KeyError where there is none

    def clear(self) -> None:
        self._home.drop_state(self._index)

    def copy(self) -> dict[str, Any]:
        """A dictionary of copies in memory."""
        return {key: own_copy(value) for key, value in self.items()}

    def __deepcopy__(self, memo: dict) -> dict[str, Any]:
        return self.copy()

    __copy__ = copy

    def __reduce_ex__(self, protocol: int) -> Any:
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        return repr(dict(self))


class StateView(MutableMapping):
    """Parameters to their states.

    Args:
        optimizer: Weak: it owns this object.
    """

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._ref = weakref.ref(optimizer)
        self.loose: dict[torch.Tensor, dict[str, Any]] = {}  # of parameters without a home, in memory
        self._filling: dict[tuple[int, str], torch.Tensor] = {}

    @property
    def _optimizer(self) -> OffloadedOptimizer:
        optimizer = self._ref()
        if optimizer is None:
            raise OffloadError("the optimizer whose state this was is gone", cure="keep it, or copy the state")
        return optimizer

    def _home(self, parameter: Any) -> tuple[Home | None, int]:
        info = info_of(parameter)
        home = self._optimizer.home_of(info.flat) if info is not None else None
        return (home, info.index) if home is not None and home.holds(info.index) else (None, -1)

    def __getitem__(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        home, index = self._home(parameter)
        return self.loose.setdefault(parameter, {}) if home is None else ParameterState(home, index)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """A parameter's state, or ``default`` if it has none."""
        return self[parameter] if parameter in self else default

    def __contains__(self, parameter: object) -> bool:
        home, index = self._home(parameter)
        return parameter in self.loose if home is None else home.has_state(index)

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        home, index = self._home(parameter)
        if home is None:
            self.loose[parameter] = state.copy() if isinstance(state, ParameterState) else state
            return
        filled = set()
        for key, value in state.items():
            place = self._filling.pop((id(parameter), key), None)
            if place is not None and place is value:
                filled.add(key)
        with engine_access():
            home.set_state(index, {key: _plain(value) for key, value in state.items()}, filled)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        home, index = self._home(parameter)
        if home is None:
            del self.loose[parameter]
        else:
            home.drop_state(index)

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        """Take a parameter's state out: a dictionary; of what is kept in a file it holds copies in memory."""
        if parameter not in self and default:
            return default[0]
        state = self[parameter]
        state = state.copy() if isinstance(state, ParameterState) else state
        del self[parameter]
        return state

    def clear(self) -> None:
        for parameter in list(self):
            del self[parameter]

    def replace(self, states: Any) -> None:
        """Take the place of all there is. ``states`` may hold states of this very view."""
        taken = {parameter: dict(state) for parameter, state in states.items()}
        self.clear()
        self.update(taken)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Parameters of the groups, then those that were taken out of them."""
        optimizer = self._optimizer
        grouped = (p for group in optimizer.param_groups for p in group["params"])
        housed = (user for home in optimizer.homes() for user in home.flat.users)
        seen: set[int] = set()
        for parameter in [*grouped, *housed, *self.loose]:
            if id(parameter) not in seen and parameter in self:
                seen.add(id(parameter))
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


def guarded(state: MutableMapping[str, Any], info: Any) -> dict[str, Any]:
    """A state whose tensors refuse to be written to a file as if they were whole."""
    if info is None:
        return dict(state)
    return {
        key: as_local_slice(value, info) if isinstance(value, torch.Tensor) and value.dim() else value
        for key, value in state.items()
    }


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, LocalSlice) else value
