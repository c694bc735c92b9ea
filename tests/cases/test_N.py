"""N. Start-up: the meta device, buffers, random streams; how much memory it takes is in `test_N_memory.py`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import (
    all_gather_objects,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    here,
    local_batch,
    run,
    seeded,
    sgd,
)

# ---- N1


class Head(nn.Module):
    """Two layers a level further down."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Attentive(nn.Module):
    """Linear, attention, norm, and a nested pair of Linears: 211 elements at the sizes of the case."""

    def __init__(self, fan_in: int = 7, width: int = 4, hidden: int = 11, out: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(fan_in, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = Head(width, hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(self.norm(h))


INITIALISED = (nn.Linear, nn.MultiheadAttention, nn.LayerNorm, nn.Embedding)


@contextlib.contextmanager
def watched_initialisers(model: nn.Module, seen: list[tuple[str, list[tuple[int, ...]]]]) -> Iterator[None]:
    """Record which module initialises itself, with which shapes."""
    names = {id(module): name for name, module in model.named_modules()}
    originals = []

    def watch(cls: type, method: str) -> None:
        original = cls.__dict__[method]

        def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append((names[id(self)], [tuple(p.shape) for p in self.parameters(recurse=False)]))
            return original(self, *args, **kwargs)

        originals.append((cls, method, original))
        setattr(cls, method, watched)

    for cls in INITIALISED:
        for method in ("reset_parameters", "_reset_parameters"):
            if method in cls.__dict__:
                watch(cls, method)
    try:
        yield
    finally:
        for cls, method, original in originals:
            setattr(cls, method, original)


def policy_of(name: str) -> Any:
    policies = {
        "one unit": None,
        "blocks": fsdp.by_class("Head", "MultiheadAttention"),
        "leaves": fsdp.by_name("first", "attention", "norm", "head.*"),
        "every leaf": fsdp.by_predicate(lambda module: not list(module.children())),
    }
    return policies[name]


def built_on_meta(sizes: tuple[int, ...], policy: str, stage: int) -> None:
    oracle = seeded(Attentive, *sizes)
    shapes = {name: [tuple(p.shape) for p in m.parameters(recurse=False)] for name, m in oracle.named_modules()}
    with torch.device("meta"):
        model = Attentive(*sizes)
    before = dict(model.named_parameters())
    torch.manual_seed(0)
    seen: list[tuple[str, list[tuple[int, ...]]]] = []
    with watched_initialisers(model, seen):
        fsdp.fsdp_wrap(model, policy_of(policy), stage=stage)
    called = [name for name, _ in seen]
    assert sorted(called) == sorted(set(called)), f"initialised twice: {called}"
    expected = ["first", "attention.out_proj", "attention", "norm", "head.up", "head.down"]
    if here.rank == 0:
        assert called == expected, called
    for name, found in seen:
        assert found == shapes[name], (name, found, shapes[name])
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    for name, value in gather(model).items():
        assert_close(value, dict(oracle.named_parameters())[name].detach(), bitwise=True, what=name)
    assert_rested(model)
    if policy != "every leaf":  # attention reads its output layer's weight itself
        x = local_batch(0, here.rank, sizes[0])[0].float().unsqueeze(0)
        with torch.no_grad():
            assert_close(model(x), oracle(x))
        assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_N1_building_on_the_meta_device(world_size: int) -> None:
    assert sum(p.numel() for p in Attentive().parameters()) == 211
    sizes = (7, 4, 11, 3)
    combinations = [(sizes, policy, 3) for policy in ("one unit", "blocks", "leaves", "every leaf")]
    combinations += [((5, 6, 13, 1), "blocks", 3)]
    if world_size == 2:
        combinations += [(sizes, "blocks", stage) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, built_on_meta)


class Bare(nn.Module):
    """A parameter that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.deep = nn.Module()
        self.deep.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.deep.scale


class Mixed(nn.Module):
    """Only some tensors are on meta; the others keep their values."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(3, 2)
        with torch.device("meta"):
            self.late = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.real(x) + self.late(x)


def unfilled(policy_class: str | None) -> None:
    with torch.device("meta"):
        model = Bare()
    policy = None if policy_class is None else fsdp.by_class(policy_class)

    def wrap_and_run() -> Tensor:
        # Weights may still be loaded between the two.
        return fsdp.fsdp_wrap(model, policy)(torch.ones(2, 3))

    expect_loud(wrap_and_run, "deep.scale")
    with torch.device("meta"):
        model = Bare()
    fsdp.fsdp_wrap(model, policy)
    loaded = seeded(Bare, seed=5)
    model.load_state_dict(loaded.state_dict())
    assert_parity(model, loaded, bitwise=True)
    with torch.no_grad():
        assert_close(model(torch.ones(2, 3)), loaded(torch.ones(2, 3)))
    assert_rested(model)


def partly_on_meta() -> None:
    model = seeded(Mixed)
    real = model.real.weight.detach().clone()
    torch.manual_seed(3)
    late = nn.Linear(3, 2)
    torch.manual_seed(3)
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    found = gather(model)
    assert_close(found["real.weight"], real, bitwise=True)
    assert_close(found["late.weight"], late.weight.detach(), bitwise=True)
    assert_rested(model)


def tied_on_meta() -> None:
    """A tie made before wrapping is still one weight after it, also when it was made on meta."""
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
    model = Forwarding(model)
    torch.manual_seed(0)
    fsdp.fsdp_wrap(model)
    assert model.parts["head"].weight is model.parts["embed"].weight
    assert list(gather(model)) == ["parts.embed.weight"]
    assert gather(model)["parts.embed.weight"].abs().min() > 0
    assert_rested(model)


class Forwarding(nn.Module):
    """Embedding and head of a dict, as one module with a forward."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, ids: Tensor) -> Tensor:
        return self.parts["head"](self.parts["embed"](ids))


@pytest.mark.parametrize("world_size", [1, 2])
def test_N1_what_cannot_be_filled_and_what_is_filled_already(world_size: int) -> None:
    run(world_size, for_each, [(None,), ("Linear",)], unfilled)
    run(world_size, partly_on_meta)
    run(world_size, tied_on_meta)


# ---- N2

THIRD = torch.tensor([1, 0.5, 0.25, 0.125])


class Buffered(nn.Module):
    """Buffers of several dtypes, persistent and not, on two levels."""

    def __init__(self, good: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        values = {
            "inv_freq": (THIRD if good else THIRD * float("nan"), False),
            "counter": (torch.tensor(7 if good else 0), False),
            "mask": (torch.tensor([good, True, not good]), True),
            "scale": (torch.tensor(1 / 3 if good else 9.0, dtype=torch.float64), True),
            "low": (torch.tensor([1.5 if good else 2.5], dtype=torch.bfloat16), False),
            "empty": (torch.empty(0), True),
        }
        self.deep = nn.Module()
        for owner in (self, self.deep):
            for name, (value, persistent) in values.items():
                owner.register_buffer(name, value.clone(), persistent=persistent)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.inv_freq)


def buffers(stage: int, policy: Any, meta: bool) -> None:
    oracle = seeded(Buffered, True)
    model = seeded(Buffered, here.rank == 0)
    if meta and here.rank > 0:
        model = model.to("meta")
    persistent = list(model.state_dict())
    fsdp.fsdp_wrap(model, policy, stage=stage, sync_params=True)
    assert list(model.state_dict()) == persistent
    expected = dict(oracle.named_buffers())
    found = dict(model.named_buffers())
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is Tensor, name
        assert_close(found[name], value, bitwise=True, what=name)
    assert model.absent is None
    assert model._non_persistent_buffers_set == oracle._non_persistent_buffers_set
    assert_close(gather(model)["linear.weight"], oracle.linear.weight.detach(), bitwise=True)
    x = local_batch(0, here.rank, 4)[0].float()
    model(x).sum().backward()
    assert_rested(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_N2_buffers_after_start_up(world_size: int) -> None:
    combinations = [(stage, None, False) for stage in (range(4) if world_size == 2 else (3,))]
    combinations += [(3, fsdp.by_class(nn.Linear), False), (3, None, True)]
    run(world_size, for_each, combinations, buffers)


# ---- N6


class Dropping(nn.Sequential):
    """Linear, Dropout, Linear."""

    def __init__(self, width: int = 5, out: int = 3, p: float = 0.5) -> None:
        super().__init__(
            nn.Linear(width, width, dtype=torch.float64), nn.Dropout(p), nn.Linear(width, out, dtype=torch.float64)
        )


def own_stream(reference: nn.Module, seeds: list[int], steps: int) -> None:
    """Each rank's batch alone, under that rank's seed; the gradients are averaged."""
    optimizer = sgd(reference)
    states = []
    for seed in seeds:
        torch.manual_seed(seed)
        states.append(torch.get_rng_state())
    for step in range(steps):
        optimizer.zero_grad()
        for rank, state in enumerate(states):
            torch.set_rng_state(state)
            x, target = local_batch(step, rank, 5)
            ((reference(x) - target).square().mean() / len(seeds)).backward()
            states[rank] = torch.get_rng_state()
        optimizer.step()


def random_streams(seed_is_rank: bool, policy: Any, stage: int) -> None:
    reference = seeded(Dropping)
    model = seeded(Dropping, seed=here.rank)  # rank 0's weights are those of seed 0, for all
    before = torch.get_rng_state(), random.getstate()
    fsdp.fsdp_wrap(model, policy, stage=stage)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    masks: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda module, args, out: masks.append(out == 0))
    optimizer = sgd(model)
    torch.manual_seed(here.rank if seed_is_rank else 0)
    for step in range(3):
        optimizer.zero_grad()
        x, target = local_batch(step, here.rank, 5)
        (model(x) - target).square().mean().backward()
        optimizer.step()
    handle.remove()
    everybody = all_gather_objects(masks)
    for other in everybody[1:]:
        equal = [torch.equal(a, b) for a, b in zip(everybody[0], other, strict=True)]
        assert not all(equal) if seed_is_rank else all(equal), equal
    seeds = list(range(here.world_size)) if seed_is_rank else [0] * here.world_size
    own_stream(reference, seeds, 3)
    assert_parity(model, reference)  # and replicas hold equal bits
    assert_rested(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_N6_wrapping_leaves_random_streams_alone(world_size: int) -> None:
    combinations = [(seed_is_rank, None, 3) for seed_is_rank in (False, True)]
    combinations += [(True, fsdp.by_class(nn.Linear), 3), (True, fsdp.by_name("0", "1", "2"), 3)]
    combinations += [(seed_is_rank, None, stage) for seed_is_rank in (False, True) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, random_streams)
