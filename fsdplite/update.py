"""Telling the engine about writes that it cannot see."""

from __future__ import annotations

from torch import nn

from .arguments import expect_module
from .errors import FSDPError
from .fsdp_unit import state_of
from .keywords import known_keywords

__all__ = ["mark_updated"]


@known_keywords
def mark_updated(model: nn.Module) -> None:
    """Say that parameters were written through ``.data``: what was gathered from them is gathered again.

    Optimizers, in-place updates of the parameters themselves, ``load_state_dict`` and ``full_params`` need no such
    call. Every rank must make it alike.
    """
    expect_module(model, "fsdp.mark_updated(model)")
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    if not states:
        raise FSDPError("no module here is wrapped", cure="call mark_updated on a wrapped model")
    for state in states:
        for flat in state.flats:
            flat.mark_updated()
