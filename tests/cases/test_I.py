"""I. Inputs and outputs: any structure out, any signature in, with and without gradients."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import (
    Counts,
    assert_close,
    assert_parity,
    assert_rested,
    for_each,
    here,
    joined,
    local_batch,
    run,
    seeded,
    sgd,
    train_rank,
    train_ref,
)


@dataclasses.dataclass
class Out:
    """What a unit may return."""

    scores: Tensor
    aux: Any = None
    more: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenOut:
    """A dataclass whose fields cannot be assigned."""

    scores: Tensor
    more: Any


@dataclasses.dataclass(slots=True)
class SlottedOut:
    """A dataclass without a `__dict__`."""

    scores: Tensor
    aux: Any = None


@dataclasses.dataclass
class DerivedOut:
    """A dataclass with a field its constructor does not take, made of the others."""

    scores: Tensor
    t: Tensor
    derived: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.derived = {"t": self.t * 1}


class Pair(NamedTuple):
    """A named tuple, with a container inside."""

    scores: Tensor
    more: Any


class ModelOutput(collections.OrderedDict):
    """A dict that also answers attribute reads, as model libraries return it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def as_dataclass(scores: Tensor, t: Tensor) -> Any:
    return Out(scores, None, {"states": [t]})


def as_frozen(scores: Tensor, t: Tensor) -> Any:
    return FrozenOut(scores, ({"t": t},))


def as_slotted(scores: Tensor, t: Tensor) -> Any:
    return SlottedOut(scores, [t])


def as_derived(scores: Tensor, t: Tensor) -> Any:
    return DerivedOut(scores, t)


def as_pair(scores: Tensor, t: Tensor) -> Any:
    return Pair(scores, [None, (t,)])


def as_model_output(scores: Tensor, t: Tensor) -> Any:
    return ModelOutput(scores=scores, hidden=(t, None), n=3)


def as_tuple(scores: Tensor, t: Tensor) -> Any:
    return scores, None, [{"deep": (t, "text")}]


def as_nested_dataclass(scores: Tensor, t: Tensor) -> Any:
    return Out(scores, aux=Out(t), more="text")


# How the output is built, and how the loss finds its tensor in it.
STRUCTURES: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "dataclass": (as_dataclass, lambda out: out.more["states"][0]),
    "frozen": (as_frozen, lambda out: out.more[0]["t"]),
    "slotted": (as_slotted, lambda out: out.aux[0]),
    "derived": (as_derived, lambda out: out.derived["t"]),
    "namedtuple": (as_pair, lambda out: out.more[1][0]),
    "model output": (as_model_output, lambda out: out.hidden[0]),
    "tuple": (as_tuple, lambda out: out[2][0]["deep"][0]),
    "nested dataclass": (as_nested_dataclass, lambda out: out.aux.scores),
}


class Structured(nn.Module):
    """A unit whose output is a structure with two tensors from two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a = nn.Linear(5, 3, dtype=torch.float64)
        self.b = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return STRUCTURES[self.kind][0](self.a(x), self.b(x.tanh()))


class Outer(nn.Module):
    """A root with a layer before the unit, handing on what the unit returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5, dtype=torch.float64)
        self.unit = Structured(kind)

    def forward(self, x: Tensor) -> Any:
        return self.unit(self.first(x))


def structured(kind: str, both: bool, reshard: bool | None) -> None:
    model, reference = seeded(Outer, kind), seeded(Outer, kind)
    x = local_batch(0, here.rank)[0]
    expected = reference(x)
    fsdp.fsdp_wrap(model, fsdp.by_class("Structured"), reshard_after_forward=reshard)
    found = model(x)
    assert type(found) is type(expected)
    leaf_of = STRUCTURES[kind][1]
    assert type(leaf_of(found)) is Tensor
    assert_close(leaf_of(found).detach(), leaf_of(expected).detach())
    if isinstance(expected, (tuple, dict)):
        assert len(found) == len(expected)
    if kind == "dataclass":
        assert found.aux is None and list(found.more) == ["states"]
    if kind == "model output":
        assert list(found) == ["scores", "hidden", "n"] and found["n"] == 3 and found["hidden"][1] is None
    del found, expected

    def loss(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out = m(batch[0])
        value = (leaf_of(out) - batch[1]).square().mean()
        if both:
            scores = out[0] if isinstance(out, tuple) else out.scores
            value = value + scores.square().mean()
        return value

    train_rank(model, sgd(model), range(2), local_batch, here.rank, loss)
    train_ref(reference, sgd(reference), range(2), local_batch, here.world_size, loss)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_I1_structured_outputs(world_size: int) -> None:
    combinations = [(kind, False, reshard) for kind, reshard in zip(STRUCTURES, (None, True, False) * 3)]
    if world_size == 2:
        combinations += [(kind, True, None) for kind in STRUCTURES]
    run(world_size, for_each, combinations, structured)


class KeywordOnly(nn.Module):
    """Keyword-only arguments, some of them not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.seen: list[tuple] = []

    def forward(self, *, inputs: Tensor, mask: Tensor | None = None, top: int = 3, mode: str = "mean") -> Tensor:
        self.seen.append((mask is None, top, mode))
        y = self.linear(inputs) * top
        return y if mask is None else y * mask


class FourTensors(nn.Module):
    """Four positional tensors and extra arguments of every other kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.seen: list[tuple] = []

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, /, *rest: Any, **options: Any) -> Tensor:
        self.seen.append((rest, options))
        return self.linear(a * b + c) * d.sum(1, keepdim=True)


class Containers(nn.Module):
    """Tensors inside containers and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.seen: list[tuple] = []

    def forward(self, state: dict[str, Any], out: Out, flags: tuple[bool, ...] = ()) -> Tensor:
        self.seen.append((sorted(state), out.aux, flags))
        return self.linear(state["x"][0] + out.scores)


def call_keywords(m: nn.Module, xs: list[Tensor]) -> Tensor:
    return m(inputs=xs[0] * xs[1], mask=xs[2].mean(1, keepdim=True), top=2) + m(inputs=xs[3], mode="sum")


def call_four(m: nn.Module, xs: list[Tensor]) -> Tensor:
    return m(*xs, 7, None, "word", scale=0.5, deep={"k": [1]})


def call_containers(m: nn.Module, xs: list[Tensor]) -> Tensor:
    return m({"x": [xs[0] * xs[1]], "n": 3}, Out(xs[2] + xs[3], aux="aux"), flags=(True, False))


SIGNATURES: dict[str, tuple[type, Callable[..., Tensor], list[tuple]]] = {
    "keyword-only": (KeywordOnly, call_keywords, [(False, 2, "mean"), (True, 3, "sum")]),
    "four tensors": (FourTensors, call_four, [((7, None, "word"), {"scale": 0.5, "deep": {"k": [1]}})]),
    "containers": (Containers, call_containers, [(["n", "x"], "aux", (True, False))]),
}


def signature(kind: str, as_root: bool, stage: int) -> None:
    build, call, seen = SIGNATURES[kind]
    inner, reference = seeded(build), seeded(build)
    model = inner if as_root else nn.Sequential(collections.OrderedDict(inner=inner))
    if as_root:
        fsdp.fsdp_wrap(model, stage=stage)
    else:
        fsdp.fsdp_wrap(inner, stage=stage)
    optimizer, reference_optimizer = sgd(inner), sgd(reference)
    for step in range(2):
        batches = [lambda s, r, i=i: local_batch(10 * s + i, r, 5) for i in range(4)]
        local = [batch(step, here.rank)[0].requires_grad_() for batch in batches]
        joint = [joined(batch, step, here.world_size)[0].requires_grad_() for batch in batches]
        optimizer.zero_grad()
        call(inner, local).square().mean().backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        call(reference, joint).square().mean().backward()
        reference_optimizer.step()
        assert inner.seen == seen, inner.seen
        inner.seen.clear()
        rows = slice(4 * here.rank, 4 * here.rank + 4)
        for x, everybody in zip(local, joint, strict=True):
            # REF's mean is over all ranks' rows; the rank's own loss is a mean over its rows.
            assert_close(x.grad / here.world_size, everybody.grad[rows], what="gradient of an input")
    assert_parity(inner, reference)
    assert_rested(inner)


@pytest.mark.parametrize("world_size", [1, 2])
def test_I3_keyword_only_and_non_tensor_arguments(world_size: int) -> None:
    combinations = [(kind, as_root, 3) for kind in SIGNATURES for as_root in (True, False)]
    combinations += [("keyword-only", True, stage) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, signature)


class Ids(nn.Module):
    """An embedding as the first unit (or two of them), then a projection."""

    def __init__(self, vocabulary: int, width: int, two: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, dtype=torch.float64)
        self.positions = nn.Embedding(4, width, dtype=torch.float64) if two else None
        self.project = nn.Linear(width, 2, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        if self.positions is not None:
            h = h + self.positions(torch.arange(4).repeat(len(ids) // 4))
        return self.project(h)


def inputs_without_gradient(vocabulary: int, width: int, two: bool, reshard: bool | None, prefetch: int) -> None:
    model, reference = seeded(Ids, vocabulary, width, two), seeded(Ids, vocabulary, width, two)
    policy = fsdp.by_class(nn.Embedding, nn.Linear)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, prefetch=prefetch)

    def batch(step: int, rank: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(vocabulary, (4,), generator=generator)
        return ids, torch.randn(4, 2, generator=generator, dtype=torch.float64)

    optimizer = sgd(model)
    with Counts() as counts:
        train_rank(model, optimizer, [0], batch, here.rank)
    if here.world_size > 1:
        assert len(counts.of("reduce_scatter")) == 2 + two, counts.calls
    train_rank(model, optimizer, [1], batch, here.rank)
    train_ref(reference, sgd(reference), range(2), batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_I4_inputs_without_gradient(world_size: int) -> None:
    combinations = [(5, 3, False, None, 1), (5, 3, False, True, 0), (7, 2, True, None, 2), (3, 1, True, False, 1)]
    run(world_size, for_each, combinations, inputs_without_gradient)
