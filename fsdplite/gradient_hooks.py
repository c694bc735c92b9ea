"""Hooks on gradients: the engine's on full-size leaves, and the users' that wait for the reduction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

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
    """The users' post-accumulate hooks, by the index of their parameter. They fire once, after the reduction."""

    def __init__(self, hooks: dict[int, list[Hook]] | None = None) -> None:
        self._hooks = {index: list(of_one) for index, of_one in (hooks or {}).items()}

    def add(self, index: int, hook: Hook) -> Removable:
        """Register a hook; the handle's ``remove()`` takes it back."""
        of_one = self._hooks.setdefault(index, [])
        of_one.append(hook)
        return Removable(of_one, hook)

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    def run(self, indices: Iterable[int], users: list[nn.Parameter]) -> None:
        if self._hooks:
            for index in indices:
                for hook in list(self._hooks.get(index, ())):
                    hook(users[index])

    def copy(self) -> PostAccumulateHooks:
        return PostAccumulateHooks(self._hooks)


class Removable:
    """Handle with ``remove()``, as torch's hook registrations return."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks = hooks
        self._hook = hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)
