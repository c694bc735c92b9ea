"""One warning for numbers that a hand-written reduction takes of one rank's part of a gradient.

``(p.grad ** 2).sum()`` is right of a slice that is meant to be one, so it is no error. Most often it is the norm of the
gradient, written as for a plain model, and then it is another number on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from .local_slice import COPIES, NORMS, engine_access
from .user_warning import warn_user

__all__ = ["GradientPart", "part_of", "watch_reduction"]

_REDUCTIONS = {
    "sum", "nansum", "mean", "nanmean", "max", "min", "amax", "amin", "std", "var", "prod", "median", "nanmedian",
}  # fmt: skip
_PRODUCTS = {"dot", "vdot", "inner", "matmul"}
_ARITHMETIC = {
    "pow", "square", "mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative",
    "__rsub__", "__rdiv__", "cat", "concat", "concatenate", "hstack", "stack",
}  # fmt: skip
_warned = False


class GradientPart(torch.Tensor):
    """What arithmetic made of a sharded gradient: a plain tensor, which only remembers the gradient for the warning.

    ``_fsdp_ref`` and ``_fsdp_index`` are the gradient's. No more are made once the warning was given.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not GradientPart for kind in types):  # the others see what they would see without this class
            return func(*_as_plain(args), **_as_plain(kwargs))
        name = getattr(func, "__name__", "")
        with engine_access():
            result = func(*args, **kwargs)
        watch_reduction(name, args, kwargs, result, NORMS)
        if name in COPIES and type(result) is torch.Tensor and args and isinstance(args[0], GradientPart):
            return _as_part(result, args[0])  # also later: nn.Parameter asks for the same class
        return result

    def __reduce_ex__(self, protocol: int) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        memo[id(self)] = copied = _plain(self).clone()
        return copied


def part_of(result: Any, args: tuple, name: str) -> Any:
    """``result``, watched if it is a new tensor that arithmetic made of a split gradient among ``args``."""
    if _warned or name not in _ARITHMETIC or type(result) is not torch.Tensor or not result.is_floating_point():
        return result
    source = next((value for value in _sources(args) if _is_split(value)), None)
    return result if source is None else _as_part(result, source)


def _as_part(result: torch.Tensor, source: Any) -> GradientPart:
    part = result.as_subclass(GradientPart)
    part._fsdp_ref, part._fsdp_index = source._fsdp_ref, source._fsdp_index
    return part


def watch_reduction(name: str, args: tuple, kwargs: dict, result: Any, others: Any = ()) -> None:
    """Warn, once in a process, if ``result`` is one number for all of this rank's part of a gradient.

    Args:
        name: Of the function that returned ``result`` for ``args`` and ``kwargs``.
        others: Names of further functions that reduce.
    """
    global _warned
    if _warned or not (name in _REDUCTIONS or name in _PRODUCTS or name in others):
        return
    if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.dim():
        return
    if name in _REDUCTIONS and (kwargs.get("dim", kwargs.get("axis")) is not None or _has_more(args)):
        return
    source = next((value for value in _sources(args) if _is_split(value)), None)
    if source is None or _is_called_by_the_package():
        return
    _warned = True
    flat, index = source._fsdp_ref(), source._fsdp_index
    low, high = flat.layout.local_range(index, flat.groups.shard_rank)
    warn_user(
        f"'{name}' of the gradient of parameter '{flat.names[index]}' is the number of this rank's part of it "
        f"({high - low} of {flat.layout.slots[index].numel} elements), and another one on each rank: for the norm over all "
        "ranks use model.clip_grad_norm_(max_norm), for one whole gradient fsdp.full_grad(model, name). If the part is "
        "what you mean, nothing is wrong (this is said once)"
    )


def _has_more(args: tuple) -> bool:
    """Whether a dimension or another tensor is given; ``std(False)`` gives neither."""
    return len(args) > 1 and not (len(args) == 2 and isinstance(args[1], bool))


def _sources(args: Any) -> Iterator[Any]:
    for value in args:
        if isinstance(value, torch.Tensor):
            if "_fsdp_ref" in value.__dict__:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _sources(value)


def _is_split(source: Any) -> bool:
    flat = source._fsdp_ref()
    if flat is None or flat.groups.shard_size == 1:
        return False
    low, high = flat.layout.local_range(source._fsdp_index, flat.groups.shard_rank)
    return high - low != flat.layout.slots[source._fsdp_index].numel


def _is_called_by_the_package() -> bool:
    """Whether the nearest caller outside of torch is the package, above the handler of the operation."""
    frame, here = sys._getframe(3), __package__
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == here


def _plain(part: GradientPart) -> torch.Tensor:
    with engine_access():
        return part.as_subclass(torch.Tensor)


def _as_plain(value: Any) -> Any:
    if isinstance(value, GradientPart):
        return _plain(value)
    if isinstance(value, dict):
        return {key: _as_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_as_plain, value))
    return value
