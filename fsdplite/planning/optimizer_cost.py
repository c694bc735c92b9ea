"""What an optimizer keeps per element and what its step needs for a moment: found by running it on small tensors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, did_you_mean
from ..optimizer_hooks import WHOLE_TENSOR_OPTIMIZERS
from .live_bytes import LiveBytes

__all__ = ["OptimizerCost", "measure_optimizer", "resolve_optimizer"]

_NUMEL = 4096


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes for parameters of one dtype.

    Attributes:
        state_per_element: Bytes kept per element (Adam in fp32: 8).
        state_per_parameter: Bytes kept per parameter whatever its size (a step counter).
        transient_per_element: Bytes that a step needs for a moment, per element of all parameters together.
        transient_of_one: The same, per element of the parameter that is updated.
        transient_of_last: The same, per element of the one before it: a loop's variables live until they are set again.
        traffic_per_element: Bytes that a step reads and writes, per element.
        operators: Operators of a step, however many parameters there are (those that take them all at once).
        operators_per_parameter: The others, per parameter.
    """

    state_per_element: float = 0.0
    state_per_parameter: float = 0.0
    transient_per_element: float = 0.0
    transient_of_one: float = 0.0
    transient_of_last: float = 0.0
    traffic_per_element: float = 0.0
    operators: float = 0.0
    operators_per_parameter: float = 0.0


def resolve_optimizer(optimizer: Any, device: str) -> tuple[str, Any]:
    """A name and a function from parameters to an optimizer.

    Args:
        optimizer: A class, the name of one in ``torch.optim``, a function from parameters to an optimizer, or None.
        device: ``"cuda"``: a class that has a ``foreach`` option uses it, as it does there by itself.
    """
    if optimizer is None:
        return "none", None
    if isinstance(optimizer, str):
        known = {
            name.lower(): value
            for name, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
        }
        usable = sorted(known.keys() - {refused.lower() for refused in WHOLE_TENSOR_OPTIMIZERS})
        if optimizer.lower() not in known:
            raise ConfigError(
                "there is no such optimizer",
                expected=f"a class, a function from parameters to an optimizer, or one of {', '.join(usable)}",
                found=repr(optimizer) + did_you_mean(optimizer.lower(), usable),
            )
        optimizer = known[optimizer.lower()]
    if not callable(optimizer):
        is_made = isinstance(optimizer, torch.optim.Optimizer)
        found = type(optimizer).__name__
        raise ConfigError(
            "optimizer is not something that makes one",
            expected="a class, a name in torch.optim, a function from parameters to an optimizer, or None",
            found=f"an {found} that is made already" if is_made else repr(optimizer),
            cure=f"lambda parameters: torch.optim.{found}(parameters, ...)" if is_made else None,
        )
    name = getattr(optimizer, "__name__", None) or getattr(getattr(optimizer, "func", None), "__name__", "a function")
    if isinstance(optimizer, type):
        _refuse_whole_tensors(optimizer)
        if device == "cuda" and "foreach" in inspect.signature(optimizer).parameters:
            cls = optimizer
            return name, lambda parameters: cls(parameters, foreach=True)
    return name, optimizer


def _refuse_whole_tensors(cls: type) -> None:
    refused = {base.__name__ for base in cls.__mro__} & WHOLE_TENSOR_OPTIMIZERS
    if refused:
        raise ConfigError(
            f"{sorted(refused)[0]} reads whole tensors, and each rank holds slices",
            cure="plan with an element-wise optimizer (SGD, Adam, AdamW, ...)",
        )


def measure_optimizer(make: Any, dtype: torch.dtype) -> OptimizerCost:
    """Run two steps on one small parameter, on three, and on five, and tell apart what grows with what."""
    if make is None:
        return OptimizerCost()
    one, three, five = (_two_steps(make, dtype, count) for count in (1, 3, 5))
    per_element = max(0.0, (five.peak - three.peak) / 2 / _NUMEL)
    of_one = max(0.0, one.peak / _NUMEL - per_element)
    operators_per_parameter = (five.operators - three.operators) / 2
    return OptimizerCost(
        state_per_element=three.state / _NUMEL,
        state_per_parameter=three.fixed,
        transient_per_element=per_element,
        transient_of_one=of_one,
        transient_of_last=max(0.0, three.peak / _NUMEL - 3 * per_element - of_one),
        traffic_per_element=five.traffic / 5 / _NUMEL,
        operators=max(0.0, three.operators - 3 * operators_per_parameter),
        operators_per_parameter=operators_per_parameter,
    )


@dataclass(frozen=True)
class _Steps:
    """Of one parameter: bytes of element-wise and of other state. Of all: what the second step took beside it."""

    state: int
    fixed: int
    peak: int
    traffic: int
    operators: int


@torch.enable_grad()
def _two_steps(make: Any, dtype: torch.dtype, count: int) -> _Steps:
    with torch.device("cpu"):
        parameters = [nn.Parameter(torch.zeros(_NUMEL, dtype=dtype)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.zeros(_NUMEL, dtype=dtype)
    live = LiveBytes()
    try:
        optimizer = make(parameters)
        _refuse_whole_tensors(type(optimizer))
        with live:
            optimizer.step()
            live.take()
            before = live.live
            optimizer.step()
    except ConfigError:
        raise
    except Exception as failure:
        raise ConfigError(
            "the optimizer cannot be tried on small tensors",
            found=f"{type(failure).__name__}: {failure}",
            cure="optimizer= is a class that needs nothing but parameters, or a function from parameters to an optimizer",
        ) from failure
    peak, _, traffic, operators = live.take()
    state = [value for value in optimizer.state.get(parameters[0], {}).values() if isinstance(value, torch.Tensor)]
    elementwise = sum(value.numel() * value.element_size() for value in state if value.numel() == _NUMEL)
    fixed = sum(value.numel() * value.element_size() for value in state if value.numel() != _NUMEL)
    return _Steps(elementwise, fixed, max(0, peak - before), traffic, operators)
