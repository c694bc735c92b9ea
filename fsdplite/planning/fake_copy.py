"""A model over fake tensors: the same modules, and no memory behind them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin

from ..errors import ConfigError
from ..structure import tensors_in

__all__ = ["fake_copy", "unregistered_tensors"]


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The same modules over fake tensors; the original and its memory are left alone."""
    memo: dict[int, Any] = {}
    with mode:
        for module in model.modules():
            for tensor in tensors_in(list(vars(module).values())):
                if isinstance(tensor, UninitializedTensorMixin) or id(tensor) in memo:
                    continue  # the former are refused by name when the model is partitioned
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
            cure="plan it without what copy.deepcopy cannot copy: locks, generators, open files",
        ) from failure
    del keep
    return twin


def unregistered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold beside parameters and buffers: tables, masks."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = [tensor for module in model.modules() for tensor in tensors_in(list(vars(module).values()))]
    return list({id(tensor): tensor for tensor in held if id(tensor) not in registered}.values())
