"""Keeping torch.compile out of the engine's own frames.

A compiled model or block calls units, and tracing through a gather makes no sense: the graph has to break around a
unit's call and go on inside the user's forward. ``torch._dynamo.skip`` would do, but importing dynamo takes seconds,
so the same marks are set without it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import torch

__all__ = ["hide_from_dynamo"]


def hide_from_dynamo(package: str) -> None:
    """Mark every function in the loaded modules of ``package``: its frame is run as it is, never traced."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for function in _functions(package):
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = "part of a unit's gathers and reductions"
        function._torchdynamo_disable_recursive = False
        for code in _codes(function.__code__):
            frames.set_code_exec_strategy(code, skip)


def _functions(package: str) -> Iterator[types.FunctionType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != package or module is None:
            continue
        for value in list(vars(module).values()):
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            for member in members:
                member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                while isinstance(member, types.FunctionType):
                    if member.__module__.partition(".")[0] == package:
                        yield member
                    member = getattr(member, "__wrapped__", None)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
