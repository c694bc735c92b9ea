"""C. Recompute: inside a unit, around a unit, by the library's `recompute=` and by torch's checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdplite as fsdp
from fsdplite.errors import FSDPError
from tests.harness import (
    Block,
    Counts,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather_grads,
    here,
    joined,
    local_batch,
    mse,
    run,
    seeded,
    sgd,
    train_rank,
    train_ref,
)

INSIDE = ("inside, recompute=", "inside, checkpoint", "inside, reentrant")
OUTSIDE = ("outside, checkpoint", "outside, reentrant")
BOTH = ("in and out",)


class Inner(nn.Module):
    """A block that recomputes its own body, as user code does it; `way` says how."""

    def __init__(self, way: str, width: int) -> None:
        super().__init__()
        self.way = way
        self.body = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "inside, reentrant":
            return checkpoint(self.body, x, use_reentrant=True)
        if self.way in ("inside, checkpoint", "in and out"):
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class Blocks(nn.Module):
    """`n` blocks and nothing else: the root has no parameters of its own."""

    def __init__(self, n: int, way: str = "", width: int = 5) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Inner(way, width) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.way == "outside, reentrant":
            return checkpoint(block, x, use_reentrant=True)
        if self.way in ("outside, checkpoint", "in and out"):
            return checkpoint(block, x, use_reentrant=False)
        return block(x)


def batch_of_width(width: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    return lambda step, rank: local_batch(step, rank, width, width)


def leafy_mse(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The inputs need gradients, so that reentrant recomputation has something to follow."""
    x, target = batch
    return (model(x.clone().requires_grad_()) - target).square().mean()


def nesting(n: int, way: str, stage: int, reshard: bool | None, prefetch: int, width: int = 5) -> None:
    model, reference = seeded(Blocks, n, way, width), seeded(Blocks, n, "", width)
    recompute = fsdp.by_class("Block") if way == "inside, recompute=" else None
    fsdp.fsdp_wrap(
        model,
        fsdp.by_class(Inner),
        stage=stage,
        reshard_after_forward=reshard,
        prefetch=prefetch,
        recompute=recompute,
    )
    optimizer = sgd(model)
    batch = batch_of_width(width)
    for step in range(2):
        with Counts() as counts:
            train_rank(model, optimizer, [step], batch, here.rank, leafy_mse)
        if here.world_size > 1 and stage == 3:
            assert len(counts.of("reduce_scatter")) == n, counts.calls
            if reshard is True:
                expected = [2 * n] if way in INSIDE else range(2 * n, 3 * n + 1)
                assert len(counts.gathers) in expected, counts.calls
    train_ref(reference, sgd(reference), range(2), batch, here.world_size, leafy_mse)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_C1_either_nesting_of_unit_and_recomputation(world_size: int) -> None:
    combinations: list[tuple] = [(3, way, 3, True, 1) for way in INSIDE + OUTSIDE + BOTH]
    if world_size == 2:
        combinations += [(2, way, 3, None, prefetch) for way, prefetch in zip(INSIDE + OUTSIDE, (0, 2, 0, 2, 0))]
        combinations += [(4, "inside, recompute=", 3, False, 2, 3), (4, "outside, checkpoint", 3, False, 2, 3)]
        combinations += [(3, way, stage, True, 1) for way in (INSIDE[0], OUTSIDE[0]) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, nesting)


class Segments(Blocks):
    """One checkpoint around several units at once, and recomputation of each unit inside it."""

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        x = checkpoint(self.part, x, 0, half, use_reentrant=False)
        return checkpoint(self.part, x, half, len(self.blocks), use_reentrant=False)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        for block in self.blocks[start:stop]:
            x = block(x)
        return x


def segments(way: str, policy: object, recompute: object, prefetch: int) -> None:
    model, reference = seeded(Segments, 4, way), seeded(Blocks, 4)
    fsdp.fsdp_wrap(model, policy, recompute=recompute, prefetch=prefetch)
    batch = batch_of_width(5)
    train_rank(model, sgd(model), range(2), batch, here.rank)
    train_ref(reference, sgd(reference), range(2), batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_C1_segments_of_units_and_several_depths(world_size: int) -> None:
    combinations = [
        ("", fsdp.by_class(Inner), None, 1),
        ("inside, checkpoint", fsdp.by_class(Inner), None, 2),
        ("", fsdp.by_class(Inner), fsdp.by_class("Block"), 0),
        ("", fsdp.by_class(Inner), fsdp.by_class(Inner), 1),
        ("", fsdp.by_class(nn.Linear), fsdp.by_class(Inner), 1),
        ("", fsdp.by_class(Inner) | fsdp.by_class(nn.Linear), fsdp.by_class("Block"), 1),
        ("", None, fsdp.by_class(Inner), 1),
    ]
    run(world_size, for_each, combinations, segments)


class Dropping(nn.Module):
    """A block whose masks must be the same ones when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


class DroppingStack(Blocks):
    """Blocks with dropout; `way` as in `Blocks`."""

    def __init__(self, n: int, way: str = "") -> None:
        super().__init__(n, way)
        for i in range(n):
            self.blocks[i] = Dropping()


def masks_again(way: str, policy: object, recompute: object) -> None:
    """Against each rank's batch run alone under that rank's seed, gradients averaged."""
    model, reference = seeded(DroppingStack, 3, way), seeded(DroppingStack, 3)
    fsdp.fsdp_wrap(model, policy, recompute=recompute)
    batch = batch_of_width(5)
    torch.manual_seed(here.rank)
    for step in range(2):
        leafy_mse(model, batch(step, here.rank)).backward()
    for rank in range(here.world_size):
        torch.manual_seed(rank)
        for step in range(2):
            (leafy_mse(reference, batch(step, rank)) / here.world_size).backward()
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_C1_dropout_draws_the_same_masks_again(world_size: int) -> None:
    blocks = fsdp.by_class(Dropping)
    combinations = [("", blocks, blocks), ("", None, blocks), ("outside, checkpoint", blocks, None)]
    combinations += [("outside, reentrant", blocks, None)]
    run(world_size, for_each, combinations, masks_again)


def recompute_matches_nothing() -> None:
    expect_loud(lambda: fsdp.fsdp_wrap(Blocks(2), recompute=fsdp.by_class("Innr")), "Innr", "Inner")
    expect_loud(lambda: fsdp.fsdp_wrap(Blocks(2), recompute=fsdp.by_name("layers.*")), "blocks.*")


def test_C1_a_recompute_policy_that_matches_nothing() -> None:
    run(1, recompute_matches_nothing)


class Options(nn.Module):
    """Its keyword arguments have names that `torch.utils.checkpoint` has too, and some are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor, *, debug: bool, context_fn: str, scale: Tensor, use_reentrant: int = 3) -> Tensor:
        assert debug and context_fn == "mine" and use_reentrant == 3
        return torch.tanh(self.linear(x) * scale)


class OptionsStack(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Options() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        y = first(x, debug=True, context_fn="mine", scale=x.mean(1, keepdim=True))
        return second(x=y, debug=True, context_fn="mine", scale=y[:, :1])


def arguments_pass(policy: object, stage: int) -> None:
    model, reference = seeded(OptionsStack), seeded(OptionsStack)
    fsdp.fsdp_wrap(model, policy, recompute=fsdp.by_class(Options), stage=stage)
    train_rank(model, sgd(model), range(2), batch_of_width(5), here.rank, leafy_mse)
    train_ref(reference, sgd(reference), range(2), batch_of_width(5), here.world_size, leafy_mse)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_C1_arguments_of_a_recomputed_module(world_size: int) -> None:
    run(world_size, for_each, [(fsdp.by_class(Options), 3), (None, 3)], arguments_pass)


class Adapted(nn.Module):
    """A frozen base with a trainable low-rank path beside it."""

    def __init__(self, width: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.float64).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False, dtype=torch.float64)
        self.up = nn.Linear(rank, width, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Frozen(nn.Module):
    """Frozen embedding, adapted blocks that may be recomputed by torch's checkpoint, trainable head."""

    def __init__(self, n: int = 1, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Embedding(5, 4, dtype=torch.float64).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(n))
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def id_batch(step: int, rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(5, (4,), generator=generator)
    return ids, torch.randn(4, 3, generator=generator, dtype=torch.float64)


def frozen_input(n: int, way: str, prefetch: int) -> None:
    use_reentrant = {"a": None, "b": False, "c": True}[way]
    model, reference = seeded(Frozen, n, use_reentrant), seeded(Frozen, n)
    policy = fsdp.by_class(nn.Embedding, Adapted) | fsdp.by_name("head")
    recompute = fsdp.by_class(Adapted) if way == "a" else None
    fsdp.fsdp_wrap(model, policy, recompute=recompute, prefetch=prefetch)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    for step in range(2):
        optimizer.zero_grad()
        try:
            mse(model, id_batch(step, here.rank)).backward()
        except FSDPError as error:
            assert way == "c", "only reentrant recomputation may be refused"
            assert "use_reentrant=False" in str(error) and "layers." in str(error), str(error)
            optimizer.zero_grad()
            assert_rested(model)
            return
        reference_optimizer.zero_grad()
        mse(reference, joined(id_batch, step, here.world_size)).backward()
        found = gather_grads(model)
        assert found["layers.0.down.weight"] is not None
        assert_parity(model, reference)
        optimizer.step()
        reference_optimizer.step()
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_C3_recomputed_units_behind_a_frozen_input(world_size: int) -> None:
    combinations = [(n, way, prefetch) for way in "abc" for n, prefetch in ((1, 1), (2, 0))]
    run(world_size, for_each, combinations, frozen_input)


class Once(nn.Module):
    """One recomputed unit in a root without parameters, called as often as the root is asked to."""

    def __init__(self, way: str, width: int) -> None:
        super().__init__()
        self.way = way
        self.unit = Inner(way, width)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            if self.way == "outside, checkpoint":
                x = checkpoint(self.unit, x, use_reentrant=False)
            elif self.way == "outside, reentrant":
                x = checkpoint(self.unit, x, use_reentrant=True)
            else:
                x = self.unit(x)
        return x


def called_again(way: str, order: str, width: int, reshard: bool | None) -> None:
    model, reference = seeded(Once, way, width), seeded(Once, "", width)
    recompute = fsdp.by_class("Block") if way == "inside, recompute=" else None
    fsdp.fsdp_wrap(model, fsdp.by_class(Inner), recompute=recompute, reshard_after_forward=reshard)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    batch = batch_of_width(width)
    for step in (0, 2):
        for m, o, batches in (
            (model, optimizer, [batch(step + i, here.rank) for i in (0, 1)]),
            (reference, reference_optimizer, [joined(batch, step + i, here.world_size) for i in (0, 1)]),
        ):
            o.zero_grad()
            if order == "twice":
                x, target = batches[0]
                (m(x.clone().requires_grad_(), times=2) - target).square().mean().backward()
            else:
                first, second = (leafy_mse(m, b) for b in batches)
                for loss in (first, second) if order == "12" else (second, first):
                    loss.backward()
        assert_parity(model, reference)
        assert_rested(model)
        optimizer.step()
        reference_optimizer.step()
    assert_parity(model, reference)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_C5_a_recomputed_unit_called_more_than_once(world_size: int) -> None:
    ways = INSIDE + OUTSIDE + BOTH
    if world_size == 2:
        combinations = [(way, order, 5, True) for way, order in itertools.product(ways, ("twice", "12", "21"))]
    else:
        combinations = [(way, order, 5, True) for way, order in zip(ways, ("twice", "12", "21") * 2, strict=True)]
    combinations += [(way, order, 3, None) for way, order in zip(ways, ("21", "twice", "12") * 2, strict=True)]
    combinations += [(ways[0], "12", 3, False), (ways[3], "21", 3, False)]
    run(world_size, for_each, combinations, called_again)
