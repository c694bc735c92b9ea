"""An optimizer's state and parameter groups by the names of their parameters.

A state that has one element per parameter element is a tensor of the checkpoint, stored and resharded as its
parameter is. Everything else (step counters, settings) is small, the same on all ranks, and stands in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError
from ..local_slice import engine_access
from .manifest import split_state_name, state_name
from .model_state import ModelState, ModelTensor
from .tensor_bytes import dtype_name, flat_view, odd_kind
from .values import decode_value, encode_value, scalar_json, scalar_tensor

__all__ = ["OptimizerState", "check_optimizer", "collect", "decode_settings"]

# Scalars of torch's optimizers: beside a parameter of shape () nothing else tells them from a moment.
_SCALARS = {"step", "mu_product", "eta", "mu"}
_NOT_SETTINGS = {"params", "param_names"}


@dataclass
class OptimizerState:
    """What a checkpoint holds of an optimizer.

    Attributes:
        kind: Its class's name.
        groups: Per parameter group its members' names and its settings, as JSON.
        scalars: Per parameter and key, as JSON.
        sharded: Per parameter and key the dtype of the whole.
        local: This rank's part of each of those.
    """

    kind: str
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    sharded: dict[str, dict[str, str]] = field(default_factory=dict)
    local: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def section(self) -> dict[str, Any]:
        """For the manifest."""
        return {"class": self.kind, "groups": self.groups, "scalars": self.scalars}


def check_optimizer(optimizer: Any) -> None:
    """Raise unless it has what an optimizer has."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise ConfigError(
            "argument 'optimizer' is not an optimizer",
            expected="an object with param_groups and state, or None",
            found=f"a {type(optimizer).__name__}",
            cure="one optimizer with several parameter groups can hold what several optimizers do"
            if isinstance(optimizer, (list, tuple, dict))
            else None,
        )


def collect(optimizer: Any, model: ModelState, left_out: set[str]) -> OptimizerState:
    """Read ``optimizer``: no step, no hook, nothing created."""
    check_optimizer(optimizer)
    if not getattr(optimizer, "is_whole", True):
        raise CheckpointError(
            "the optimizer's state is not whole: a step failed after some parameters were updated and others not",
            cure="load a checkpoint into the model and this optimizer, or save the model without it",
        )
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise CheckpointError(
                f"state[{key!r}] of the optimizer belongs to no parameter, and would not be stored",
                cure="keep it in a parameter group, or take it out and pass it in extra=",
            )
    known = {entry.name for entry in model.tensors}
    result = OptimizerState(type(optimizer).__name__)
    for number, group in enumerate(optimizer.param_groups):
        members = [member_of(model, p, number) for p in group["params"]]
        tensors: dict[str, torch.Tensor] = {}
        settings = {
            key: encode_value(value, f"parameter group {number}[{key!r}]", tensors)
            for key, value in group.items()
            if key not in _NOT_SETTINGS
        }
        result.groups.append(
            {
                "members": [m.name for m in members if m.name not in left_out],
                "settings": settings,
                "tensors": {name: scalar_json(t, f"parameter group {number}") for name, t in tensors.items()},
            }
        )
        for member in members:
            state = optimizer.state.get(member.tensor)
            if state and member.name not in left_out:
                _check_keys(member.name, state, known)
                _collect_state(result, member, state)
    return result


def member_of(model: ModelState, parameter: torch.Tensor, group: int) -> ModelTensor:
    """Which of the model's parameters an optimizer's is."""
    member = model.by_id.get(id(parameter))
    if member is None:
        raise CheckpointError(
            f"parameter group {group} of the optimizer holds a parameter that is not in the model",
            found=f"shape {tuple(parameter.shape)}",
            cure="pass the model that the optimizer was built for",
        )
    return member


def _check_keys(name: str, state: Iterable[Any], known: set[str]) -> None:
    """Raise if a key of a parameter's state and its name together read as another parameter's."""
    for key in state:
        if isinstance(key, str) and split_state_name(state_name(name, key), known) != (name, key):
            raise CheckpointError(
                f"optimizer state '{key}' of '{name}' would have the name of another parameter's state",
                found=state_name(name, key),
                parameter=name,
                cure="use keys without slashes",
            )


def _collect_state(result: OptimizerState, member: ModelTensor, state: dict[str, Any]) -> None:
    name = member.name
    with engine_access():
        local_shape = torch.Size(member.tensor.shape)
    for key, value in state.items():
        where = f"optimizer state '{key}' of '{name}'"
        if not isinstance(key, str):
            raise CheckpointError(f"{where} has a key that is not text", found=type(key).__name__)
        if not isinstance(value, torch.Tensor):
            tensors: dict[str, torch.Tensor] = {}
            encoded = {"value": encode_value(value, where, tensors)}
            if tensors:
                raise CheckpointError(
                    f"{where} holds tensors inside a container", expected="a tensor, or plain values", parameter=name
                )
            result.scalars.setdefault(name, {})[key] = encoded
            continue
        if kind := odd_kind(value):
            raise CheckpointError(
                f"{where} cannot be stored", expected="an ordinary tensor", found=kind, parameter=name
            )
        with engine_access():
            is_moment = value.shape == local_shape and not (value.dim() == 0 and key in _SCALARS) and key != "step"
        if is_moment:
            result.sharded.setdefault(name, {})[key] = dtype_name(value.dtype, where)
            result.local.setdefault(name, {})[key] = flat_view(value)
        elif value.numel() == 1:
            result.scalars.setdefault(name, {})[key] = {"tensor": scalar_json(value, where)}
        else:
            raise CheckpointError(
                f"{where} cannot be stored: it has neither its parameter's elements nor a single one",
                expected=f"shape {tuple(local_shape)} (this rank's slice) or ()",
                found=f"shape {tuple(value.shape)}",
                parameter=name,
                cure="use an optimizer whose state is element-wise (SGD, Adam, AdamW, RMSprop, Lion, ...)",
            )


def decode_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A saved group's settings, tensors and tuples included. Its members are not among them, whatever it says."""
    tensors = {name: scalar_tensor(entry, "a parameter group's tensor") for name, entry in group["tensors"].items()}
    return {
        key: decode_value(value, tensors, f"parameter group's [{key!r}]")
        for key, value in group["settings"].items()
        if key not in _NOT_SETTINGS
    }
