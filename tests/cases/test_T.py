"""T. Tied and shared weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite import inspect
from tests.cases.matrix import WORLD_SIZES, Setup, layouts, matrix, wrap
from tests.harness import (
    Counts,
    adamw,
    all_gather_objects,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    gather_grads,
    here,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)


class TiedLM(nn.Module):
    """`head.weight` is `embed.weight`; `mid` lies between them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, dtype=torch.float64)
        self.mid = nn.Linear(width, width, dtype=torch.float64)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(ids)))


class Deep(nn.Module):
    """The two users of the tied weight lie at different depths below `core`, their lowest common ancestor."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.core = Core(vocabulary, width)
        self.last = nn.Linear(vocabulary, vocabulary, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.core(ids))


class Core(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, dtype=torch.float64)
        self.stem = nn.Sequential(nn.Linear(width, width, dtype=torch.float64), nn.Tanh())
        self.out = nn.Sequential(nn.Tanh(), nn.Linear(width, vocabulary, bias=False, dtype=torch.float64))
        self.out[1].weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.stem(self.tokens(ids)))


def next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (ids,) = batch
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def token_batch(vocabulary: int, step: int, rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(vocabulary, (4, 6), generator=generator),)


LEAVES = {"block": fsdp.by_class(nn.Embedding, nn.Linear), "leaf": fsdp.by_class(nn.Embedding, nn.Linear)}


def tied_stays_one(setup: Setup) -> None:
    reference, model = seeded(TiedLM, 11, 4), seeded(TiedLM, 11, 4)
    keys = list(model.state_dict())
    wrap(model, setup, LEAVES)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "mid.weight", "mid.bias"]
    local = sum(parameter.numel() for parameter in model.parameters())
    replicas = here.world_size if setup.stage == 0 else (setup.mesh or (1, 0))[0]
    assert sum(all_gather_objects(local)) == 64 * replicas
    assert sum(flat.layout.numel for unit in inspect.units(model) for flat in unit.flats) == 64
    assert list(model.state_dict()) == keys == ["embed.weight", "mid.weight", "mid.bias", "head.weight"]
    batch_of = partial(token_batch, 11)

    def still_tied() -> None:
        assert model.embed.weight is model.head.weight

    still_tied()
    train_rank(model, sgd(model), range(3), batch_of, here.rank, next_token, still_tied)
    train_ref(reference, sgd(reference), range(3), batch_of, here.world_size, next_token)
    assert_parity(model, reference)
    if setup.policy != "root":
        expect_loud(lambda: model.embed(torch.tensor([1])), "embed.weight", "root")
        assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_T1_a_weight_used_by_two_units_stays_one_weight(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size, every_stage=True), tied_stays_one)
    if world_size == 1:
        run(1, for_each, matrix(1), tied_stays_one, group=False)


def tied_below_the_root(setup: Setup) -> None:
    reference, model = seeded(Deep, 7, 3), seeded(Deep, 7, 3)
    names = [name for name, _ in model.named_parameters()]
    wrap(model, setup, {"block": fsdp.by_class(Core, nn.Linear), "leaf": fsdp.by_class(Core, nn.Embedding, nn.Linear)})
    assert [name for name, _ in model.named_parameters()] == names
    if setup.policy != "root":
        owner = {name: unit.name for unit in inspect.units(model) for flat in unit.flats for name in flat.names}
        assert owner["core.tokens.weight"] == "core"
    batch_of = partial(token_batch, 7)
    train_rank(model, sgd(model), range(3), batch_of, here.rank, next_token)
    train_ref(reference, sgd(reference), range(3), batch_of, here.world_size, next_token)
    assert model.core.tokens.weight is model.core.out[1].weight
    assert_parity(model, reference)
    if setup.stage and setup.policy == "leaf":
        expect_loud(lambda: model.core.tokens(torch.tensor([1])), "core.tokens.weight", "core")
        # The owner itself may be called: its forward gathers what its children share.
        with torch.no_grad():
            ids = torch.tensor([[1, 2]])
            assert_close(model.core(ids), reference.core(ids))
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_T1_the_owner_is_the_lowest_unit_that_contains_all_users(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), tied_below_the_root)


def every_row_trains(setup: Setup, vocabulary: int, width: int, last: dict[int, int]) -> None:
    reference, model = seeded(TiedLM, vocabulary, width), seeded(TiedLM, vocabulary, width)
    start = gather(model)["embed.weight"]
    wrap(model, setup, LEAVES)
    if here.world_size in last and setup.stage and setup.mesh is None and setup.policy != "root":
        # Alone in the root's flat parameter, the tied weight leaves the remainder to the last rank.
        sizes = all_gather_objects(model.embed.weight.numel())
        assert sizes[-1] == last[here.world_size] < sizes[0], sizes

    def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, dims=1).flatten())

    def batch_of(_: int, rank: int) -> tuple[Tensor, ...]:
        return (torch.arange(vocabulary).roll(rank)[None],)

    train_rank(model, sgd(model), [0], batch_of, here.rank, loss_of)
    train_ref(reference, sgd(reference), [0], batch_of, here.world_size, loss_of)
    assert_parity(model, reference)
    moved = gather(model)["embed.weight"] != start
    assert moved.all() and (reference.embed.weight != start).all(), f"{int(moved.sum())} of {moved.numel()} elements"
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_T2_every_row_of_a_tied_weight_trains(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), partial(every_row_trains, vocabulary=5, width=3, last={2: 7, 4: 3}))
    # 7 * 3 = 21 elements: 10 of 22 on the last of 2 ranks, 3 of 24 on the last of 4.
    run(world_size, for_each, layouts(world_size), partial(every_row_trains, vocabulary=7, width=3, last={2: 10, 4: 3}))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.a.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def one_module_two_names(setup: Setup) -> None:
    model = wrap(Twice(), setup, LEAVES)
    assert model.a is model.b
    owners = [unit.name for unit in inspect.units(model) if unit.flats]
    assert owners == ["" if setup.policy == "root" else "a"]
    assert [name for name, _ in model.named_parameters()] == ["a.weight"]
    optimizer = sgd(model)
    with Counts() as counts:
        y = model(torch.ones(1, 1, dtype=torch.float64))
        y.sum().backward()
    assert y.item() == 4.0
    assert gather_grads(model)["a.weight"].item() == 4.0
    if setup.mesh is None:
        assert len(counts.reductions) == (1 if here.world_size > 1 else 0), counts.calls
    optimizer.step()
    assert abs(gather(model)["a.weight"].item() - 1.6) < 1e-12
    state = model.state_dict()
    assert list(state) == ["a.weight", "b.weight"]
    with fsdp.full_params(model):
        whole = model.state_dict()
        assert torch.equal(whole["a.weight"], whole["b.weight"]) and whole["a.weight"].shape == (1, 1)
    optimizer.zero_grad()
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_T4_one_module_object_under_two_attribute_names(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), one_module_two_names)


class Loop(nn.Module):
    """One block under three names at two depths, beside a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), nn.Tanh())
        self.enter = shared
        self.inner = nn.ModuleList([shared, nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), nn.Tanh()), shared])
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.inner:
            x = block(x)
        return self.head(x)


def one_module_three_names(setup: Setup) -> None:
    reference, model = seeded(Loop), seeded(Loop)
    keys = list(model.state_dict())
    wrap(model, setup, {"block": fsdp.by_class(nn.Sequential), "leaf": fsdp.by_class(nn.Linear)})
    assert list(model.state_dict()) == keys
    train_rank(model, sgd(model), range(3), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(3), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_T4_one_module_object_at_two_depths(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), one_module_three_names)


class ThreeUsers(nn.Module):
    """A weight with three users and a bias with two, one of them in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5, dtype=torch.float64)
        self.b = nn.Linear(5, 5, dtype=torch.float64)
        self.rest = nn.ModuleDict(
            {"c": nn.Linear(5, 5, dtype=torch.float64), "out": nn.Linear(5, 3, dtype=torch.float64)}
        )
        self.b.weight = self.rest["c"].weight = self.a.weight
        self.b.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.rest["out"](self.rest["c"](self.b(self.a(x).tanh()).tanh()))


def three_users(setup: Setup) -> None:
    reference, model = seeded(ThreeUsers), seeded(ThreeUsers)
    keys = list(model.state_dict())
    wrap(model, setup, {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear)})
    assert list(model.state_dict()) == keys
    train_rank(model, adamw(model), range(2), stack_batch, here.rank)
    train_ref(reference, adamw(reference), range(2), stack_batch, here.world_size)
    assert model.a.weight is model.b.weight is model.rest["c"].weight and model.a.bias is model.b.bias
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_T1_a_weight_with_three_users(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), three_users)
