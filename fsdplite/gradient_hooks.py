"""Hooks on gradients: the engine's on full-size leaves, and the users' that wait for the reduction."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .local_slice import engine_access, read_grad, write_grad

if TYPE_CHECKING:
    from .flat_param import FlatParameter

__all__ = ["PostAccumulateHooks", "leaf_hook"]

Hook = Callable[[torch.Tensor], None]


def leaf_hook(ref: weakref.ref[FlatParameter], index: int) -> Hook:
    """What autograd calls when a leaf's gradient is complete: the unit takes it, and the leaf has none again.

    Weak, or the leaf would keep its owner alive.
    """

    def on_gradient(leaf: torch.Tensor) -> None:
        if type(leaf) is nn.Parameter:
            gradient = read_grad(leaf)
            write_grad(leaf, None)
        else:
            with engine_access():  # a late gradient finds the leaf at rest
                gradient = read_grad(leaf)
                write_grad(leaf, None)
        flat = ref()
        if flat is not None and gradient is not None:
            flat.unit.on_gradient(flat, index, gradient)

    return on_gradient


class PostAccumulateHooks:
    """The users' post-accumulate hooks, by the index of their parameter. They fire once, after the reduction.

    Those of one parameter are in a dict as torch keeps them, so handles from before wrapping go on working.
    """

    def __init__(self, hooks: dict[int, dict[int, Hook]] | None = None) -> None:
        self._hooks = hooks or {}

    def add(self, index: int, hook: Hook) -> RemovableHandle:
        """Register a hook; the handle's ``remove()`` takes it back."""
        of_one = self._hooks.setdefault(index, OrderedDict())
        handle = RemovableHandle(of_one)
        of_one[handle.id] = hook
        return handle

    def adopt(self, index: int, hooks: dict[int, Hook]) -> None:
        """Take over what torch held for a parameter."""
        self._hooks[index] = hooks

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    def run(self, indices: Iterable[int], users: list[nn.Parameter]) -> None:
        if self._hooks:
            for index in indices:
                for hook in list(self._hooks.get(index, {}).values()):
                    hook(users[index])

    def copy(self) -> PostAccumulateHooks:
        return PostAccumulateHooks({index: OrderedDict(of_one) for index, of_one in self._hooks.items()})

    def of(self, members: Iterable[int]) -> PostAccumulateHooks:
        """Those of some parameters, numbered anew; the same dicts."""
        return PostAccumulateHooks({new: self._hooks[old] for new, old in enumerate(members) if old in self._hooks})
