"""G. Clipping and norms."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.cases.matrix import WORLD_SIZES, Setup, layouts, matrix, wrap
from tests.harness import (
    MLP,
    Stack,
    Vec,
    assert_close,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    gather_grads,
    here,
    joined,
    local_batch,
    mse,
    run,
    seeded,
    sgd,
    stack_batch,
)

F64 = torch.float64
NORMS = {2.0: 5.0, 1.0: 7.0, float("inf"): 4.0, 3.0: 4.4979414}


def clip_by_method(model: nn.Module, max_norm: float, norm_type: float) -> object:
    return model.clip_grad_norm_(max_norm, norm_type=norm_type)


def clip_by_torch(model: nn.Module, max_norm: float, norm_type: float, foreach: bool | None = None) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type, foreach=foreach)


ENTRIES = {
    "method": clip_by_method,
    "torch": clip_by_torch,
    "torch foreach": partial(clip_by_torch, foreach=True),
    "torch loop": partial(clip_by_torch, foreach=False),
}


def norm_is_global(setup: Setup) -> None:
    model = wrap(Vec(4, 1.0), setup, {})
    for entry, clip in ENTRIES.items():
        for norm_type, expected in NORMS.items():
            model.zero_grad()
            model(torch.tensor([3.0, 0, 0, 4.0], dtype=F64)).backward()
            norm = clip(model, 1.0, norm_type)
            what = f"{entry}, p = {norm_type}: {norm}"
            assert type(norm) in (float, Tensor), what
            assert norm == norm and abs(float(norm) - expected) < 1e-6, what
            scale = 1.0 / (expected + 1e-6)
            clipped = gather_grads(model)["w"]
            expected_grad = torch.tensor([3.0, 0, 0, 4.0], dtype=F64) * scale
            assert (clipped - expected_grad).abs().max() < 1e-6, f"{what}: {clipped}"
            assert clipped[1] == clipped[2] == 0
            if norm_type == 2.0:
                assert abs(clipped[0].item() - 0.59999988) < 1e-6 and abs(clipped[3].item() - 0.79999984) < 1e-6
        # A limit above the norm changes nothing.
        model.zero_grad()
        model(torch.tensor([3.0, 0, 0, 4.0], dtype=F64)).backward()
        assert abs(float(clip(model, 100.0, 2.0)) - 5.0) < 1e-6
        assert gather_grads(model)["w"].tolist() == [3.0, 0.0, 0.0, 4.0], entry
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_G1_the_norm_is_global(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size, every_stage=True), norm_is_global)
    if world_size == 1:
        run(1, for_each, matrix(1), norm_is_global, group=False)


def norm_over_units(setup: Setup) -> None:
    """The same over several units and odd sizes, against torch on the unwrapped model."""
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for clip in (clip_by_method, clip_by_torch):
            reference, model = seeded(Stack, 2), seeded(Stack, 2)
            wrap(model, setup, {"block": fsdp.by_name("blocks.*"), "leaf": fsdp.by_class(nn.Linear)})
            optimizer, ref_optimizer = sgd(model), sgd(reference)
            for step in range(2):
                optimizer.zero_grad()
                ref_optimizer.zero_grad()
                mse(model, stack_batch(step, here.rank)).backward()
                mse(reference, joined(stack_batch, step, here.world_size)).backward()
                norm = float(clip(model, 0.05, norm_type))
                expected = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type=norm_type))
                assert abs(norm - expected) < 1e-6, (norm, expected, norm_type)
                optimizer.step()
                ref_optimizer.step()
            for name, found in gather_grads(model).items():
                # The factor is 1 / (norm + 1e-6); the norm may be taken in fp32.
                assert (found - reference.get_parameter(name).grad).abs().max() < 1e-7, name
            assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_G1_the_norm_covers_all_units(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), norm_over_units)


def other_norms(stage: int) -> None:
    model = fsdp.fsdp_wrap(Vec(5, 1.0), stage=stage)
    model(2.0).backward()
    expect_loud(lambda: model.w.grad.norm(), "w")
    expect_loud(lambda: torch.linalg.vector_norm(model.w.grad).item(), "w")
    assert abs(float(model.clip_grad_norm_(1e9)) - math.sqrt(20.0)) < 1e-6
    assert_rested(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_G1_any_other_norm_of_a_sharded_gradient_raises(world_size: int) -> None:
    run(world_size, for_each, [1, 2, 3], other_norms)


class WithIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Vec(3, 1.0)
        self.b = Vec(1, 1.0)
        self.free = Vec(5, 1.0)

    def forward(self, c: Tensor | float) -> Tensor:
        return self.a(c) + self.b(c) + self.free(c)


def ignored_counts_once(setup: Setup) -> None:
    """9 elements of 2.0: an ignored parameter is whole on every rank and enters the norm once."""
    for clip in ENTRIES.values():
        model = WithIgnored()
        wrap(model, setup, {"block": fsdp.by_class(Vec), "leaf": fsdp.by_name("a", "b")}, ignored=(model.free,))
        model(2.0).backward()
        assert abs(float(clip(model, 1.0, 2.0)) - 6.0) < 1e-6
        for name, grad in gather_grads(model).items():
            assert (grad - 2.0 / 6.0).abs().max() < 1e-6, name
        assert_rested(model)


def part_of_the_model(setup: Setup) -> None:
    reference, model = seeded(Stack, 2), seeded(Stack, 2)
    wrap(model, setup, {"block": fsdp.by_name("blocks.*"), "leaf": fsdp.by_class(nn.Linear)})
    mse(model, stack_batch(0, here.rank)).backward()
    mse(reference, joined(stack_batch, 0, here.world_size)).backward()
    for part in ("blocks.1", "head"):
        found = torch.nn.utils.clip_grad_norm_(model.get_submodule(part).parameters(), 1e9)
        expected = torch.nn.utils.clip_grad_norm_(reference.get_submodule(part).parameters(), 1e9)
        assert abs(float(found) - float(expected)) < 1e-9, part
    assert_rested(model)


def not_finite(setup: Setup) -> None:
    model = wrap(Vec(4, 1.0), setup, {})
    c = torch.ones(4, dtype=F64)
    c[2] = float("inf") if here.rank == 0 else 1.0
    model(c).backward()
    assert not math.isfinite(float(model.clip_grad_norm_(1.0)))
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_G1_ignored_parameters_parts_of_a_model_and_overflow(world_size: int) -> None:
    setups = [*layouts(world_size), Setup(policy="leaf", prefetch=2, reshard=True)]
    for body in (ignored_counts_once, part_of_the_model, not_finite):
        run(world_size, for_each, setups, body)


def nothing_to_measure(setup: Setup, size: int, c: float, expected: dict[float, float]) -> None:
    model = wrap(Vec(size, 2.0), setup, {})
    for clip in ENTRIES.values():
        for norm_type, norm in expected.items():
            model(c).backward()
            assert abs(float(clip(model, 100.0, norm_type)) - norm) < 1e-6, (norm_type, clip)
            model.zero_grad()
            assert model.w.grad is None
            assert float(clip(model, 100.0, norm_type)) == 0.0, norm_type
            assert model.w.grad is None
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_G3_ranks_with_nothing_to_measure(world_size: int) -> None:
    one = partial(nothing_to_measure, size=1, c=3.0, expected={2.0: 3.0, 1.0: 3.0, float("inf"): 3.0})
    three = partial(nothing_to_measure, size=3, c=2.0, expected={2.0: math.sqrt(12.0), 1.0: 6.0, float("inf"): 2.0})
    run(world_size, for_each, layouts(world_size), one)
    run(world_size, for_each, layouts(world_size), three)


class TwoDtypes(nn.Module):
    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.a = Vec(1, 1.0, first)
        self.b = Vec(1, 1.0, second)

    def forward(self, c: float, d: float) -> Tensor:
        return self.a(c) + self.b(d)


def mixed_dtypes(setup: Setup) -> None:
    for clip in ENTRIES.values():
        for swapped in (False, True):
            # The one-unit variant holds both dtypes in two flat parameters of the root.
            dtypes = (torch.bfloat16, torch.float32) if swapped else (torch.float32, torch.bfloat16)
            model = wrap(TwoDtypes(*dtypes), setup, {"block": fsdp.by_class(Vec), "leaf": fsdp.by_class(Vec)})
            (model(4.0, 3.0) if swapped else model(3.0, 4.0)).backward()
            norm = clip(model, 1.0, 2.0)
            assert abs(float(norm) - 5.0) < 1e-6, norm
            grads = gather_grads(model)
            single, half = (grads["b.w"], grads["a.w"]) if swapped else (grads["a.w"], grads["b.w"])
            assert single.dtype == torch.float32 and half.dtype == torch.bfloat16
            assert abs(single.item() - 0.59999988) < 1e-6, single
            assert half.item() == 0.80078125, half
            model.zero_grad()
            assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_G4_mixed_dtypes_in_one_norm(world_size: int) -> None:
    setups = [*layouts(world_size), Setup(policy="root"), Setup(policy="root", stage=1)]
    run(world_size, for_each, setups, mixed_dtypes)


def infinity_norm(setup: Setup) -> None:
    model = wrap(Vec(4, 1.0), setup, {})
    for entry, clip in ENTRIES.items():
        for norm_type in (float("inf"), "inf", math.inf):
            model.zero_grad()
            model(torch.tensor([3.0, 0, 0, 4.0], dtype=F64)).backward()
            norm = float(clip(model, 1.0, norm_type))
            assert abs(norm - 4.0) < 1e-6, (entry, norm_type, norm)
            largest = gather_grads(model)["w"].abs().max().item()
            assert abs(largest - 0.9999998) < 1e-6, (entry, norm_type, largest)
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_G5_the_infinity_norm_as_a_number_and_as_a_word(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), infinity_norm)


def clipped_training(setup: Setup) -> None:
    """Clipped SGD on `MLP`: the part of G7 that needs no offload."""
    reference, model = seeded(MLP), seeded(MLP)
    wrap(model, setup, {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear)})
    optimizer, ref_optimizer = sgd(model), sgd(reference)
    for step in range(3):
        optimizer.zero_grad()
        ref_optimizer.zero_grad()
        mse(model, local_batch(step, here.rank)).backward()
        mse(reference, joined(local_batch, step, here.world_size)).backward()
        norm = float(model.clip_grad_norm_(0.3))
        expected = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3))
        assert abs(norm - expected) < 1e-6 and norm > 0.3
        optimizer.step()
        ref_optimizer.step()
    assert_rested(model)
    for name, found in gather(model).items():
        # Parameters are fp64, but the clip factor may come from an fp32 norm.
        assert_close(found.float(), reference.get_parameter(name).detach().float(), what=name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_G7_clipped_steps(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), clipped_training)
