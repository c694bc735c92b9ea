"""P. Weights used outside `forward`: other entry points, losses, side doors, in-place changes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdplite as fsdp
from tests.cases.matrix import WORLD_SIZES, Setup, layouts, matrix, wrap
from tests.harness import (
    Counts,
    LowPrecisionReference,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    here,
    local_batch,
    mean_backward,
    mse,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

F64 = torch.float64


class Enc(nn.Module):
    def __init__(self, fan_in: int = 5, fan_out: int = 3) -> None:
        super().__init__()
        self.proj = nn.Linear(fan_in, fan_out, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).tanh()

    def encode(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Generator(nn.Module):
    """Two `Enc` units, and a root with weights of its own and a second entry point."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Enc(5, 5), Enc(5, 5)])
        self.head = nn.Linear(5, 3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for turn in range(5):
            x = self.blocks[turn % 2](x)
        return self.head(x)


ENC = {"block": fsdp.by_class(Enc), "leaf": fsdp.by_class(Enc, nn.Linear)}


def encode_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, target = batch
    return (model.encode(x) - target).square().mean()


def other_entry_point(setup: Setup) -> None:
    reference, model = seeded(Enc), seeded(Enc)
    wrap(model, setup, {"leaf": fsdp.by_class(nn.Linear)}, forward_methods=("encode",))
    x, _ = stack_batch(9, here.rank)
    assert torch.equal(model.encode(x), reference.encode(x))
    with torch.no_grad():
        assert torch.equal(model.encode(x), reference.encode(x))
    assert_rested(model)

    def both(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return encode_loss(model, batch) + mse(model, batch)

    for loss_of in (encode_loss, mse, both):
        optimizer, ref_optimizer = sgd(model), sgd(reference)
        train_rank(model, optimizer, [0, 1], stack_batch, here.rank, loss_of)
        assert_rested(model)
        train_ref(reference, ref_optimizer, [0, 1], stack_batch, here.world_size, loss_of)
        assert_parity(model, reference)


def generate_at_the_root(setup: Setup) -> None:
    reference, model = seeded(Generator), seeded(Generator)
    wrap(model, setup, ENC, forward_methods=("encode", "generate"))
    x, target = stack_batch(9, here.rank)
    assert torch.equal(model.generate(x), reference.generate(x))
    assert_rested(model)

    # The nested unit's own entry point, outside any call of the root.
    if setup.policy != "root":
        assert torch.equal(model.blocks[1].encode(x), reference.blocks[1].encode(x))
        model.blocks[1].encode(x).sum().backward()
        model.zero_grad()
    optimizer, ref_optimizer = sgd(model), sgd(reference)
    train_rank(model, optimizer, [0, 1], stack_batch, here.rank)
    train_ref(reference, ref_optimizer, [0, 1], stack_batch, here.world_size)
    assert torch.equal(model.generate(x), reference.generate(x)) or here.world_size > 1
    assert_close(model.generate(x), reference.generate(x))
    assert_parity(model, reference)
    assert_rested(model)


def undeclared(stage: int) -> None:
    x = torch.ones(4, 5, dtype=F64)
    model = fsdp.fsdp_wrap(seeded(Enc), stage=stage)
    expect_loud(lambda: model.encode(x), "proj.weight", "forward_methods")
    with torch.no_grad():
        expect_loud(lambda: model.encode(x), "proj.weight", "forward_methods")
    nested = fsdp.fsdp_wrap(seeded(Generator), ENC["block"], stage=stage)
    expect_loud(lambda: nested.generate(x), "head.weight", "forward_methods")
    expect_loud(lambda: nested.blocks[1].encode(x), "blocks.1.proj.weight", "forward_methods")
    # After the refusals the declared way still works.
    assert_close(nested(x), seeded(Generator)(x))
    nested(x).sum().backward()
    nested.zero_grad()
    assert_rested(model, nested)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_P1_other_entry_points_behave_as_forward_does(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), other_entry_point)
    run(world_size, for_each, matrix(world_size), generate_at_the_root)
    run(world_size, for_each, [1, 2, 3], undeclared)


class Hidden(nn.Module):
    """The root returns hidden states; `head` is used by the loss alone."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5, dtype=dtype)
        self.head = nn.Linear(5, 3, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh()


def head_loss(weight: Tensor, h: Tensor, target: Tensor, chunks: int) -> Tensor:
    """The loss uses `head.weight` on 1 or 3 slices of the hidden states (4 rows: 2, 1 and 1)."""
    logits = torch.cat([F.linear(part, weight) for part in h.tensor_split(chunks)])
    return (logits.to(target.dtype) - target).square().mean()


def plain_loss(model: nn.Module, batch: tuple[Tensor, ...], chunks: int) -> Tensor:
    return head_loss(model.head.weight, model(batch[0]), batch[1], chunks)


def loss_in_context(
    model: nn.Module, batch: tuple[Tensor, ...], chunks: int, dtype: torch.dtype, forward_inside: bool = False
) -> Tensor:
    h = None if forward_inside else model(batch[0])
    with fsdp.full_params(model.head):
        assert model.head.weight.shape == (3, 5) and model.head.weight.dtype == dtype
        h = model(batch[0]) if forward_inside else h
        return head_loss(model.head.weight, h, batch[1], chunks)


LINEAR = {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear)}


def loss_uses_a_weight(setup: Setup) -> None:
    for chunks, forward_inside in ((1, False), (3, False), (1, True)):
        reference, model = seeded(Hidden), seeded(Hidden)
        wrap(model, setup, LINEAR)
        loss_of = partial(loss_in_context, chunks=chunks, dtype=F64, forward_inside=forward_inside)
        train_rank(model, sgd(model), range(2), local_batch, here.rank, loss_of)
        assert_rested(model)
        train_ref(reference, sgd(reference), range(2), local_batch, here.world_size, partial(plain_loss, chunks=chunks))
        assert_parity(model, reference)


def loss_uses_a_bf16_weight(setup: Setup) -> None:
    batch_of = partial(local_batch, dtype=torch.float32)
    for chunks in (1, 3):
        masters, model = seeded(Hidden, torch.float32), seeded(Hidden, torch.float32)
        wrap(model, setup, LINEAR, precision="bf16")
        with fsdp.full_params(model.head, writeback=True):
            assert model.head.weight.dtype == torch.float32
            assert torch.equal(model.head.weight, masters.head.weight)
        loss_of = partial(loss_in_context, chunks=chunks, dtype=torch.bfloat16)
        train_rank(model, sgd(model), range(2), batch_of, here.rank, loss_of)
        assert_rested(model)
        oracle = LowPrecisionReference(masters, torch.bfloat16)
        oracle.train(sgd(masters), range(2), batch_of, here.world_size, partial(plain_loss, chunks=chunks))
        assert_parity(model, masters, bitwise=here.world_size <= 2)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_P2_the_loss_uses_a_childs_weight(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), loss_uses_a_weight)
    run(world_size, for_each, layouts(world_size), loss_uses_a_bf16_weight)


class Gate(nn.Module):
    """A parent that multiplies by a child's matrix inside its own forward, where the child is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5, dtype=F64)
        self.gate = nn.Linear(5, 5, bias=False, dtype=F64)
        self.out = nn.Linear(5, 3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if isinstance(self.gate, fsdp.FSDPUnit):
            with fsdp.full_params(self.gate):
                mixed = h @ self.gate.weight
        else:
            mixed = h @ self.gate.weight
        return self.out(mixed.tanh() + self.gate(h))


def parent_uses_a_weight(setup: Setup) -> None:
    reference, model = seeded(Gate), seeded(Gate)
    wrap(model, setup, LINEAR)
    train_rank(model, sgd(model), range(2), local_batch, here.rank)
    assert_rested(model)
    train_ref(reference, sgd(reference), range(2), local_batch, here.world_size)
    assert_parity(model, reference)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_P2_a_parent_uses_a_childs_weight(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), parent_uses_a_weight)


class SideDoor(nn.Module):
    """Stores `proj(x)` as an attribute, before or after it computes what it returns."""

    def __init__(self, cache_first: bool) -> None:
        super().__init__()
        self.main = nn.Linear(4, 4, dtype=F64)
        self.proj = nn.Linear(4, 4, dtype=F64)
        self.cache_first = cache_first
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache_first:
            self.cache = self.proj(x)
            return self.main(x)
        out = self.main(x)
        self.cache = self.proj(x).tanh()
        return out


class WithSideDoor(nn.Module):
    def __init__(self, cache_first: bool, first: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4, dtype=F64) if first else nn.Identity()
        self.block = SideDoor(cache_first)
        self.head = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


def side_door(setup: Setup) -> None:
    batch_of = partial(local_batch, fan_in=4, fan_out=4)
    policies = {"block": fsdp.by_class(SideDoor), "leaf": fsdp.by_class(SideDoor, nn.Linear)}
    for cache_first in (True, False):
        for first in (True, False) if setup.policy == "block" else (False,):
            for use_out in (True, False):

                def loss_of(model: nn.Module, batch: tuple[Tensor, ...], use_out: bool = use_out) -> Tensor:
                    out = model(batch[0])
                    aux = model.block.cache.sum(dim=1).mean()
                    model.block.cache = None
                    return out.sum(dim=1).mean() + aux if use_out else aux

                reference = seeded(WithSideDoor, cache_first, first)
                model = wrap(seeded(WithSideDoor, cache_first, first), setup, policies)
                train_rank(model, sgd(model), range(2), batch_of, here.rank, loss_of)
                train_ref(reference, sgd(reference), range(2), batch_of, here.world_size, loss_of)
                assert_parity(model, reference)
                assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_P7_a_tensor_leaves_the_forward_by_a_side_door(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), side_door)
    if world_size == 1:
        run(1, for_each, matrix(1), side_door, group=False)


class Inplace(nn.Module):
    """The unit's output is changed before the loss, through a view (a) or directly (b)."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x)


def loss_through_a_view(model: nn.Module, rank: int) -> Tensor:
    row = model(local_batch(0, rank, 3, 2, rows=1)[0])[0]
    row += torch.tensor([0.5, -1.5], dtype=F64) * (rank + 1)
    return row.square().sum()


def loss_after_add(model: nn.Module, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(5, (4,), generator=generator)
    out = model(ids)
    out.add_(torch.randn(4, 3, generator=generator, dtype=F64))
    return out.square().sum()


def linear_unit() -> nn.Module:
    return Inplace(nn.Linear(3, 2, dtype=F64))


def embedding_unit() -> nn.Module:
    return Inplace(nn.Embedding(5, 3, dtype=F64))


def changed_in_place(setup: Setup) -> None:
    for build, loss_of_rank in ((linear_unit, loss_through_a_view), (embedding_unit, loss_after_add)):
        reference, model = seeded(build), seeded(build)
        unit = fsdp.by_class(type(model.unit))
        wrap(model, setup, {"block": unit, "leaf": unit})
        loss = loss_of_rank(model, here.rank)
        with Counts() as counts:
            loss.backward()
        if setup.stage == 3 and setup.policy != "root" and setup.reshard is not False and setup.mesh is None:
            assert len(counts.gathers) == (1 if here.world_size > 1 else 0), counts.calls
        mean_backward(reference, here.world_size, loss_of_rank)
        assert_parity(model, reference)
        assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_P8_a_units_output_is_changed_in_place(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), changed_in_place)


class InplaceChain(nn.Module):
    """In-place operations on every unit's output, directly and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=F64) for _ in range(3))
        self.last = nn.Linear(5, 3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.mul_(1.5)
            x[:, 0] += 1.0
            F.relu(x, inplace=True)
        return self.last(x)


def changed_in_place_in_a_row(setup: Setup) -> None:
    reference, model = seeded(InplaceChain), wrap(seeded(InplaceChain), setup, LINEAR)
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_P8_outputs_changed_in_place_in_a_row(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), changed_in_place_in_a_row)
