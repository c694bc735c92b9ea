"""``load_state_dict`` of whole values into slices.

Every module that holds a sharded parameter cuts whole tensors into this rank's slices just before it copies them, after
its other hooks have renamed what they want renamed. So a state dict may enter at any module, unit or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .local_slice import LocalSlice, engine_access, info_of
from .parameter import ShardedParameter

__all__ = ["accept_whole_values"]


def accept_whole_values(module: nn.Module) -> None:
    """Let ``module`` load whole values of the parameters it holds itself."""
    if not any(hook.hook is _cut for hook in module._load_state_dict_pre_hooks.values()):
        module.register_load_state_dict_pre_hook(_cut)


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if type(parameter) is ShardedParameter and isinstance(value, torch.Tensor):
            state_dict[prefix + name] = _local_part(value, parameter)


def _local_part(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a whole value; what is no whole value is left to torch's own comparison of shapes."""
    info = info_of(parameter)
    with engine_access():
        if isinstance(value, LocalSlice):
            return value.as_subclass(torch.Tensor)
        if value.shape != info.full_shape:
            return value
        low, high = info.flat.layout.local_range(info.index, info.flat.groups.shard_rank)
        return value.detach().reshape(-1)[low:high].to(parameter.device)
