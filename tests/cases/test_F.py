"""F. Frozen and trainable together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdplite as fsdp
from fsdplite import inspect
from tests.cases.matrix import WORLD_SIZES, Setup, matrix, wrap
from tests.harness import (
    Counts,
    adamw,
    assert_close,
    assert_parity,
    assert_rested,
    for_each,
    gather,
    gather_grads,
    here,
    local_batch,
    mean_backward,
    mse,
    plain,
    run,
    seeded,
    sgd,
    train_rank,
    train_ref,
)

F64 = torch.float64


class Adapter(nn.Module):
    """`base` is frozen; A and B are trained beside it."""

    def __init__(self, width: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=F64).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, width, dtype=F64))
        self.B = nn.Parameter(torch.randn(width, rank, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.A.T) @ self.B.T


class AdapterStack(nn.Module):
    """Adapters in a row, of two widths, behind a stem whose weight alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 5, dtype=F64)
        self.stem.bias.requires_grad_(False)
        self.layers = nn.ModuleList([Adapter(5, 1), Adapter(5, 3)])
        self.head = nn.Linear(5, 3, dtype=F64)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def trains_what_is_free(setup: Setup, build: Any, fan_in: int, fan_out: int) -> None:
    reference, model = seeded(build), seeded(build)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all(p.abs().min() > 0 for p in reference.parameters())
    wrap(model, setup, {"block": fsdp.by_class(Adapter), "leaf": fsdp.by_class(nn.Linear)})
    batch_of = partial(local_batch, fan_in=fan_in, fan_out=fan_out)
    train_rank(model, adamw(model), range(3), batch_of, here.rank)
    train_ref(reference, adamw(reference), range(3), batch_of, here.world_size)
    full = gather(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name not in frozen), name
        if name in frozen:
            assert parameter.grad is None and torch.equal(full[name], frozen[name]), name
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_F1_frozen_and_trainable_parameters_in_one_unit(world_size: int) -> None:
    one_unit = partial(trains_what_is_free, build=Adapter, fan_in=4, fan_out=4)
    # Adapter is the root here, so "block" and "root" both mean one unit.
    run(world_size, for_each, matrix(world_size, every_stage=True), one_unit)
    several = partial(trains_what_is_free, build=AdapterStack, fan_in=7, fan_out=3)
    run(world_size, for_each, matrix(world_size), several)


class MostlyFrozen(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(rows, 100), requires_grad=False)
        self.free = nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.frozen.T).square().mean(dim=1, keepdim=True) + self.free * x[:, :10]


class _AtEveryOp(TorchDispatchMode):
    """Calls `probe` before every operator, but not from inside the probe."""

    def __init__(self, probe: Any) -> None:
        super().__init__()
        self.probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.probe()
        return func(*args, **(kwargs or {}))


@contextmanager
def sampled(model: nn.Module, key: str) -> Iterator[list[Any]]:
    """The values of one entry of `rest_report`, before every operator in the block."""
    samples: list[Any] = []
    with _AtEveryOp(lambda: samples.append(inspect.rest_report(model)[key])):
        yield samples


def frozen_cost(rows: int, stage: int) -> list[int]:
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(MostlyFrozen(rows), stage=stage)
    optimizer = sgd(model)
    reduced = []
    for step in range(2):
        optimizer.zero_grad()
        x, _ = local_batch(step, here.rank, fan_in=100, dtype=torch.float32)
        with Counts() as counts:
            loss = model(x).mean()
            with sampled(model, "gradient_bytes") as gradient_bytes:
                loss.backward()
            optimizer.step()
        reduced.append(sum(counts.reductions))
        assert sum(counts.reductions) <= 16, counts.calls
        assert gradient_bytes and max(gradient_bytes) <= 64, max(gradient_bytes)
        assert model.frozen.grad is None
        assert gather_grads(model)["free"] is not None
    assert_rested(model)
    return reduced


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_F2_frozen_elements_cost_no_gradient_memory_or_traffic(stage: int) -> None:
    small, large = run(2, frozen_cost, 100, stage), run(2, frozen_cost, 200, stage)
    assert small == large
    assert all(elements > 0 for reduced in small for elements in reduced)


class FrozenChain(nn.Module):
    """Frozen blocks and a trainable head; the root's vector is added before block `where`."""

    def __init__(self, blocks: int, where: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=F64).requires_grad_(False) for _ in range(blocks))
        self.head = nn.Linear(4, 2, dtype=F64)
        self.vector = nn.Parameter(torch.ones(4, dtype=F64))
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x + self.vector if index == self.where else x).tanh()
        return self.head(x)


def frozen_units_are_freed(blocks: int, where: int, prefetch: int) -> None:
    reference, model = seeded(FrozenChain, blocks, where), seeded(FrozenChain, blocks, where)
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), prefetch=prefetch, reshard_after_forward=True)
    batch_of = partial(local_batch, fan_in=4, fan_out=2)
    optimizer, ref_optimizer = sgd(model), sgd(reference)
    for step in range(3):
        optimizer.zero_grad()
        loss = mse(model, batch_of(step, here.rank))
        with Counts() as counts, sampled(model, "unsharded_units") as full:
            loss.backward()
        # 20 elements are a block, 10 the head, 4 the root. The vector lies before block `where`: backward ends there.
        assert counts.gathers.count(20) == blocks - where, counts.gathers
        assert counts.gathers.count(10) == 1, counts.gathers
        most = max(len([name for name in names if name]) for names in full)
        assert 1 <= most <= 1 + prefetch, [names for names in full if len(names) >= most]
        assert_rested(model)
        optimizer.step()
    train_ref(reference, ref_optimizer, range(3), batch_of, here.world_size)
    assert_parity(model, reference)
    assert all(grad is None for name, grad in gather_grads(model).items() if name.startswith("blocks"))
    assert_rested(model)


def test_F3_frozen_units_are_freed_during_backward() -> None:
    combinations = [(4, where, prefetch) for where in (0, 2) for prefetch in (1, 0)]
    run(2, for_each, [*combinations, (6, 3, 1), (5, 1, 2)], frozen_units_are_freed)


class TwoVectors(nn.Module):
    """`p` and `q` of n elements, both with gradient 1 wherever they are trained."""

    def __init__(self, apart: bool, n: int = 3) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(n, dtype=F64))
        if apart:
            self.part = OneVector(n)
        else:
            self.q = nn.Parameter(torch.ones(n, dtype=F64))

    def forward(self) -> Tensor:
        return self.p.sum() + (self.part() if hasattr(self, "part") else self.q.sum())


class OneVector(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.ones(n, dtype=F64))

    def forward(self) -> Tensor:
        return self.q.sum()


P_AFTER = (0.89, 0.7811, 0.673289, 0.56655611, 0.46089055)
Q_AFTER = (1.0, 1.0, 0.89, 0.7811, 0.7811)
FROZEN_IN = (True, True, False, False, True)


def freeze_and_unfreeze(setup: Setup) -> None:
    for apart in (False, True):
        for q_frozen_at_wrap in (False, True):
            model = TwoVectors(apart)
            name = "part.q" if apart else "q"
            q = model.get_parameter(name)
            q.requires_grad_(not q_frozen_at_wrap)
            wrap(model, setup, {"block": fsdp.by_class(OneVector), "leaf": fsdp.by_class(OneVector)} if apart else {})
            optimizer = adamw(model)
            assert model.get_parameter(name) is q
            for step, frozen in enumerate(FROZEN_IN):
                q.requires_grad_(not frozen)
                optimizer.zero_grad()
                model().backward()
                assert gather_grads(model)["p"].tolist() == [1.0] * 3
                assert (gather_grads(model)[name] is None) == frozen, f"step {step}"
                assert not frozen or q.grad is None
                optimizer.step()
                full = gather(model)
                for found, expected in ((full["p"], P_AFTER[step]), (full[name], Q_AFTER[step])):
                    assert (found - expected).abs().max() < 1e-7, f"after step {step + 1}: {full}"
                assert_rested(model)
            assert model.get_parameter(name) is q
            steps = {key: int(optimizer.state[p]["step"]) for key, p in model.named_parameters() if p.numel()}
            expected_steps = {key: value for key, value in (("p", 5), (name, 2)) if model.get_parameter(key).numel()}
            assert steps == expected_steps


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_F5_freezing_and_unfreezing_after_wrapping(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), freeze_and_unfreeze)


def thaw_layer_by_layer(setup: Setup) -> None:
    """Gradual unfreezing over whole units and parts of units, as fine-tuning schedules do."""
    reference, model = seeded(AdapterStack), seeded(AdapterStack)
    wrap(model, setup, {"block": fsdp.by_class(Adapter), "leaf": fsdp.by_class(nn.Linear)})
    optimizer, ref_optimizer = adamw(model), adamw(reference)
    thaw = {1: ["layers.1.base.weight", "head.weight"], 2: ["layers.0.base.bias", "stem.bias"], 3: []}
    freeze = {1: [], 2: ["layers.1.A", "head.bias"], 3: ["stem.weight", "stem.bias"]}
    for step in range(4):
        for module in (model, reference):
            for name in thaw.get(step, ()):
                module.get_parameter(name).requires_grad_(True)
            for name in freeze.get(step, ()):
                module.get_parameter(name).requires_grad_(False)
        train_rank(model, optimizer, [step], local_batch, here.rank)
        train_ref(reference, ref_optimizer, [step], local_batch, here.world_size)
        assert_parity(model, reference)
        assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_F5_unfreezing_layer_by_layer(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), thaw_layer_by_layer)


def kept_bits_are_the_users(stage: int) -> None:
    """A frozen parameter that is written between steps keeps what was written."""
    model = fsdp.fsdp_wrap(seeded(Adapter), stage=stage)
    with torch.no_grad():
        model.base.weight.mul_(0.5)
    x, _ = local_batch(0, here.rank, 4, 4)
    plain_model = seeded(Adapter)
    with torch.no_grad():
        plain_model.base.weight.mul_(0.5)
    assert_close(plain(model(x)), plain(plain_model(x)))
    mean_backward(plain_model, here.world_size, lambda m, r: m(local_batch(0, r, 4, 4)[0]).sum())
    model(x).sum().backward()
    assert_parity(model, plain_model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_F1_frozen_weights_may_be_written_between_steps(world_size: int) -> None:
    run(world_size, for_each, [0, 1, 2, 3], kept_bits_are_the_users)
