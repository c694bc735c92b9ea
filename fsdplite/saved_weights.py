"""Weights that autograd saved, when backward reaches them by a side door.

A unit is gathered for backward when a gradient reaches one of its outputs. A loss on a cached activation reaches
nodes inside the unit first; they would read freed memory. So weights saved for backward are tagged with the call
that saved them, and unpacking one gathers its unit if nobody has. Default saved-tensor hooks switch off autograd's
own check that a saved tensor was not changed in place, so it is done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .errors import ParameterUseError
from .flat_param import FlatParameter, owner_of

if TYPE_CHECKING:
    from .unit import Call

__all__ = ["guard_saved_weights", "stop_guarding"]


class _SavedWeight:
    __slots__ = ("call", "flat", "generation", "tensor")

    def __init__(self, tensor: torch.Tensor, flat: FlatParameter, call: Call) -> None:
        self.tensor = tensor
        self.flat = flat
        self.call = call
        self.generation = flat.generation


def _pack(tensor: torch.Tensor) -> Any:
    flat = owner_of(tensor)
    if not tensor.is_leaf:
        # A node that saves its own output would keep itself alive; autograd puts the edge back when it unpacks.
        tensor = tensor.detach()
    if flat is None:
        return tensor, tensor._version
    return _SavedWeight(tensor, flat, flat.unit.current_call())


def _unpack(saved: Any) -> torch.Tensor:
    if type(saved) is tuple:
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead. Hint: enable anomaly detection outside of a wrapped model to find the operation."
            )
        return tensor
    if type(saved) is not _SavedWeight:
        return saved
    flat = saved.flat
    if flat.generation != saved.generation:
        raise ParameterUseError(
            "a weight changed between the forward and the backward that needs its old value",
            unit=flat.unit_name,
            parameter=flat.names[0],
            rank=flat.groups.rank,
            cure="call backward() before optimizer.step(), or run the forward again after it",
        )
    if not flat.is_unsharded or flat.is_arriving:
        saved.call.reopen()
    return saved.tensor


def guard_saved_weights() -> bool:
    """Start tagging. False where somebody else's saved-tensor hooks are on top: they own what is saved.

    That is the case inside ``torch.utils.checkpoint``, which must see every saved tensor to drop it, and which
    runs the unit's forward again, gathering it, before a saved weight is needed.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    try:
        torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)
    except RuntimeError:  # torch.autograd.graph.disable_saved_tensors_hooks
        return False
    return True


def stop_guarding() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
