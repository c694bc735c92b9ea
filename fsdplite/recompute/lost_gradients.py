"""Reentrant checkpointing of inputs without gradients: found before the weights inside silently get none."""

from __future__ import annotations

import sys
import types

import torch

from ..errors import GradientError

__all__ = ["is_running_again", "refuse_lost_gradients"]


def refuse_lost_gradients(unit: str, parameter: str, rank: int) -> None:
    """Raise if the caller is reentrant checkpointing of inputs without gradients: the weights would get none.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the segment without gradients and joins the graph only
    through its inputs. Of segments inside each other the outermost decides: the inner ones run again, with gradients,
    when it does. Asked only by a unit that runs without gradients inside a forward that has them.
    """
    inputs = _inputs_of_outermost_segment(sys._getframe(1))
    if inputs is None or any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        return
    raise GradientError(
        "a recomputed segment would give its weights no gradients: none of its inputs needs one, and "
        "reentrant checkpointing reaches weights through its inputs only",
        unit=unit,
        parameter=parameter,
        rank=rank,
        cure="call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or use "
        "fsdp_wrap(..., recompute=policy)",
    )


def _inputs_of_outermost_segment(frame: types.FrameType | None) -> tuple | None:
    """What reentrant checkpointing was given, in the outermost of its forwards on the stack; None without one."""
    inputs = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("checkpoint.py") and code.co_name in ("forward", "backward"):
            if code.co_name == "backward":
                break  # that segment runs again by now: what is further out has been decided
            if "run_function" in frame.f_locals:
                inputs = frame.f_locals.get("args", ())
        frame = frame.f_back
    return inputs


def is_running_again() -> bool:
    """Whether a reentrant checkpoint on this stack runs its segment again. For the text of an error, not the hot path."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return True
        frame = frame.f_back
    return False
