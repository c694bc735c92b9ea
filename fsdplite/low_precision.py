"""Modules that stay in fp32 inside a low precision unit: which they are, and the casts at their borders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .precision import Precision
from .structure import map_tensors

__all__ = ["kept_modules", "keep_in_fp32"]


def kept_modules(root: nn.Module, precision: Precision) -> tuple[set[int], list[nn.Module]]:
    """Identities of all modules that stay fp32, and the outermost ones among them, at whose borders casts happen."""
    kept: set[int] = set()
    outermost = []
    for name, module in root.named_modules():
        if id(module) in kept:
            continue
        if precision.keeps(name, module):
            outermost.append(module)
            kept.update(id(inner) for inner in module.modules())
    return kept, outermost


def keep_in_fp32(module: nn.Module, low_dtype: torch.dtype) -> None:
    """Inputs arrive in fp32, and what the module hands on is in the unit's dtype again."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == low_dtype else tensor

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(low_dtype) if tensor.dtype == torch.float32 else tensor

    def before(_: nn.Module, args: tuple, kwargs: dict) -> Any:
        return tuple(map_tensors(widen, arg) for arg in args), {k: map_tensors(widen, v) for k, v in kwargs.items()}

    def after(_: nn.Module, __: tuple, output: Any) -> Any:
        return map_tensors(narrow, output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
