"""M. Many forwards, many backwards: in any number and order, within one step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite import inspect
from fsdplite.errors import FSDPError
from tests.harness import (
    MLP,
    Counts,
    Stack,
    assert_all,
    assert_parity,
    assert_rested,
    for_each,
    gather,
    gather_grads,
    here,
    joined,
    local_batch,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)


class Repeat(nn.Module):
    """One Linear(1,1) with weight 2, called `times` in a row, possibly some levels down."""

    def __init__(self, times: int, nested: bool = True) -> None:
        super().__init__()
        self.times = times
        layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(layer.weight, 2.0)
        self.inner = nn.ModuleDict({"layer": layer}) if nested else layer

    def forward(self, x: Tensor) -> Tensor:
        layer = self.inner["layer"] if isinstance(self.inner, nn.ModuleDict) else self.inner
        for _ in range(self.times):
            x = layer(x)
        return x


def repeated(times: int, nested: bool, stage: int, reshard: bool | None, prefetch: int) -> None:
    model = fsdp.fsdp_wrap(
        Repeat(times, nested),
        fsdp.by_class(nn.Linear),
        stage=stage,
        reshard_after_forward=reshard,
        prefetch=prefetch,
    )
    optimizer = sgd(model)
    y = model(torch.ones(1, 1, dtype=torch.float64))
    assert y.item() == 2.0**times
    with Counts() as counts:
        y.sum().backward()
    if here.world_size > 1:
        assert len(counts.reductions) == 1, counts.calls
        if stage == 3:
            assert len(counts.of("reduce_scatter")) == 1, counts.calls
    gradient = times * 2.0 ** (times - 1)
    assert_all(gather_grads(model), gradient)
    optimizer.step()
    assert_all(gather(model), 2 - 0.1 * gradient, tolerance=1e-12)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_M1_one_unit_called_several_times_in_a_forward(world_size: int) -> None:
    combinations = [(3, True, 3, None, 1), (3, False, 3, False, 0), (3, True, 3, True, 2), (2, True, 3, None, 1)]
    combinations += [(5, False, 3, True, 1)]
    if world_size == 2:
        combinations += [(3, True, stage, None, 1) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, repeated)


class Twins(nn.Module):
    """Two branches share one block; a third block follows. The shared one is used before and after another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = MLP((5, 3, 5))
        self.between = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.between(self.shared(x))) * self.shared(x.flip(0))


def twins(reshard: bool | None, prefetch: int) -> None:
    model, reference = seeded(Twins), seeded(Twins)
    policy = fsdp.by_class(MLP, nn.Linear)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, prefetch=prefetch)
    batches = lambda step, rank: local_batch(step, rank, 5, 5)  # noqa: E731

    def loss(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        # Rows are flipped inside a batch: each rank's rows stay together, also in REF.
        outs = [m(x) - t for x, t in zip(batch[0].split(4), batch[1].split(4), strict=True)]
        return torch.cat(outs).square().mean()

    train_rank(model, sgd(model), range(2), batches, here.rank, loss)
    train_ref(reference, sgd(reference), range(2), batches, here.world_size, loss)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_M1_a_shared_branch_between_other_units(world_size: int) -> None:
    run(world_size, for_each, [(None, 1), (True, 0), (False, 2)], twins)


Build = Callable[[], nn.Module]


def two_forwards(order: str, reshard: bool | None, policy: object, build: Build, fan_in: int, stage: int) -> None:
    model, reference = seeded(build), seeded(build)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, stage=stage)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    batch = lambda step, rank: local_batch(step, rank, fan_in)  # noqa: E731
    for step in (0, 2):
        for m, o, batches in (
            (model, optimizer, [batch(step + i, here.rank) for i in (0, 1)]),
            (reference, reference_optimizer, [joined(batch, step + i, here.world_size) for i in (0, 1)]),
        ):
            o.zero_grad()
            first, second = ((m(x) - target).square().mean() for x, target in batches)
            if order == "joint":
                (first + second).backward()
            else:
                for loss in (first, second) if order == "12" else (second, first):
                    loss.backward()
        assert_parity(model, reference)
        assert_rested(model)
        optimizer.step()
        reference_optimizer.step()
    assert_parity(model, reference)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_M2_two_forwards_then_the_backwards(world_size: int) -> None:
    leaves = fsdp.by_class(nn.Linear)
    combinations = []
    for order in ("joint", "12", "21"):
        combinations += [(order, True, None, MLP, 7, 3), (order, False, leaves, MLP, 7, 3)]
        if world_size == 2:
            combinations += [(order, False, None, MLP, 7, 3), (order, True, leaves, MLP, 7, 3)]
            combinations.append((order, None, fsdp.by_class("Block"), deep_stack, 5, 3))
            combinations += [(order, None, leaves, MLP, 7, stage) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, two_forwards)


def deep_stack() -> nn.Module:
    return Stack(3)


class Wrapper(nn.Module):
    """The unit under test is below a root without parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def transformed(nested: bool) -> None:
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
    model = Wrapper(layer) if nested else layer
    reference = copy.deepcopy(model)
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear) if nested else None)
    point, tangent = torch.tensor([[5.0, 6.0]]).double(), torch.tensor([[1.0, 0.0]]).double()
    try:
        value, slope = torch.func.jvp(model, (point,), (tangent,))
    except FSDPError as error:
        assert "'inner'" in str(error) or "(root)" in str(error), str(error)
    else:
        assert value.item() == 39.0 and slope.item() == 3.0
    assert_rested(model)
    batches = lambda step, rank: local_batch(step, rank, 2, 1)  # noqa: E731
    train_rank(model, sgd(model), [0, 1], batches, here.rank)
    train_ref(reference, sgd(reference), [0, 1], batches, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_M5_functional_transforms(world_size: int) -> None:
    run(world_size, for_each, [(True,), (False,)], transformed)


def dropped_forwards(n: int, reshard: bool | None, prefetch: int) -> None:
    model, reference = seeded(Stack, n), seeded(Stack, n)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), reshard_after_forward=reshard, prefetch=prefetch)
    optimizer = sgd(model)
    for step in (7, 8):
        output = model(stack_batch(step, here.rank)[0])
        assert output.requires_grad
        del output
    full_at_first_block: list[int] = []

    def look(*_: object) -> None:
        full_at_first_block.append(len(inspect.rest_report(model)["unsharded_units"]))

    handle = model.blocks[0].register_forward_pre_hook(look)
    train_rank(model, optimizer, [0], stack_batch, here.rank)
    handle.remove()
    # The root, the block that runs, and those gathered ahead: whatever an earlier forward left is gone.
    assert full_at_first_block[0] <= 2 + prefetch, full_at_first_block
    train_ref(reference, sgd(reference), [0], stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_M8_a_forward_in_training_mode_without_a_backward(world_size: int) -> None:
    combinations = [(n, reshard, 1) for n in (2, 5) for reshard in (None, True, False)]
    combinations += [(4, None, 0), (6, False, 2)]
    run(world_size, for_each, combinations, dropped_forwards)
