"""L. Life cycle and diagnostics; what wrapping does to the modules is in `test_L_modules.py`."""

from __future__ import annotations

import gc
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite import inspect
from tests.harness import (
    Block,
    Counts,
    Stack,
    Vec,
    adamw,
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

# ---- L1


def matches_nothing() -> None:
    def wrap(policy_of: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: fsdp.fsdp_wrap(seeded(Stack, 2), policy_of())

    expect_loud(wrap(lambda: fsdp.by_class("Blok")), "Blok", "Block", "Linear")
    expect_loud(wrap(lambda: fsdp.by_name("layers.*")), "layers.*", "blocks.*", "head")
    for empty in (lambda: fsdp.by_class(""), lambda: fsdp.by_class("Block", ""), lambda: fsdp.by_name("")):
        expect_loud(wrap(empty))
    expect_loud(wrap(lambda: fsdp.by_class(nn.Conv2d)), "Conv2d", "Block")
    expect_loud(wrap(lambda: fsdp.by_class("Decoder", "Encoder")), "Decoder", "Encoder")

    model = seeded(Stack, 2)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block", "Linear"))
    for block in model.blocks:
        assert isinstance(block, fsdp.FSDPUnit) and isinstance(block.linear, fsdp.FSDPUnit)
    assert isinstance(model.head, fsdp.FSDPUnit)

    model = seeded(Stack, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp.fsdp_wrap(model, fsdp.by_class("Block", "Decoder"))
    said = [str(w.message) for w in caught if "Decoder" in str(w.message)]
    assert len(said) == (1 if here.rank == 0 else 0), [str(w.message) for w in caught]
    assert all(isinstance(block, fsdp.FSDPUnit) for block in model.blocks)
    train_rank(model, sgd(model), [0], stack_batch, here.rank)
    assert_rested(model)


class Layered(nn.Module):
    """Other names, one level further down."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder.layer:
            x = layer(x)
        return self.out(x)


def matches_nothing_deeper() -> None:
    expect_loud(lambda: fsdp.fsdp_wrap(Layered(), fsdp.by_name("encoder.layers.*")), "encoder.layer.*")
    expect_loud(lambda: fsdp.fsdp_wrap(Layered(), fsdp.by_class("blocks")), "Block")
    # A container without a forward cannot be a unit.
    expect_loud(lambda: fsdp.fsdp_wrap(Layered(), fsdp.by_name("encoder.layer")), "encoder.layer", "ModuleList")


@pytest.mark.parametrize("world_size", [1, 2])
def test_L1_a_policy_that_matches_nothing(world_size: int) -> None:
    run(world_size, matches_nothing)
    run(world_size, matches_nothing_deeper)


# ---- L4


def full_bytes(model: nn.Module) -> int:
    return inspect.rest_report(model)["full_bytes"]


def never_stale(n: int, reshard: bool | None, nested: bool, stage: int) -> None:
    inner = Vec(n, 1.0)
    model = nn.Sequential(inner) if nested else inner
    policy = fsdp.by_class(Vec) if nested else None
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = float(n)
    for _ in range(3):
        with torch.no_grad():
            assert abs(model(1.0).item() - value) < 1e-9
        optimizer.zero_grad()
        loss = model(1.0)
        assert abs(loss.item() - value) < 1e-9
        if stage == 3 and here.world_size > 1:
            # None keeps the root's own parameters; any other unit is resharded.
            kept = reshard is False or (reshard is None and not nested)
            assert (full_bytes(model) > 0) == kept, (full_bytes(model), kept)
        with Counts() as counts:
            loss.backward()
        if stage == 3 and here.world_size > 1 and reshard is False:
            assert not counts.gathers, counts.calls
        optimizer.step()
        value -= 0.1 * n
        assert_rested(model)
    with torch.no_grad():
        assert abs(model(1.0).item() - value) < 1e-9


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_L4_the_root_obeys_reshard_after_forward(world_size: int) -> None:
    combinations = [(4, reshard, nested, 3) for reshard in (True, False, None) for nested in (False, True)]
    combinations += [(7, False, False, 3)]
    if world_size == 2:
        combinations += [(4, reshard, False, stage) for reshard in (True, False, None) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, never_stale)


# ---- L5


def inference_first(reshard: bool | None, policy: Any, stage: int, wrap_inside: bool) -> None:
    model, reference = seeded(Stack, 2), seeded(Stack, 2)

    def wrap() -> None:
        fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, stage=stage)

    if not wrap_inside:
        wrap()
    x = stack_batch(9, here.rank)[0]
    with torch.inference_mode():
        expected = reference(x)
        if wrap_inside:
            wrap()
        assert torch.allclose(model(x), expected, atol=1e-12, rtol=0)
    if reshard is not False:
        assert_rested(model)
    optimizer = sgd(model)
    for step in range(2):
        train_rank(model, optimizer, [step], stack_batch, here.rank)
        assert_rested(model)
        with torch.inference_mode():
            model(x)
    train_rank(model, optimizer, [2], stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(3), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_L5_inference_mode_first(world_size: int) -> None:
    blocks, leaves = fsdp.by_class("Block"), fsdp.by_class(nn.Linear)
    combinations = [(None, blocks, 3, False), (True, None, 3, False), (False, leaves, 3, False)]
    combinations += [(None, blocks, 3, True)]
    if world_size == 2:
        combinations += [(None, blocks, stage, False) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, inference_first)


# ---- L7


class RaiseInBackward(torch.autograd.Function):
    """Passes its input on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("boom")


class Fragile(Block):
    """A block that can be told to fail, in forward or in backward."""

    fail: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.fail == "forward":
            raise RuntimeError("boom")
        return RaiseInBackward.apply(y) if self.fail == "backward" else y


class FragileStack(Stack):
    """A stack of blocks that can be told to fail."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        for i in range(n):
            self.blocks[i] = Fragile()


def step_that_fails(model: nn.Module, where: str, block: int, batch: tuple[Tensor, ...]) -> None:
    model.blocks[block].fail = where
    try:
        loss = mse(model, batch)
        if where == "between":
            raise RuntimeError("boom")
        loss.backward()
    finally:
        model.blocks[block].fail = None


def error_then_clean_step(where: str, n: int, block: int, reshard: bool | None, prefetch: int, stage: int) -> None:
    model, reference = seeded(FragileStack, n), seeded(FragileStack, n)
    policy = fsdp.by_class(Fragile)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, prefetch=prefetch, stage=stage)
    optimizer = adamw(model)
    train_rank(model, optimizer, [0], stack_batch, here.rank)
    optimizer.zero_grad()
    try:
        step_that_fails(model, where, block, stack_batch(1, here.rank))
    except Exception as error:
        assert type(error) is RuntimeError and str(error) == "boom", repr(error)
    else:
        raise AssertionError("nothing was raised")
    optimizer.zero_grad()
    assert_rested(model)
    train_rank(model, optimizer, [2, 3], stack_batch, here.rank)
    train_ref(reference, adamw(reference), [0, 2, 3], stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_L7_an_error_in_the_middle_of_a_step(world_size: int) -> None:
    places = ("forward", "backward", "between")
    combinations = [(where, 3, 1, None, 1, 3) for where in places]
    combinations += [(where, 2, 0, False, 0, 3) for where in places]
    if world_size == 2:
        combinations += [(where, 4, block, True, 2, 3) for where in places for block in (0, 3)]
        combinations += [(where, 3, 1, None, 1, stage) for where in places for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, error_then_clean_step)


# ---- L9


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def settled(expected: int) -> int:
    """Tensors alive; the transport's threads may hold the last message for a moment after it arrived."""
    deadline = time.monotonic() + 2
    while (alive := tensors_alive()) > expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def everything_goes(policy: Any, precision: str, recompute: Any, fail: bool) -> None:
    def live() -> list[weakref.ref]:
        model = seeded(FragileStack, 2).float()
        fsdp.fsdp_wrap(model, policy, precision=precision, recompute=recompute)
        optimizer = adamw(model)
        batch = lambda step, rank: tuple(t.float() for t in stack_batch(step, rank))  # noqa: E731
        train_rank(model, optimizer, range(2), batch, here.rank)
        model.clip_grad_norm_(1.0)
        with fsdp.full_params(model):
            pass
        if fail:
            with pytest.raises(RuntimeError, match="boom"):
                step_that_fails(model, "backward", 1, batch(3, here.rank))
        loss = mse(model, batch(2, here.rank))
        assert loss.requires_grad
        return [weakref.ref(thing) for thing in (model, *model.blocks, *model.parameters(), optimizer)]

    before = tensors_alive()
    refs = live()
    after = settled(before)
    alive = [type(ref()).__name__ for ref in refs if ref() is not None]
    assert not alive, f"stay alive: {alive}"
    assert after <= before, f"{after - before} tensors stay alive"


def nothing_grows() -> None:
    model = seeded(Stack, 2)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"))
    optimizer = adamw(model)
    train_rank(model, optimizer, range(20), stack_batch, here.rank)
    time.sleep(0.2)  # the transport lets go of the last message
    before = tensors_alive()
    tracemalloc.start()
    try:
        # The allocations that tracing itself makes at its first steps are not the model's.
        train_rank(model, optimizer, range(20, 25), stack_batch, here.rank)
        gc.collect()
        bytes_before = tracemalloc.get_traced_memory()[0]
        train_rank(model, optimizer, range(25, 50), stack_batch, here.rank)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - bytes_before
    finally:
        # A transport thread that asks for memory while tracing stops crashes the interpreter: let them finish.
        time.sleep(0.2)
        tracemalloc.stop()
    assert settled(before) == before
    assert grown < 16 * 1024, grown
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_L9_nothing_is_leaked(world_size: int) -> None:
    blocks = fsdp.by_class(Fragile)
    combinations = [(blocks, "fp32", None, False), (None, "bf16", None, False), (blocks, "bf16", blocks, True)]
    run(world_size, for_each, combinations, everything_goes)
    run(world_size, nothing_grows)
