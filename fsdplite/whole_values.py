"""``load_state_dict`` of whole values into slices.

Every module that holds a sharded parameter cuts whole tensors into this rank's slices just before it copies them, after
its other hooks have renamed what they want renamed. So a state dict may enter at any module, unit or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import ConfigError
from .local_slice import LocalSlice, engine_access, info_of
from .parameter import ShardedParameter

__all__ = ["accept_whole_values", "prefixed_names"]

_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and of torch.compile


def accept_whole_values(module: nn.Module) -> None:
    """Let ``module`` load whole values of the parameters it holds itself."""
    if not any(hook.hook is _cut for hook in module._load_state_dict_pre_hooks.values()):
        module.register_load_state_dict_pre_hook(_cut)


def prefixed_names(module: nn.Module, state_dict: Any) -> ConfigError | None:
    """The error for a state dict that did not load, and is of a wrapper around such a module, else None."""
    names = [name for name in state_dict if isinstance(name, str)]
    prefix, rest = "", names
    while rest and (found := next((p for p in _PREFIXES if all(name.startswith(p) for name in rest)), None)):
        prefix, rest = prefix + found, [name.removeprefix(found) for name in rest]
    own = dict(module.named_parameters(remove_duplicate=False))
    if not prefix or not own.keys() & rest or own.keys() & names:
        return None
    return ConfigError(
        f"all names of the state dict begin with '{prefix}': it is that of a wrapper around the model",
        expected="the model's own names",
        found=f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
        cure=f'model.load_state_dict({{name.removeprefix("{prefix}"): value for name, value in state.items()}})',
    )


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
