"""Recomputation inside units: activations of a module are dropped in forward and computed again in backward.

The module becomes a subclass of its own class whose call goes through ``torch.utils.checkpoint`` (non-reentrant).
A unit's class is made on top of it, so the recomputation is inside the unit, where the weights are gathered
already: no extra gather. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, GradientError, PolicyError
from ..policy import Policy
from .buffers import BuffersBefore

__all__ = ["recompute_matching", "refuse_lost_gradients"]


class _Recomputed:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not passed on: a registry in the user's base class must not see the class made on the fly."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__.get("_fsdp_recompute") or not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        # Bound first: the module's keywords may have the names of checkpoint's own options.
        function = functools.partial(super().__call__, **kwargs)
        return checkpoint(_Repeated(self, function), *args, use_reentrant=False)


class _Repeated:
    """A call of a module that ``checkpoint`` makes in forward, and again in backward."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._function = function
        self._buffers = BuffersBefore(module)
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        if self._has_run:
            with self._buffers.as_before():
                return self._function(*args)
        output = self._function(*args)
        self._buffers.first_run_is_over()
        self._has_run = True
        return output


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


def refuse_lost_gradients(unit: str, parameter: str, rank: int) -> None:
    """Raise if the caller is reentrant checkpointing of inputs without gradients: the weights would get none.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the segment without gradients and joins the graph only
    through its inputs. Asked only by a unit that runs without gradients inside a forward that has them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.endswith("checkpoint.py") and "run_function" in frame.f_locals:
            inputs = frame.f_locals.get("args", ())
            if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
                raise GradientError(
                    "a recomputed segment would give its weights no gradients: none of its inputs needs one, and "
                    "reentrant checkpointing reaches weights through its inputs only",
                    unit=unit,
                    parameter=parameter,
                    rank=rank,
                    cure="call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or use "
                    "fsdp_wrap(..., recompute=policy)",
                )
        frame = frame.f_back
