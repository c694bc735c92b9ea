"""O. Optimizers, names, averages of weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdplite as fsdp
from tests.cases.matrix import WORLD_SIZES, Setup, layouts, matrix, wrap
from tests.harness import (
    MLP,
    Stack,
    Vec,
    adamw,
    all_gather_objects,
    assert_all,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    gather_grads,
    gather_state,
    here,
    local_batch,
    mse,
    plain,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

F64 = torch.float64
LINEAR = {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear)}


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same_objects(a: Any, b: Any) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def built_before_wrapping(setup: Setup) -> None:
    model = Vec(8, 1.0)
    before = list(model.parameters())
    optimizer = sgd(model)
    wrap(model, setup, {})
    assert same_objects(held_by(optimizer), model.parameters()) and same_objects(before, model.parameters())
    model(1).backward()
    optimizer.step()
    assert_all(gather(model), 0.9)
    assert_rested(model)

    for make in (sgd, adamw):
        reference, mlp = seeded(MLP), seeded(MLP)
        # Groups and schedules are references, too.
        groups = [{"params": [p for p in mlp.parameters() if p.dim() > 1]}, {"params": [mlp[0].bias, mlp[2].bias]}]
        optimizer, ref_optimizer = make(groups), make(reference)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        ref_schedule = torch.optim.lr_scheduler.StepLR(ref_optimizer, 1, 0.5)
        wrap(mlp, setup, LINEAR)
        assert {id(p) for p in held_by(optimizer)} == {id(p) for p in mlp.parameters()}
        train_rank(mlp, optimizer, range(3), local_batch, here.rank, after_step=schedule.step)
        for step in range(3):
            train_ref(reference, ref_optimizer, [step], local_batch, here.world_size)
            ref_schedule.step()
        assert_parity(mlp, reference)
        assert_rested(mlp)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_O1_an_optimizer_built_before_wrapping_trains_the_model(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size, every_stage=True), built_before_wrapping)
    if world_size == 1:
        run(1, for_each, matrix(1), built_before_wrapping, group=False)


def state_of_another_shape(setup: Setup) -> None:
    """An optimizer that has stepped before wrapping holds full-shape state: LOUD at its first step."""
    model = seeded(MLP)
    optimizer = adamw(model)
    mse(model, local_batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    wrap(model, setup, LINEAR)
    before = gather(model)
    mse(model, local_batch(0, here.rank)).backward()
    expect_loud(optimizer.step, "weight")
    for name, tensor in gather(model).items():
        assert torch.equal(tensor, before[name]), name
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_O1_an_optimizer_with_full_shape_state_is_refused(world_size: int) -> None:
    run(world_size, for_each, layouts(world_size), state_of_another_shape)


def state_goes_round(setup: Setup) -> None:
    """`state_dict` of the optimizer, in memory, into another optimizer of the same model."""
    reference, model = seeded(MLP), wrap(seeded(MLP), setup, LINEAR)
    first, ref_optimizer = adamw(model), adamw(reference)
    train_rank(model, first, [0], local_batch, here.rank)
    second = adamw(model)
    second.load_state_dict(first.state_dict())
    train_rank(model, second, [1, 2], local_batch, here.rank)
    train_ref(reference, ref_optimizer, range(3), local_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_O1_optimizer_state_goes_round_in_memory(world_size: int) -> None:
    run(world_size, for_each, layouts(world_size), state_goes_round)


def built_after_a_forward(how: str, setup: Setup) -> None:
    model = wrap(Vec(8, 1.0), setup, {})
    if how == "no_grad":
        with torch.no_grad():
            model(1)
    elif how == "backward":
        model(1).backward()
        model.zero_grad()
    else:
        loss = model(1)  # nothing has come back yet, and the root may still be gathered
    replicas = here.world_size if setup.stage == 0 else (setup.mesh or (1, 0))[0]
    sizes = all_gather_objects([p.numel() for p in model.parameters()])
    assert sum(sum(rank) for rank in sizes) == 8 * replicas
    optimizer = sgd(model)
    if how == "pending":
        loss.backward()
        optimizer.zero_grad()
    model(1).backward()
    optimizer.step()
    assert_all(gather(model), 0.9)
    with torch.no_grad():
        assert abs(model(1).item() - 7.2) < 1e-12
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_O2_an_optimizer_built_after_a_forward(world_size: int) -> None:
    for how in ("no_grad", "backward", "pending"):
        run(world_size, for_each, matrix(world_size), partial(built_after_a_forward, how))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5, dtype=F64), nn.LayerNorm(5, dtype=F64), nn.Linear(5, 3, dtype=F64))


SHAPES = {"0.weight": (5, 7), "0.bias": (5,), "1.weight": (5,), "1.bias": (5,), "2.weight": (3, 5), "2.bias": (3,)}


def decay_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.1
    )


def names_and_decay(setup: Setup) -> None:
    reference, model = seeded(normed), seeded(normed)
    names = [name for name, _ in model.named_parameters()]
    wrap(model, setup, {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear, nn.LayerNorm)})
    assert names == list(SHAPES) == [name for name, _ in model.named_parameters()]
    assert {name: tuple(p.full_shape) for name, p in model.named_parameters()} == SHAPES
    assert [name for name, p in model.named_parameters() if p.ndim >= 2] == ["0.weight", "2.weight"]
    assert [name for name, p in model.named_parameters() if p.dim() >= 2] == ["0.weight", "2.weight"]
    assert [name for name, _ in model.named_parameters() if "bias" in name] == ["0.bias", "1.bias", "2.bias"]
    train_rank(model, decay_groups(model), range(3), local_batch, here.rank)
    train_ref(reference, decay_groups(reference), range(3), local_batch, here.world_size)
    assert_parity(model, reference)
    assert [name for name, p in model.named_parameters() if p.ndim >= 2] == ["0.weight", "2.weight"]
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_O4_names_order_ranks_of_tensors_and_decay_groups(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), names_and_decay)


class WithIgnored(nn.Module):
    """Two units and a trainable module that the library is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Vec(3, 1.0)
        self.b = Vec(1, 1.0)
        self.free = Vec(5, 1.0)

    def forward(self, c: float) -> Tensor:
        return self.a(c) + self.b(c) + self.free(c)


FAST_PATHS = (
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"foreach": True}),
    (torch.optim.Adam, {"lr": 0.1}, {"foreach": True}),
    (torch.optim.Adam, {"lr": 0.1}, {"fused": True}),
)


def mixed_updates(setup: Setup, by_parameter: bool, spread: float) -> None:
    policies = {"block": fsdp.by_class(Vec), "leaf": fsdp.by_name("a", "b")}
    for kind, options, fast in FAST_PATHS:
        results = []
        for path in (fast, {"foreach": False}):
            model = WithIgnored()
            wrap(model, setup, policies, ignored=(model.free.w if by_parameter else model.free,))
            optimizer = kind(model.parameters(), **options, **path)
            for c in (0.3, 1.3, 2.3):
                optimizer.zero_grad()
                model(c + spread * here.rank).backward()
                optimizer.step()
            # `gather` also asserts that the ignored parameter has the same bits on every rank.
            results.append((gather(model), gather_grads(model)))
            assert_rested(model)
        (found, grads), (expected, _) = results
        for name in expected:
            assert (found[name] - expected[name]).abs().max() < 1e-7, f"{kind.__name__} {fast}: {name}"
            assert_all({name: grads[name]}, 2.3 + spread * (here.world_size - 1) / 2, tolerance=1e-12)
        plain_w = nn.Parameter(torch.ones(1, dtype=F64))
        optimizer = kind([plain_w], **options)
        for c in (0.3, 1.3, 2.3):
            plain_w.grad = torch.full_like(plain_w, c + spread * (here.world_size - 1) / 2)
            optimizer.step()
        assert_all(found, plain_w.item(), tolerance=1e-7)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_O7_multi_tensor_and_fused_updates_over_mixed_kinds(world_size: int) -> None:
    setups = [*layouts(world_size), Setup(policy="root")]
    run(world_size, for_each, setups, partial(mixed_updates, by_parameter=False, spread=0.0))
    few = [Setup(), Setup(stage=0)]
    run(world_size, for_each, few, partial(mixed_updates, by_parameter=True, spread=0.0))
    run(world_size, for_each, few, partial(mixed_updates, by_parameter=False, spread=0.5))


def ema_by_hand(setup: Setup) -> None:
    model = wrap(Vec(8, 1.0), setup, {})
    ema = copy.deepcopy(model)
    assert ema.w is not model.w and isinstance(ema, fsdp.FSDPUnit) and isinstance(ema, Vec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(1).backward()
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.mul_(0.9).add_(parameter, alpha=0.1)
    assert_all(gather(model), 0.7, tolerance=1e-12)
    assert_all(gather(ema), 0.9439, tolerance=1e-12)
    assert abs(ema(1).item() - 7.5512) < 1e-12
    copy_trains_alone(model, ema)
    assert_rested(model, ema)


def copy_trains_alone(model: nn.Module, other: nn.Module) -> None:
    """Training either leaves the other's bits alone."""
    for trained, kept in ((other, model), (model, other)):
        before, moved = gather(kept), gather(trained)
        optimizer = sgd(trained)
        optimizer.zero_grad()
        trained(1).backward()
        optimizer.step()
        for name, tensor in gather(kept).items():
            assert torch.equal(tensor, before[name])
        for name, tensor in gather(trained).items():
            assert_close(tensor, moved[name] - 0.1)
        optimizer.zero_grad()


def averaged_model(setup: Setup) -> None:
    def average(old: Tensor, new: Tensor, _: Any) -> Tensor:
        return 0.9 * old + 0.1 * new

    for options in ({"avg_fn": average}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        model = wrap(Vec(8, 1.0), setup, {})
        averaged = AveragedModel(model, **options)
        averaged.update_parameters(model)
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(1).backward()
            optimizer.step()
            averaged.update_parameters(model)
        assert_all(gather(model), 0.7, tolerance=1e-12)
        assert_all(gather(averaged.module), 0.9439, tolerance=1e-12)
        with torch.no_grad():
            assert abs(averaged(1).item() - 7.5512) < 1e-12
        copy_trains_alone(model, averaged.module)
        assert_rested(model, averaged.module)


def copy_in_the_middle(setup: Setup) -> None:
    """A deep model copied between steps: copy and original go on from the same point, the optimizer state is kept."""
    reference, model = seeded(Stack, 2), seeded(Stack, 2)
    wrap(model, setup, {"block": fsdp.by_name("blocks.*"), "leaf": fsdp.by_class(nn.Linear)})
    optimizer, ref_optimizer = adamw(model), adamw(reference)
    train_rank(model, optimizer, range(2), stack_batch, here.rank)
    train_ref(reference, ref_optimizer, range(2), stack_batch, here.world_size)
    moments = gather_state(model, optimizer, "exp_avg")
    optimizer.zero_grad()
    other, ref_other = copy.deepcopy(model), copy.deepcopy(reference)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    train_rank(other, sgd(other), [5, 6], stack_batch, here.rank)
    train_ref(ref_other, sgd(ref_other), [5, 6], stack_batch, here.world_size)
    for name, moment in gather_state(model, optimizer, "exp_avg").items():
        assert torch.equal(moment, moments[name])
    train_rank(model, optimizer, [2, 3], stack_batch, here.rank)
    train_ref(reference, ref_optimizer, [2, 3], stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_parity(other, ref_other)
    assert same_objects(held_by(optimizer), model.parameters())
    assert all(plain(p).numel() == p.numel() for p in other.parameters())
    assert_rested(model, other)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_O9_deep_copies_and_averages_of_weights(world_size: int) -> None:
    for body in (ema_by_hand, averaged_model, copy_in_the_middle):
        run(world_size, for_each, matrix(world_size), body)
