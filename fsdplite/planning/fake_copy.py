"""A model over fake tensors: the same modules, and no memory behind them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin

from ..errors import ConfigError

__all__ = ["fake_copy"]


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The same modules over fake tensors; the original and its memory are left alone."""
    memo: dict[int, Any] = {}
    with mode:
        for module in model.modules():
            holders = (module._parameters, module._buffers, vars(module))
            for tensor in (value for holder in holders for value in holder.values()):
                if isinstance(tensor, UninitializedTensorMixin):
                    continue  # refused by name when the model is partitioned
                if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    memo[id(tensor)] = fake
    keep = list(memo.values())  # deepcopy reads the memo by identity
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as failure:
        raise ConfigError(
            "the model cannot be copied for planning",
            found=f"{type(failure).__name__}: {failure}",
            cure="pass a function that builds it: fsdp.plan(lambda: Model(...), ...)",
        ) from failure
    del keep
    return twin
