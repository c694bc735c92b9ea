"""Trainable parameters that no unit owns: left whole on every rank, their gradients averaged all the same."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import events
from .collectives import all_reduce
from .errors import GradientError
from .gradient_buffer import HAD, LACKED, USED
from .watchdog import Waiting

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["IgnoredGradients"]


class IgnoredGradients:
    """Keeps this backward's local gradients apart from what earlier ones have averaged, until the next reduction.

    After an unsynchronised backward ``.grad`` shows the local gradient, if nothing was there; ``zero_grad`` drops it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = weakref.ref(schedule)
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self._local: list[torch.Tensor | None] = []
        self._averaged: list[torch.Tensor | None] = []
        self._handles: list[list[Any]] = []

    def add(self, name: str, parameter: nn.Parameter) -> None:
        parameter._fsdp_ignored = (self, len(self.parameters))
        self.parameters.append(parameter)
        self.names.append(name)
        self._local.append(None)
        self._averaged.append(None)
        self._handles.append([])

    def follow_requires_grad(self) -> None:
        """Hook what trains now; a parameter may be unfrozen after wrapping."""
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad and not self._handles[index]:
                before, after = _hooks(weakref.ref(self), index)
                self._handles[index] = [
                    parameter.register_hook(before),
                    parameter.register_post_accumulate_grad_hook(after),
                ]

    def release(self) -> list[tuple[str, nn.Parameter]]:
        """Take the hooks off, for another schedule to add the parameters."""
        for handles in self._handles:
            for handle in handles:
                handle.remove()
            handles.clear()
        return list(zip(self.names, self.parameters))

    def set_aside(self, index: int) -> None:
        """A gradient is about to be accumulated: keep apart what was averaged before."""
        gradient = self.parameters[index].grad
        local = self._local[index]
        if local is not None and gradient is None:
            self._local[index] = None  # zero_grad dropped it
        self._averaged[index] = None if gradient is local else gradient
        self.parameters[index].grad = None

    def take(self, index: int) -> None:
        """A local gradient is complete."""
        schedule = self._schedule()
        parameter = self.parameters[index]
        gradient = parameter.grad.detach()
        parameter.grad, self._averaged[index] = self._averaged[index], None
        if schedule is None:
            return
        if not schedule.in_backward:
            schedule.enter_backward()
        local = self._local[index]
        with torch.no_grad():
            self._local[index] = gradient if local is None else local + gradient

    def flags(self) -> bytearray:
        """Per parameter: whether this rank has a local gradient, and an averaged one of earlier backwards."""
        return bytearray(
            (USED if local is not None else 0) | (LACKED if p.grad is None or p.grad is local else HAD)
            for p, local in zip(self.parameters, self._local)
        )

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
            if parameter.grad is local:
                parameter.grad = None
            if groups.whole is not None:
                if events.active is not None:
                    size = total.numel() * total.element_size()
                    events.active.emit("all_reduce", schedule.root.name, size, total.numel())
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

    def bind_pending(self) -> None:
        """After an unsynchronised backward."""
        for parameter, local in zip(self.parameters, self._local):
            if local is not None and parameter.grad is None:
                parameter.grad = local

    def refuse_pending(self, index: int) -> None:
        """Raise if the parameter's gradient waits for a synchronised backward."""
        if self._local[index] is not None and self.parameters[index].grad is None:
            self._local[index] = None  # zero_grad dropped it
        if self._local[index] is not None:
            raise GradientError(
                "an ignored parameter's gradient is not averaged yet: the last backward ran without synchronisation",
                parameter=self.names[index],
                cure="run the last micro-batch outside no_sync(), or drop the gradients with zero_grad()",
            )

    def abandon(self) -> None:
        self._local = [None] * len(self._local)

    def copy_from(self, other: IgnoredGradients, memo: dict) -> None:
        for name, parameter in zip(other.names, other.parameters):
            twin: Any = memo.get(id(parameter))
            if twin is not None:
                self.add(name, twin)

    def __deepcopy__(self, memo: dict) -> IgnoredGradients:
        return self  # the copied schedule makes its own; a parameter copied without one is an ordinary parameter


def _hooks(ref: weakref.ref, index: int) -> tuple[Any, Any]:
    def before(gradient: torch.Tensor) -> None:
        ignored = ref()
        if ignored is not None:
            ignored.set_aside(index)

    def after(leaf: torch.Tensor) -> None:
        ignored = ref()
        if ignored is not None:
            ignored.take(index)

    return before, after
