"""Trainable parameters that no unit owns: left whole on every rank, their gradients averaged all the same."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .collectives import all_reduce
from .watchdog import Waiting

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["IgnoredGradients"]


class IgnoredGradients:
    """Keeps this backward's local gradients apart from what earlier ones have averaged, until the next reduction."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = weakref.ref(schedule)
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self._local: list[torch.Tensor | None] = []
        self._averaged: list[torch.Tensor | None] = []
        self._handles: list[Any] = []

    def add(self, name: str, parameter: nn.Parameter) -> None:
        index = len(self.parameters)
        self.parameters.append(parameter)
        self.names.append(name)
        self._local.append(None)
        self._averaged.append(None)
        ref = weakref.ref(self)

        def before(gradient: torch.Tensor) -> None:
            ignored = ref()
            if ignored is not None:
                ignored._averaged[index] = parameter_ref().grad
                parameter_ref().grad = None

        def after(leaf: torch.Tensor) -> None:
            ignored = ref()
            if ignored is not None:
                ignored._take(index, leaf)

        parameter_ref = weakref.ref(parameter)
        self._handles.append(parameter.register_hook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))

    def release(self) -> list[tuple[str, nn.Parameter]]:
        """Take the hooks off, for another schedule to add the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return list(zip(self.names, self.parameters))

    def _take(self, index: int, leaf: torch.Tensor) -> None:
        schedule = self._schedule()
        if schedule is None:
            return
        gradient = leaf.grad.detach()
        leaf.grad, self._averaged[index] = self._averaged[index], None
        if not schedule.in_backward:
            schedule.enter_backward()
        local = self._local[index]
        with torch.no_grad():
            self._local[index] = gradient if local is None else local + gradient

    def used(self) -> bytearray:
        """Per parameter: whether this rank has a local gradient."""
        return bytearray(int(local is not None) for local in self._local)

    def reduce(self, used: bytes | bytearray) -> None:
        """Average what any rank has. Collective: one all-reduce per used parameter over the whole mesh."""
        schedule = self._schedule()
        if not self.parameters or schedule is None:
            return
        groups = schedule.groups
        divisor = schedule.divide_factor or groups.size
        for index, flag in enumerate(used):
            if not flag:
                continue
            parameter = self.parameters[index]
            local, self._local[index] = self._local[index], None
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            total = torch.zeros_like(parameter, dtype=dtype) if local is None else local.to(dtype, copy=True)
            total = total.detach()
            if groups.whole is not None:
                all_reduce(
                    total,
                    groups.control if total.device.type == "cpu" else groups.whole,  # NCCL takes no CPU tensors
                    groups,
                    Waiting(self.names[index], "all-reduce of an ignored parameter's gradient", schedule.step),
                ).wait()
            total.div_(divisor)
            with torch.no_grad():
                total = total.to(parameter.dtype)
                parameter.grad = total if parameter.grad is None else parameter.grad + total

    def abandon(self) -> None:
        self._local = [None] * len(self._local)

    def copy_from(self, other: IgnoredGradients, memo: dict) -> None:
        for name, parameter in zip(other.names, other.parameters):
            twin: Any = memo.get(id(parameter))
            if twin is not None:
                self.add(name, twin)
