"""State that differs between ranks although nothing they send does: it would train wrongly, and in silence."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.cases.matrix import mesh_of
from tests.harness import (
    MLP,
    Stack,
    Vec,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather_grads,
    here,
    run,
    seeded,
    sgd,
)

# ---------------------------------------------------------------------------- zero_grad on some ranks


def zero_on_rank_0(stage: int, how: str) -> None:
    model = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block"), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 5, dtype=torch.float64)
    model(x).sum().backward()
    if here.rank == 0:
        if how == "optimizer":
            optimizer.zero_grad()
        elif how == "model":
            model.zero_grad()
        else:
            model.head.weight.grad = None

    expect_loud(lambda: model(x).sum().backward(), "'head.weight'", "zero_grad", "rank 1: a gradient was there")
    optimizer.zero_grad()
    model(x).sum().backward()  # and the error left nothing behind
    assert_rested(model)
    assert gather_grads(model)["head.bias"].tolist() == [4.0, 4.0, 4.0]


def every_way_of_zeroing() -> None:
    for_each([(stage, how) for stage in range(4) for how in ("optimizer", "model", "by hand")], zero_on_rank_0)


def test_zero_grad_on_some_ranks_only() -> None:
    run(2, every_way_of_zeroing)


def pending_dropped_on_rank_1() -> None:
    model = fsdp.fsdp_wrap(Vec(4, 1.0))
    with model.no_sync():
        model(1.0).backward()
    if here.rank == 1:
        model.zero_grad()
    expect_loud(lambda: model(1.0).backward(), "'w'", "rank 0: an unreduced one was kept; rank 1: an unreduced one was dropped")
    model.zero_grad()
    model(3.0).backward()
    assert gather_grads(model)["w"].tolist() == [3.0] * 4


def test_a_pending_gradient_dropped_on_some_ranks_only() -> None:
    run(2, pending_dropped_on_rank_1)


def ignored_zeroed_on_rank_0() -> None:
    model = MLP()
    fsdp.fsdp_wrap(model, ignored=[model[2]])
    x = torch.ones(4, 7, dtype=next(model.parameters()).dtype)
    model(x).sum().backward()
    if here.rank == 0:
        model[2].bias.grad = None
    expect_loud(lambda: model(x).sum().backward(), "2.bias", "zero_grad")


def test_an_ignored_gradient_zeroed_on_some_ranks_only() -> None:
    run(2, ignored_zeroed_on_rank_0)


def slices_left_out(sync: bool) -> None:
    """A program may give its optimizer only the slices that hold something; and ranks may use other parameters."""
    model = nn.ModuleDict({"a": Vec(1, 1.0), "b": Vec(3, 1.0)})
    model.forward = lambda c, names: sum(model[name](c) for name in names)  # type: ignore[method-assign]
    fsdp.fsdp_wrap(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=1.0)
    names = ["a", "b"] if here.rank == 0 else ["b"]
    for step in range(3):
        optimizer.zero_grad()
        with contextlib.nullcontext() if sync else model.no_sync():
            model(1.0, names).backward()
        model(1.0, names).backward()
        if not sync:
            break
    count = here.world_size
    assert gather_grads(model)["b.w"].tolist() == [2.0] * 3
    assert gather_grads(model)["a.w"].tolist() == [2.0 / count] or sync


def every_accumulation() -> None:
    for_each([(True,), (False,)], slices_left_out)


@pytest.mark.parametrize("world_size", [2, 3])
def test_slices_left_out_and_unequal_use_are_fine(world_size: int) -> None:
    run(world_size, every_accumulation)


# ---------------------------------------------------------------------------- steps on some ranks


def no_step_on_rank_1(stage: int, accumulate: bool) -> None:
    """As a program does that skips the step where its own loss is not finite."""
    model = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block"), stage=stage)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=0.1)
    x = torch.ones(4, 5, dtype=torch.float64)

    def step(takes_step: bool) -> None:
        if accumulate:
            with model.no_sync():
                model(x).sum().backward()
        model(x).sum().backward()
        if takes_step:
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(True)
    step(False)  # on all ranks
    step(here.rank == 0)
    expect_loud(lambda: step(True), "optimizer.step() was skipped", "rank 1: nothing changed it")


def every_step() -> None:
    for_each([(stage, accumulate) for stage in (0, 3) for accumulate in (False, True)], no_step_on_rank_1)


def test_a_step_on_some_ranks_only() -> None:
    run(2, every_step)


class Scaled(nn.Module):
    """One unit of two dtypes; of the scalar only the first rank holds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, c: float) -> torch.Tensor:
        return self.w.sum() * c / 64 + self.scale * c


def flat_left_out(stage: int) -> None:
    model = nn.Sequential(Scaled(), nn.Identity())
    fsdp.fsdp_wrap(model, fsdp.by_class(Scaled), stage=stage)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=0.5)
    for step in range(4):
        loss = model(2.0)
        # Per step the scale falls by 1, and each of the 64 weights by 1/64.
        assert loss.item() == (1 - step / 64) * 2 + (1 - step) * 2, (step, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_flat_parameter_that_only_some_optimizers_hold() -> None:
    run(2, for_each, range(4), flat_left_out)


# ---------------------------------------------------------------------------- other parameters on other ranks


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Vec(3, 1.0)
        self.experts = nn.ModuleList(Vec(3, 1.0) for _ in range(3))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return self.gate(x) + sum(self.experts[index](x) for index in used)


class Routed(nn.Module):
    """Layers of experts, units without units inside, of which the first runs when the root has all its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: float, *used: tuple[int, ...]) -> torch.Tensor:
        return sum(layer(self.embed * x, which) for layer, which in zip(self.layers, used))


def unequal_experts(stage: int, accumulate: bool) -> None:
    model, reference = Routed().double(), Routed().double()
    fsdp.fsdp_wrap(model, fsdp.by_class(Experts), stage=stage)
    optimizer, plain = sgd(model), sgd(reference)
    routes = [((0, 1, 2), (1,)), ((0,), (0, 1, 2)), ((2,), (1,))]
    for step in range(4):
        for rank in range(here.world_size):
            route = routes[(step // 2 + rank) % 3]  # other ones from step to step, too
            (reference(1.0 + rank, *route) / here.world_size).backward()
            if accumulate:
                (reference(2.0, *route) / here.world_size).backward()
        route = routes[(step // 2 + here.rank) % 3]
        if accumulate:
            with model.no_sync():
                model(2.0, *route).backward()
        model(1.0 + here.rank, *route).backward()
        assert_parity(model, reference)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()


def every_route() -> None:
    for_each([(stage, accumulate) for stage in (0, 2, 3) for accumulate in (False, True)], unequal_experts)


@pytest.mark.parametrize("world_size", [2, 3])
def test_experts_that_only_some_ranks_use(world_size: int) -> None:
    run(world_size, every_route)


# ---------------------------------------------------------------------------- replicas that nobody made equal


def rank_seeded(cls: type, *args: int) -> nn.Module:
    torch.manual_seed(here.rank)
    return cls(*args)


def unequal_replicas(stage: int, mesh: tuple[int, int] | None) -> None:
    model = rank_seeded(Stack, 2)
    options = {"stage": stage, "mesh": mesh and mesh_of(mesh), "sync_params": False}
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), **options)
    x = torch.ones(4, 5, dtype=torch.float64)
    expect_loud(lambda: model(x), "head.weight", "sync_params")

    fsdp.fsdp_wrap(model := rank_seeded(Stack, 2), fsdp.by_class("Block"), **options)
    values = {name: p.detach() for name, p in seeded(Stack, 2).named_parameters()}
    model.load_state_dict(values)  # in time: the same on every rank
    model(x).sum().backward()
    torch.testing.assert_close(fsdp.full_state_dict(model, rank0_only=False), values)


def every_replica() -> None:
    for_each([(0, None), (3, (2, 1)), (1, (2, 1)), (0, (2, 1))], unequal_replicas)


def test_replicas_left_unequal() -> None:
    run(2, every_replica)


def unequal_in_part() -> None:
    model = rank_seeded(Stack, 2)
    torch.manual_seed(here.rank // 2)  # equal where one slice of a replica is not the other's replica
    for p in model.parameters():
        nn.init.normal_(p)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), mesh=mesh_of((2, 2)), sync_params=False)
    expect_loud(lambda: model(torch.ones(4, 5, dtype=torch.float64)), "rank 0", "others on rank 2")


def test_replicas_of_slices_left_unequal() -> None:
    run(4, unequal_in_part)


def unequal_ignored() -> None:
    model = seeded(MLP)
    with torch.no_grad():
        model[2].bias.fill_(here.rank)
    fsdp.fsdp_wrap(model, ignored=[model[2]], sync_params=False)
    expect_loud(lambda: model(torch.ones(4, 7, dtype=torch.float64)), "2.bias", "sync_params")


def test_ignored_parameters_left_unequal() -> None:
    run(2, unequal_ignored)


def slices_of_two_models() -> None:
    """Shards are no replicas: each rank may start from weights of its own, and there is still one model."""
    fsdp.fsdp_wrap(model := rank_seeded(Stack, 2), fsdp.by_class("Block"), sync_params=False)
    model(torch.ones(4, 5, dtype=torch.float64)).sum().backward()
    assert_rested(model)


def test_slices_of_other_weights() -> None:
    run(2, slices_of_two_models)
