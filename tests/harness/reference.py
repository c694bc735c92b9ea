"""Batches, optimizers, and the two oracles: REF and REF-LP. Nothing here knows the library.

REF is the same model, never wrapped, trained in one process on the W local batches joined in rank order.
REF-LP keeps fp32 masters, runs each rank's batch alone with weights cast to the compute dtype, adds the W gradients in
fp32 in rank order, divides by W, and lets the optimizer work on the masters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
LossOf = Callable[[nn.Module, Batch], Tensor]
BatchOf = Callable[[int, int], Batch]


def local_batch(
    step: int, rank: int, fan_in: int = 7, fan_out: int = 3, rows: int = 4, dtype: torch.dtype = torch.float64
) -> Batch:
    """`(x, target)` of one rank in one step, drawn from a generator seeded with `1000 * step + rank`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, fan_in, generator=generator, dtype=torch.float64)
    target = torch.randn(rows, fan_out, generator=generator, dtype=torch.float64)
    return x.to(dtype), target.to(dtype)


def stack_batch(step: int, rank: int) -> Batch:
    """A batch that fits `Stack`: five features in, three out."""
    return local_batch(step, rank, 5, 3)


def joined(batch_of: BatchOf, step: int, world_size: int) -> Batch:
    """The local batches of all ranks, joined in rank order."""
    parts = [batch_of(step, rank) for rank in range(world_size)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def mse(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error, taken in the dtype of the target."""
    x, target = batch
    return (model(x).to(target.dtype) - target).square().mean()


def sgd(params: nn.Module | Iterable[Any]) -> torch.optim.Optimizer:
    """The cases' SGD: lr 0.1."""
    return torch.optim.SGD(_parameters(params), lr=0.1)


def adamw(params: nn.Module | Iterable[Any]) -> torch.optim.Optimizer:
    """The cases' AdamW: lr 0.1, weight decay 0.1."""
    return torch.optim.AdamW(_parameters(params), lr=0.1, weight_decay=0.1)


def _parameters(params: nn.Module | Iterable[Any]) -> Iterable[Any]:
    return params.parameters() if isinstance(params, nn.Module) else params


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_of: LossOf = mse,
    after_step: Callable[[], None] | None = None,
) -> None:
    """The user's loop, for a wrapped model and for its reference alike. Gradients of the last step stay."""
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if after_step is not None:
            after_step()


def train_rank(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    batch_of: BatchOf,
    rank: int,
    loss_of: LossOf = mse,
    after_step: Callable[[], None] | None = None,
) -> None:
    """`train` on the batches of one rank."""
    train(model, optimizer, (batch_of(step, rank) for step in steps), loss_of, after_step)


def train_ref(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    batch_of: BatchOf,
    world_size: int,
    loss_of: LossOf = mse,
) -> None:
    """REF: `train` on the joined batches."""
    train(model, optimizer, (joined(batch_of, step, world_size) for step in steps), loss_of)


def mean_backward(model: nn.Module, world_size: int, loss_of_rank: Callable[[nn.Module, int], Tensor]) -> None:
    """REF for losses that cannot be joined: add the mean over ranks of the gradients of `loss_of_rank(model, rank)`."""
    for rank in range(world_size):
        (loss_of_rank(model, rank) / world_size).backward()


class LowPrecisionReference:
    """REF-LP around `masters`, an fp32 model.

    Args:
        masters: The model whose fp32 parameters the optimizer works on.
        dtype: Compute dtype.
        keep: Module classes whose parameters stay fp32 in compute.
    """

    def __init__(self, masters: nn.Module, dtype: torch.dtype, keep: tuple[type, ...] = ()) -> None:
        self.masters = masters
        self.dtype = dtype
        self.compute = copy.deepcopy(masters)
        for module in self.compute.modules():
            if not isinstance(module, keep):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)

    def backward(self, batches: list[Batch], loss_of: LossOf = mse) -> None:
        """Add the mean gradient of one batch per rank to the masters' gradients."""
        with torch.no_grad():
            for compute, master in zip(self.compute.parameters(), self.masters.parameters(), strict=True):
                compute.copy_(master)
        total: dict[str, Tensor] = {}
        for batch in batches:
            self.compute.zero_grad()
            loss_of(self.compute, self._cast(batch)).backward()
            for name, parameter in self.compute.named_parameters():
                if parameter.grad is not None:
                    grad = parameter.grad.float()
                    total[name] = total[name] + grad if name in total else grad
        for name, parameter in self.masters.named_parameters():
            if name in total:
                grad = total[name] / len(batches)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _cast(self, batch: Batch) -> Batch:
        x, *rest = batch
        return (x.to(self.dtype) if x.is_floating_point() else x, *rest)

    def train(
        self,
        optimizer: torch.optim.Optimizer,
        steps: Iterable[int],
        batch_of: BatchOf,
        world_size: int,
        loss_of: LossOf = mse,
    ) -> None:
        """The loop of `train`, one batch per rank and step."""
        for step in steps:
            optimizer.zero_grad()
            self.backward([batch_of(step, rank) for rank in range(world_size)], loss_of)
            optimizer.step()
