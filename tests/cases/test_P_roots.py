"""P. Calls that do not begin at the root, and models that hold or stand beside other wrapped models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.cases.matrix import Setup, matrix, wrap
from tests.harness import (
    Block,
    Stack,
    assert_parity,
    assert_rested,
    for_each,
    here,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

BLOCKS = {"block": fsdp.by_class(Block), "leaf": fsdp.by_class(nn.Linear)}


def child_before_root(setup: Setup) -> None:
    reference, model = seeded(Stack, 2), seeded(Stack, 2)
    wrap(model, setup, BLOCKS)
    if setup.policy == "block":
        x, _ = stack_batch(7, here.rank)
        with torch.no_grad():
            assert torch.equal(model.blocks[0](x), reference.blocks[0](x))
        assert_rested(model)
        model.blocks[0](x).sum().backward()
        assert_rested(model)
        model.zero_grad()
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


def two_roots(setup: Setup) -> None:
    reference, student = seeded(Stack, 2), seeded(Stack, 2)
    plain_teacher, teacher = seeded(Stack, 3, seed=1), seeded(Stack, 3, seed=1).requires_grad_(False)
    wrap(student, setup, BLOCKS)
    wrap(teacher, setup, BLOCKS)

    def distil(model: nn.Module, batch: tuple[Tensor, ...], guide: nn.Module) -> Tensor:
        with torch.no_grad():
            target = guide(batch[0])
        if guide is teacher:
            assert_rested(teacher)
        return (model(batch[0]) - target).square().mean()

    train_rank(student, sgd(student), range(2), stack_batch, here.rank, partial(distil, guide=teacher))
    train_ref(
        reference, sgd(reference), range(2), stack_batch, here.world_size, partial(distil, guide=plain_teacher)
    )
    assert_parity(student, reference)
    assert_parity(teacher, plain_teacher, bitwise=True)
    assert_rested(student, teacher)


class Distilled(nn.Module):
    """A student that holds its wrapped teacher and runs it inside its own forward."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()


def root_inside_a_root(setup: Setup) -> None:
    plain_teacher = seeded(Stack, 1, seed=1).requires_grad_(False)
    reference = Distilled(seeded(Stack, 2), plain_teacher)
    teacher = wrap(seeded(Stack, 1, seed=1).requires_grad_(False), setup, BLOCKS)
    x, _ = stack_batch(7, here.rank)
    assert torch.equal(teacher(x), plain_teacher(x))  # a root of its own, until it is wrapped into another
    assert_rested(teacher)
    model = wrap(Distilled(seeded(Stack, 2), teacher), setup, BLOCKS)

    def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0])

    train_rank(model, sgd(model), range(2), stack_batch, here.rank, loss_of)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size, loss_of)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_P11_child_before_root_and_several_roots(world_size: int) -> None:
    for body in (child_before_root, two_roots, root_inside_a_root):
        run(world_size, for_each, matrix(world_size), body)
