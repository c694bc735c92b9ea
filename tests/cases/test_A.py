"""A. Accumulation and averaging."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite import inspect
from tests.cases.matrix import WORLD_SIZES, Setup, layouts, matrix, wrap
from tests.harness import (
    Counts,
    Stack,
    Vec,
    assert_all,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    gather_grads,
    here,
    mean_backward,
    mse,
    run,
    seeded,
    sgd,
    stack_batch,
)


def micro_batch(model: nn.Module, m: int, *, sync: bool) -> None:
    """Micro-batch m of A1: c = m * (r + 1), whose mean over 2 ranks is 1.5 * m."""
    with nullcontext() if sync else model.no_sync():
        model(float(m * (here.rank + 1))).backward()


def accumulated(setup: Setup) -> None:
    for synced, reductions in (((True,) * 4, 4), ((False, False, False, True), 1)):
        model = wrap(Vec(4, 1.0), setup, {})
        with Counts() as counts:
            for m, sync in enumerate(synced, start=1):
                micro_batch(model, m, sync=sync)
                if sync and setup.stage >= 2:
                    assert inspect.rest_report(model)["gradient_bytes"] == 0
        assert_all(gather_grads(model), 15.0)
        if setup.mesh is None:
            assert len(counts.reductions) == reductions, counts.calls
        sgd(model).step()
        assert_all(gather(model), -0.5, tolerance=1e-12)
        assert_rested(model)


def accumulated_by_flag(setup: Setup) -> None:
    """`set_requires_gradient_sync` says the same as `no_sync`."""
    model = wrap(Vec(4, 1.0), setup, {})
    model.set_requires_gradient_sync(False)
    for m in (1, 2, 3):
        model(float(m * (here.rank + 1))).backward()
    model.set_requires_gradient_sync(True)
    micro_batch(model, 4, sync=True)
    assert_all(gather_grads(model), 15.0)
    assert_rested(model)


@pytest.mark.slow
def test_A1_accumulating_without_and_with_no_sync() -> None:
    run(2, for_each, matrix(2), accumulated)
    run(2, for_each, layouts(2), accumulated_by_flag)
    doc = (fsdp.FSDPUnit.no_sync.__doc__ or "").lower()
    assert "full" in doc or "unsharded" in doc, "no_sync does not say that it keeps full-size gradients"


def accumulated_stack(synced: tuple[bool, ...], setup: Setup) -> None:
    """The kind, on several units with parameters of several sizes, also where a unit is used in some passes only."""
    reference, model = seeded(Stack, 2), seeded(Stack, 2)
    wrap(model, setup, {"block": fsdp.by_name("blocks.*"), "leaf": fsdp.by_class(nn.Linear)})
    optimizer, ref_optimizer = sgd(model), sgd(reference)
    for step in range(2):
        optimizer.zero_grad()
        ref_optimizer.zero_grad()
        for micro, sync in enumerate(synced):
            with nullcontext() if sync else model.no_sync():
                mse(model, stack_batch(10 * step + micro, here.rank)).backward()
            mean_backward(
                reference, here.world_size, lambda m, r, micro=micro: mse(m, stack_batch(10 * step + micro, r))
            )
        assert_parity(model, reference)
        optimizer.step()
        ref_optimizer.step()
        assert_parity(model, reference)
        assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_A1_accumulation_over_several_units(world_size: int) -> None:
    for synced in ((True, True, True), (False, False, True), (False, True, True)):
        run(world_size, for_each, matrix(world_size), partial(accumulated_stack, synced))


def part_of_the_model_is_quiet(setup: Setup) -> None:
    """`set_requires_gradient_sync` of a nested unit concerns that unit alone."""
    reference, model = seeded(Stack, 2), seeded(Stack, 2)
    wrap(model, setup, {"block": fsdp.by_name("blocks.*")})
    model.blocks[0].set_requires_gradient_sync(False)
    mse(model, stack_batch(0, here.rank)).backward()
    model.blocks[0].set_requires_gradient_sync(True)
    mse(model, stack_batch(1, here.rank)).backward()
    for step in (0, 1):
        mean_backward(reference, here.world_size, lambda m, r, step=step: mse(m, stack_batch(step, r)))
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_A1_one_unit_without_synchronisation(world_size: int) -> None:
    run(world_size, for_each, layouts(world_size), part_of_the_model_is_quiet)


def sequences(setup: Setup) -> None:
    for sequence, expected in (("NS", 4.5), ("NNS", 9.0), ("SNS", 9.0), ("SS", 4.5), ("NSNS", 15.0), ("SNNS", 15.0)):
        model = wrap(Vec(4, 1.0), setup, {})
        for m, letter in enumerate(sequence, start=1):
            micro_batch(model, m, sync=letter == "S")
        found = gather_grads(model)
        assert torch.equal(found["w"], torch.full((4,), expected, dtype=torch.float64)), (sequence, found)
        sgd(model).step()
        assert_all(gather(model), 1.0 - 0.1 * expected, tolerance=1e-12)
        assert_rested(model)


def pending_part(setup: Setup) -> None:
    """After S, N the second pass is pending: 4.5 or LOUD, never 1.5; a following S brings it in."""
    for act in ("step", "clip", "torch clip"):
        model = wrap(Vec(4, 1.0), setup, {})
        optimizer = sgd(model)
        micro_batch(model, 1, sync=True)
        micro_batch(model, 2, sync=False)
        acts = {
            "step": optimizer.step,
            "clip": lambda model=model: float(model.clip_grad_norm_(1e9)),
            "torch clip": lambda model=model: float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)),
        }
        try:
            result = acts[act]()
        except fsdp.FSDPError as error:
            assert "no_sync" in str(error) or "synchroni" in str(error), str(error)
            assert_all(gather(model), 1.0)
            micro_batch(model, 3, sync=True)
            assert_all(gather_grads(model), 9.0)
            optimizer.step()
            assert_all(gather(model), 0.1, tolerance=1e-12)
        else:
            if act == "step":
                assert_all(gather(model), 0.55, tolerance=1e-12)
            else:
                assert abs(result - 9.0) < 1e-6  # 4.5 in each of 4 elements
        optimizer.zero_grad()
        assert_rested(model)


def zero_grad_drops_pending_parts(setup: Setup) -> None:
    for how in ("model", "optimizer"):
        model = wrap(Vec(4, 1.0), setup, {})
        optimizer = sgd(model)
        micro_batch(model, 1, sync=True)
        micro_batch(model, 2, sync=False)
        (model if how == "model" else optimizer).zero_grad()
        micro_batch(model, 3, sync=True)
        assert_all(gather_grads(model), 4.5)
        optimizer.step()
        assert_all(gather(model), 0.55, tolerance=1e-12)
        # Also where everything was pending: N, zero_grad, S.
        optimizer.zero_grad()
        micro_batch(model, 2, sync=False)
        (model if how == "model" else optimizer).zero_grad()
        micro_batch(model, 3, sync=True)
        assert_all(gather_grads(model), 4.5)
        optimizer.zero_grad()
        assert_rested(model)


@pytest.mark.slow
def test_A2_any_order_of_synchronised_and_unsynchronised_passes() -> None:
    run(2, for_each, matrix(2), sequences)
    run(2, for_each, matrix(2), pending_part)
    run(2, for_each, matrix(2), zero_grad_drops_pending_parts)


def every_micro_batch_counts(setup: Setup) -> None:
    model = wrap(Vec(4, 1.0), setup, {})
    for expected in (3.0, 6.0):
        model(1.0).backward()
        model(2.0).backward()
        assert_all(gather_grads(model), expected)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_A4_every_micro_batch_counts(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), every_micro_batch_counts)


def long_sum_of_small_gradients(setup: Setup) -> None:
    for quiet_passes in (0, 64):
        model = wrap(Vec(1, 1.0, torch.float32), setup, {}, precision="bf16")
        for index, c in enumerate([1.0] + [2.0**-9] * 64):
            with model.no_sync() if index < quiet_passes else nullcontext():
                model(c).backward()
        grad = gather_grads(model)["w"]
        assert grad.dtype == torch.float32
        assert grad.item() == 1.125, (quiet_passes, grad)
        assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_A6_accumulation_in_fp32_under_low_precision_compute(world_size: int) -> None:
    run(world_size, for_each, layouts(world_size), long_sum_of_small_gradients)


# One call per rank, however many tokens it holds: every rank runs every unit as often as the others.
TOKENS = (torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([10.0], dtype=torch.float64))


def mean_over_tokens(setup: Setup) -> None:
    tokens = TOKENS[here.rank]
    model = wrap(Vec(1, 1.0), setup, {})

    def backward(divide_by: int) -> float:
        model.zero_grad()
        (model(tokens) / divide_by).backward()
        return gather_grads(model)["w"].item()

    assert backward(len(tokens)) == 6.0
    model.set_gradient_divide_factor(1)
    assert backward(4) == 4.0
    model.set_gradient_divide_factor(8)
    assert backward(4) == 0.5
    model.set_gradient_divide_factor(None)
    assert backward(len(tokens)) == 6.0
    for wrong in (0, -1, float("nan")):
        expect_loud(lambda wrong=wrong: model.set_gradient_divide_factor(wrong), "divide")
    assert backward(len(tokens)) == 6.0
    assert_rested(model)


def test_A7_the_mean_over_ranks_is_not_the_mean_over_tokens() -> None:
    run(2, for_each, matrix(2), mean_over_tokens)


def divisor_means_the_same(setup: Setup) -> None:
    """A divisor of 4 divides the sum over all ranks of all meshes, over both passes of an accumulation."""
    model = wrap(Vec(4, 1.0), setup, {})
    model.set_gradient_divide_factor(4)
    with model.no_sync():
        model(1.0 * (here.rank + 1)).backward()
    model(2.0 * (here.rank + 1)).backward()
    total = 3.0 * here.world_size * (here.world_size + 1) / 2
    assert_all(gather_grads(model), total / 4, tolerance=1e-12)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_A7_a_divisor_means_the_same_at_every_mesh(world_size: int) -> None:
    run(world_size, for_each, layouts(world_size, every_stage=True), divisor_means_the_same)
