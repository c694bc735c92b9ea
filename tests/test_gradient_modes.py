"""Gradients switched on and off inside forward, segments inside segments, and hooks of all modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdplite as fsdp
from tests.harness import (
    Block,
    Stack,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    here,
    mse,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)
from tests.test_autograd_works import Step, mean_over_ranks


# ---- gradients switched on and off inside forward


class Switching(Stack):
    """Computes with gradients whatever the caller says, as models do that return forces or run their own inner loop."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


def under_no_grad(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        out = model(batch[0])
    return (out - batch[1]).square().mean()


class Forces(Stack):
    """An energy, and its gradient by the input, which the loss differentiates again."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, force


def energy_and_forces(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    energy, force = model(batch[0])
    return (energy - batch[1]).square().mean() + force.square().sum()


def gradients_inside(build: Any, loss_of: Step, policy: Any, reshard: bool | None, stage: int) -> None:
    model, reference = seeded(build, 2), seeded(build, 2)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, stage=stage)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, stack_batch(step, here.rank)).backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        mean_over_ranks(reference, loss_of, stack_batch, step)
        reference_optimizer.step()
        assert_parity(model, reference)
    model.eval(), reference.eval()
    x, _ = stack_batch(5, here.rank)
    with torch.no_grad():
        for found, expected in zip(model(x), reference(x)):
            assert_close(found.detach(), expected.detach())
    del found
    model.zero_grad()
    if stage == 3:
        assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_switched_inside_forward(world_size: int) -> None:
    kinds = [(Switching, under_no_grad), (Forces, energy_and_forces)]
    blocks, layers = fsdp.by_class("Block"), fsdp.by_class("Linear")
    policies = [(blocks, None, 3), (None, None, 3), (layers, False, 3), (None, None, 2)]
    run(world_size, for_each, [(*kind, *policy) for kind in kinds for policy in policies], gradients_inside)


class Matryoshka(nn.Module):
    """Reentrant checkpoints inside each other: the inner ones see inputs without gradients in the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def inner(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = checkpoint(block, x, use_reentrant=True)
        return self.blocks[3](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x.requires_grad_(), use_reentrant=True))


class Repeated(Matryoshka):
    """One block checkpointed twice: its second backward comes when all weights of the unit around have gradients."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0], self.blocks[1]
        x = checkpoint(first, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(first, x, use_reentrant=True) + checkpoint(second, x, use_reentrant=True)
        return self.head(self.blocks[2](self.blocks[3](x)))


def nested_checkpoints(build: Any, policy: Any, reshard: bool | None) -> None:
    model, reference = seeded(build), seeded(build)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard)
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_reentrant_checkpoints_inside_each_other(world_size: int) -> None:
    blocks = fsdp.by_class("Block")
    combinations = [(b, *p) for b in (Matryoshka, Repeated) for p in ((blocks, None), (blocks, False), (None, None))]
    run(world_size, for_each, combinations, nested_checkpoints)


def hooks_of_all_modules(policy: Any) -> None:
    """A hook that torch calls for every module sees full weights too."""
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, policy)
    seen: list[float] = []

    def hook(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.Linear):
            seen.append(module.weight.detach().sum().item())

    handle = nn.modules.module.register_module_full_backward_hook(hook)
    try:
        mse(model, stack_batch(0, here.rank)).backward()
        found, seen = seen, []
        mse(reference, stack_batch(0, here.rank)).backward()
    finally:
        handle.remove()
        nn.modules.module._global_is_full_backward_hook = None
    assert found == seen and len(seen) == 3
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_of_all_modules_see_full_weights(world_size: int) -> None:
    run(world_size, for_each, [(fsdp.by_class("Block"),), (fsdp.by_class("Linear"),), (None,)], hooks_of_all_modules)


def frozen_before_backward(stage: int, reshard: bool | None) -> None:
    """What is frozen between a forward and its backward gets no gradient, as in the plain model."""
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), stage=stage, reshard_after_forward=reshard)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    for step in range(3):
        optimizer.zero_grad(), reference_optimizer.zero_grad()
        loss = mse(model, stack_batch(step, here.rank))
        losses = [mse(reference, stack_batch(step, rank)) for rank in range(here.world_size)]
        for m in (model, reference):
            (m.blocks[0] if step % 2 else m.head).requires_grad_(False)
        loss.backward()
        (sum(losses) / here.world_size).backward()
        assert_parity(model, reference)
        for m in (model, reference):
            m.requires_grad_(True)
        optimizer.step(), reference_optimizer.step()
        assert_parity(model, reference, grads=False)
    model.zero_grad()
    if stage == 3:
        assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_between_forward_and_backward(world_size: int) -> None:
    run(world_size, for_each, [(3, None), (3, False), (1, None)], frozen_before_backward)


class InsideAndOutside(nn.Module):
    """One weight in a reentrant segment and after it: it has its gradient before the segment runs again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5, dtype=torch.float64) / 5)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: torch.tanh(y @ self.weight), x.requires_grad_(), use_reentrant=self.use_reentrant)
        return x @ self.weight


def inside_and_outside() -> None:
    x, _ = stack_batch(0, here.rank)
    model = fsdp.fsdp_wrap(InsideAndOutside(use_reentrant=True))
    expect_loud(lambda: model(x.clone()).square().sum().backward(), "weight", "use_reentrant=False")
    assert_rested(model)
    model, reference = fsdp.fsdp_wrap(InsideAndOutside(use_reentrant=False)), InsideAndOutside(use_reentrant=False)
    model(x.clone()).square().sum().backward()
    mean_over_ranks(reference, lambda m, batch: m(batch[0].clone()).square().sum(), stack_batch, 0)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_inside_a_reentrant_segment_and_after_it(world_size: int) -> None:
    run(world_size, inside_and_outside)
