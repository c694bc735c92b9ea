"""Weights that autograd saved, when backward reaches them by a side door.

A unit is gathered for backward when a gradient reaches one of its outputs. A loss on a cached activation reaches
nodes inside the unit first; they would read freed memory. So weights saved for backward are tagged with the call
that saved them, and unpacking one gathers its unit if nobody has. Default saved-tensor hooks switch off autograd's
own check that a saved tensor was not changed in place, so it is done here.
"""

from __future__ import annotations

from typing import Any

import torch

from .flat_param import OWNERS

__all__ = ["guard_saved_weights", "is_guard", "refuses_guard", "stop_guarding"]

_DISABLE = torch.autograd.graph.disable_saved_tensors_hooks.__wrapped__.__code__  # type: ignore[attr-defined]


def _pack(tensor: torch.Tensor) -> Any:
    """A tensor and its version; for a gathered weight, its flat parameter, call and generation instead.

    Called for every tensor that autograd saves, so tuples and no further calls.
    """
    try:
        ref = OWNERS.get(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        ref = None
    if not tensor.is_leaf:
        # A node that saves its own output would keep itself alive; autograd puts the edge back when it unpacks.
        tensor = tensor.detach()
    if ref is None or (flat := ref()) is None:
        return tensor, tensor._version
    return tensor, flat, flat.unit.current_call(), flat.generation


def _unpack(saved: Any) -> torch.Tensor:
    if len(saved) == 2:
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead. Hint: enable anomaly detection outside of a wrapped model to find the operation."
            )
        return tensor
    tensor, flat, call, generation = saved
    if flat.generation != generation:
        raise flat.changed("needs its old value")
    if not flat.is_unsharded or flat.is_arriving:
        call.reopen()
    return tensor


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


def is_guard(hook: Any) -> bool:
    """Whether a saved-tensor hook is the one that tags weights here."""
    return hook is _pack


def refuses_guard(failure: BaseException) -> bool:
    """Whether an exception came of switching saved-tensor hooks off (``torch.func.grad`` does) while these are on."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is _DISABLE


def stop_guarding() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
