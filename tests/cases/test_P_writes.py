"""P. Weights written outside `forward`: while they are sharded, and inside `full_params`."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdplite as fsdp
from tests.cases.matrix import WORLD_SIZES, Setup, matrix, wrap
from tests.harness import (
    MLP,
    Stack,
    Vec,
    assert_all,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    here,
    local_batch,
    mse,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

F64 = torch.float64
LINEAR = {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear)}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vec = Vec(4, 1.0)
        self.lin = nn.Linear(5, 3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.vec(1)


REFUSED_WRITES = {
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "one row": lambda w: w.__setitem__(0, 1),
    "one block": lambda w: w.__setitem__((slice(0, 2), slice(1, 3)), 1.0),
    "a full tensor": lambda w: w.copy_(torch.ones(3, 5, dtype=F64)),
    "one row by add": lambda w: w[1].add_(1),
}
RANDOM_FILLS = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "Tensor.normal_": lambda w: w.normal_(),
    "Tensor.random_": lambda w: w.random_(0, 100),
}


@torch.no_grad()
def write_while_sharded(setup: Setup) -> None:
    model = wrap(seeded(Pair), setup, {"block": fsdp.by_class(Vec, nn.Linear), "leaf": fsdp.by_class(Vec, nn.Linear)})
    nn.init.constant_(model.vec.w, 3.0)
    assert_all({"vec.w": gather(model)["vec.w"]}, 3.0)
    if setup.policy != "root":
        assert model.vec(1).item() == 12.0
    x, _ = stack_batch(0, here.rank)
    assert_close(model(x), seeded(Pair).lin(x) + 12.0)
    before = gather(model)["lin.weight"]
    for name, write in REFUSED_WRITES.items():
        text = expect_loud(lambda write=write: write(model.lin.weight), "lin.weight", "full_params", "writeback=True")
        assert torch.equal(gather(model)["lin.weight"], before), f"{name} changed the weight: {text}"
    for name, fill in RANDOM_FILLS.items():
        torch.manual_seed(5)
        expected = torch.empty(3, 5, dtype=F64)
        fill(expected)
        torch.manual_seed(5)
        try:
            fill(model.lin.weight)
        except fsdp.FSDPError as error:
            assert "lin.weight" in str(error) and "writeback=True" in str(error), f"{name}: {error}"
            assert torch.equal(gather(model)["lin.weight"], before), name
        else:
            assert torch.equal(gather(model)["lin.weight"], expected), name
            model.lin.weight.copy_(model.lin.weight)
            before = gather(model)["lin.weight"]
    # Element-wise updates are the same for a slice and for the whole.
    model.lin.weight.mul_(2).add_(1).clamp_(-1, 1.5)
    assert torch.equal(gather(model)["lin.weight"], (before * 2 + 1).clamp(-1, 1.5))
    nn.init.zeros_(model.lin.bias)
    assert_close(model(x), F.linear(x, (before * 2 + 1).clamp(-1, 1.5)) + 12.0)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_P4_writing_to_a_weight_while_it_is_sharded(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size, every_stage=True), write_while_sharded)


def zeroed_everywhere(setup: Setup) -> None:
    reference, model = seeded(MLP), wrap(seeded(MLP), setup, LINEAR)
    with torch.no_grad(), fsdp.full_params(model, writeback=True):
        model[0].weight.zero_()
    with torch.no_grad():
        reference[0].weight.zero_()
    assert_rested(model)
    assert_parity(model, reference, bitwise=True)
    x, _ = local_batch(0, here.rank)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    # The same for one module of several, and for an edit of one row.
    with torch.no_grad(), fsdp.full_params(model[2], writeback=True):
        model[2].weight[1] = 7.0
    with torch.no_grad():
        reference[2].weight[1] = 7.0
        assert torch.equal(model(x), reference(x))
    assert_parity(model, reference, bitwise=True)


def rank0_decides(setup: Setup) -> None:
    model = wrap(seeded(MLP), setup, LINEAR)
    with torch.no_grad(), fsdp.full_params(model, writeback=True, rank0_writes=True):
        model[0].weight.fill_(10.0 + here.rank)
        model[2].bias[0] = here.rank - 4.0
    full = gather(model)
    assert_all({"0.weight": full["0.weight"]}, 10.0)
    assert full["2.bias"][0].item() == -4.0
    assert torch.equal(full["2.weight"], seeded(MLP)[2].weight)
    expect_loud(lambda: fsdp.full_params(model, rank0_writes=True).__enter__(), "rank0_writes", "writeback")
    assert_rested(model)


def nothing_leaks(setup: Setup) -> None:
    reference, model = seeded(MLP), wrap(seeded(MLP), setup, LINEAR)
    with torch.no_grad(), fsdp.full_params(model):
        for parameter in model.parameters():
            parameter.fill_(99.0)
    assert_rested(model)
    assert_parity(model, reference, bitwise=True)
    x, _ = local_batch(0, here.rank)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    # Inside the context and inside a forward's graph, too: what was edited is not what trains.
    train_rank(model, sgd(model), range(2), local_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), local_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


def initialised_inside(setup: Setup) -> None:
    model, reference = wrap(seeded(MLP), setup, LINEAR), seeded(MLP)
    torch.manual_seed(3)
    with fsdp.full_params(model, writeback=True):
        nn.init.kaiming_uniform_(model[0].weight)
        model[2].reset_parameters()
    torch.manual_seed(3)
    nn.init.kaiming_uniform_(reference[0].weight)
    reference[2].reset_parameters()
    assert_parity(model, reference, bitwise=True)
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_P5_edits_inside_full_params(world_size: int) -> None:
    for body in (zeroed_everywhere, rank0_decides, nothing_leaks, initialised_inside):
        run(world_size, for_each, matrix(world_size, every_stage=True), body)
        if world_size == 1:
            run(1, for_each, matrix(1), body, group=False)


def contexts_nest(setup: Setup) -> None:
    reference, model = seeded(Stack, 2), seeded(Stack, 2)
    wrap(model, setup, {"block": fsdp.by_name("blocks.*"), "leaf": fsdp.by_class(nn.Linear)})
    with fsdp.full_params(model):
        with fsdp.full_params(model.blocks[0]):
            assert model.blocks[0].linear.weight.shape == (5, 5)
        shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes == {name: p.shape for name, p in reference.named_parameters()}
    assert_rested(model)
    with pytest.raises(KeyError), fsdp.full_params(model, writeback=True):
        raise KeyError("the caller's own")
    assert_rested(model)
    assert_parity(model, reference, bitwise=True)


def steps_inside_and_around(setup: Setup) -> None:
    """A whole step inside the context, and a penalty on all weights added to the loss outside the forward."""

    def inside(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with fsdp.full_params(model):
            return mse(model, batch)

    def with_penalty(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        loss = mse(model, batch)
        with fsdp.full_params(model) if isinstance(model, fsdp.FSDPUnit) else nullcontext():
            return loss + sum(p.square().sum() for p in model.parameters())

    for loss_of, ref_loss_of in ((inside, mse), (with_penalty, with_penalty)):
        reference, model = seeded(Stack, 2), seeded(Stack, 2)
        wrap(model, setup, {"block": fsdp.by_name("blocks.*"), "leaf": fsdp.by_class(nn.Linear)})
        train_rank(model, sgd(model), range(2), stack_batch, here.rank, loss_of)
        train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size, ref_loss_of)
        assert_parity(model, reference)
        assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_P5_contexts_nest(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), contexts_nest)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_P2_steps_inside_full_params_and_penalties_on_all_weights(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), steps_inside_and_around)
