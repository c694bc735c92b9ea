"""What modules hold in place of a user's parameters: the sharded ones at rest, full leaves while a unit computes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .parameter import RestingLeaf

__all__ = ["Binding", "Location", "Replaced"]

# Where a parameter is held: a module or its dict of parameters (or a weak reference to the module), and the key.
Location = tuple[Any, str]


class Replaced(Exception):
    """A module holds something else than the user's parameter."""

    def __init__(self, index: int, found: Any) -> None:
        super().__init__(index)
        self.index = index
        self.found = found


class Binding:
    """Every place that holds one of the parameters of a flat parameter.

    The dicts of parameters are held strongly and modules weakly: saved graphs keep flat parameters alive, and must
    not keep modules (which may cache activations of those graphs).
    """

    def __init__(self, locations: Sequence[Sequence[Location]]) -> None:
        self._places = [
            (_place_of(holder, key), key, index) for index, held in enumerate(locations) for holder, key in held
        ]
        self._leaves: list[nn.Parameter] = []
        self._table: list[tuple[Any, str, nn.Parameter, nn.Parameter, int]] = []
        self.is_bound = False
        self._others: dict[int, nn.Parameter] = {}

    def connect(self, users: Sequence[nn.Parameter], leaves: Sequence[nn.Parameter]) -> None:
        """Build the table once: place, key, what rests there, what stands in for it."""
        # A fake tensor is no plain Parameter, and would not survive another class.
        self._leaves = [leaf for leaf in leaves if type(leaf) in (nn.Parameter, RestingLeaf)]
        self._table = [(place, key, users[i], leaves[i], i) for place, key, i in self._places]

    def bind_full(self) -> None:
        """Modules see the leaves. Raises :class:`Replaced` if one no longer holds the user's parameter."""
        if self.is_bound:
            return
        others = self._others
        for place, key, user, leaf, index in self._table:
            if type(place) is not dict:
                place = _Attributes(place)
            if place.get(key) is not user:
                if index in others and place.get(key) is others[index]:
                    continue
                found = place.get(key)
                self._put_users()
                raise Replaced(index, found)
            place[key] = leaf
        for leaf in self._leaves:
            leaf.__class__ = nn.Parameter
        self.is_bound = True

    def bind_users(self) -> None:
        """Modules hold the users' parameters again."""
        if self.is_bound:
            self._put_users()
            for leaf in self._leaves:
                leaf.__class__ = RestingLeaf
            self.is_bound = False

    def _put_users(self) -> None:
        others = self._others
        for place, key, user, leaf, index in self._table:
            if type(place) is not dict:
                place = _Attributes(place)
            if index not in others and (self.is_bound or place.get(key) is leaf):
                place[key] = user

    def show(self, replacements: dict[int, nn.Parameter]) -> None:
        """Modules see these instead until :meth:`hide`, also during and after calls in between (``full_params``)."""
        self._others.update(replacements)
        for place, key, _, _, index in self._table:
            if index in replacements:
                (place if type(place) is dict else _Attributes(place))[key] = replacements[index]

    def hide(self, indices: Iterable[int]) -> None:
        gone = {index for index in indices if self._others.pop(index, None) is not None}
        for place, key, user, leaf, index in self._table:
            if index in gone:
                (place if type(place) is dict else _Attributes(place))[key] = leaf if self.is_bound else user

    @property
    def shows_others(self) -> bool:
        """Whether ``full_params`` shows any of the parameters at the moment."""
        return bool(self._others)

    def shows(self, index: int) -> bool:
        """Whether modules see a whole tensor for parameter ``index`` at the moment."""
        return self.is_bound or index in self._others

    def shown(self, index: int) -> Any:
        """What modules hold for parameter ``index`` at the moment."""
        place, key = self.locations_of(index)[0]
        return (place if type(place) is dict else _Attributes(place)).get(key)

    def locations_of(self, index: int) -> list[Location]:
        return [(place, key) for place, key, i in self._places if i == index]

    def copy_for(self, memo: dict) -> Binding:
        """After a deep copy of modules: the copied places of the same parameters."""
        twin = Binding([])
        for place, key, index in self._places:
            found = memo.get(id(place)) if type(place) is dict else memo.get(id(place()))
            if found is not None:
                twin._places.append((found if type(place) is dict else weakref.ref(found), key, index))
        return twin


class _Attributes:
    """Writes through ``setattr`` where a module overrides it (RNNs keep a list of their weights beside the dict)."""

    def __init__(self, module: weakref.ref) -> None:
        self._module = module()

    def get(self, key: str) -> Any:
        return self._module._parameters.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._module, key, value)


def _place_of(holder: Any, key: str) -> Any:
    """A module's dict of parameters; a weak reference to the module if assigning to it does more, and can be done."""
    if not isinstance(holder, nn.Module):
        return holder  # a place already
    if type(holder).__setattr__ is not nn.Module.__setattr__:
        with contextlib.suppress(Exception):  # one that refuses to be written: what is in its dict is what it reads
            setattr(holder, key, holder._parameters[key])
            return weakref.ref(holder)
    return holder._parameters
