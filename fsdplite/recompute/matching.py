"""Recomputation inside units: activations of a module are dropped in forward and computed again in backward.

The module becomes a subclass of its own class whose call goes through ``torch.utils.checkpoint`` (non-reentrant).
A unit's class is made on top of it, so the recomputation is inside the unit, where the weights are gathered
already: no extra gather. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, PolicyError
from ..policy import Policy
from ..structure import copy_structure
from .buffers import BuffersBefore
from .weights import WeightsBefore

__all__ = ["recompute_matching"]


class _Recomputed:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not passed on: a registry in the user's base class must not see the class made on the fly."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__.get("_fsdp_recompute") or not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        repeated = _Repeated(self, super().__call__, args, kwargs)
        return checkpoint(repeated, *repeated.tensors(), use_reentrant=False)


class _Place:
    """Where a tensor among the inputs goes."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Repeated:
    """A call of a module that ``checkpoint`` makes in forward, and again in backward.

    ``checkpoint`` is given the tensors, which it saves as autograd does. The structure around them is kept here, as
    it was before the first run: a module may write into a dict that it is given.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        self._function = function
        self._first: tuple[tuple, dict] | None = (args, kwargs)
        self._tensors: list[torch.Tensor] = []
        self._inputs = copy_structure((args, kwargs), self._place)
        self._buffers = BuffersBefore(module)
        self._weights = WeightsBefore(module)

    def _place(self, tensor: torch.Tensor) -> _Place:
        self._tensors.append(tensor)
        return _Place(len(self._tensors) - 1)

    def tensors(self) -> list[torch.Tensor]:
        """Of the inputs. To be asked once."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            output = self._function(*args, **kwargs)
            self._buffers.first_run_is_over()
            return output
        self._weights.prepare()
        args, kwargs = copy_structure(self._inputs, lambda place: tensors[place.index], of=_Place)
        with self._buffers.as_before():
            return self._function(*args, **kwargs)


_classes: dict[type, type] = {}


def recompute_matching(root: nn.Module, policy: Any) -> None:
    """Make every module that the policy matches recompute. Modules inside a recomputed one are left as they are."""
    if not isinstance(policy, Policy):
        raise ConfigError(
            "recompute takes a wrap policy", expected='for example by_class("Block"), or None', found=repr(policy)
        )
    policy = policy.bind(root)
    policy.check(list(root.named_modules()))
    covered: set[int] = set()
    found = False
    for name, module in root.named_modules():
        if id(module) in covered or not policy.matches(name, module):
            continue
        found = True
        covered.update(id(inner) for inner in module.modules())
        cls = type(module)
        if issubclass(cls, _Recomputed):
            continue
        if cls not in _classes:
            _classes[cls] = type(
                cls.__name__,
                (_Recomputed, cls),
                {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ()},
            )
        module.__class__ = _classes[cls]
        module.__dict__["_fsdp_recompute"] = True
    if not found:
        raise PolicyError(f"recompute={policy.describe()} matches nothing")
