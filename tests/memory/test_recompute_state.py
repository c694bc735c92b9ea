"""What a recomputed block reads and changes besides its weights: the second run sees it as the first one did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import assert_rested, expect_loud, for_each, run
from tests.memory.parts import assert_same_bits, batch, whole

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """`depth` blocks, called by `call(blocks, x)` if given."""

    def __init__(self, block: type[nn.Module], call: Callable[[Any, Tensor], Tensor] | None = None, depth: int = 5):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        if self.call is not None:
            return self.head(self.call(self.blocks, x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(block: type[nn.Module], call: Any, recompute: Any, options: dict, forwards: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Stack(block, call), fsdp.by_class(block), recompute=recompute, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):  # a budget is settled after the first
        losses = [(model(x) - y).square().mean() for x, y in (batch(10 * step + n) for n in range(forwards))]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**whole(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def same_as_without(block: type[nn.Module], call: Any = None, options: dict = {}, forwards: int = 1) -> None:
    expected = trained(block, call, None, options, forwards)
    for recompute in (fsdp.by_class(block), "sqrt", fsdp.recompute_within(1200)):
        found = trained(block, call, recompute, options, forwards)
        assert_same_bits(found, expected, f"{block.__name__}, {recompute}")


# ---- buffers


class Scaled(Block):
    """A running scale, written and then read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.mul_(0.5).add_(x.abs().amax(0) * 0.5)
        return torch.tanh(self.linear(x / self.largest)) + x


class ScaledByAnother(Scaled):
    """The same, in a new buffer each time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest = self.largest * 0.5 + x.abs().amax(0) * 0.5
        return torch.tanh(self.linear(x / self.largest)) + x


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.linear(x * (1 / self.count))) + x


class Lazy(Block):
    """Makes a buffer when it is called first."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", x.detach().mean(0))
            x = x * 2.0
        return torch.tanh(self.linear(x - self.shift))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class CumulativelyNormed(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)


class InstanceNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x.view(-1, 2, 3)).reshape(-1, WIDTH)))


class OwnStatistics(Block):
    """Statistics that are written without a trace: no version, no count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(F.batch_norm(x, self.mean, self.var, training=True)))


WITH_BUFFERS = (
    Scaled, ScaledByAnother, Counting, Lazy, Normed, CumulativelyNormed, InstanceNormed, OwnStatistics,
)  # fmt: skip


def body_of_buffers(blocks: tuple[type[nn.Module], ...]) -> None:
    for_each([(block, None, {}, 1 + (block in (ScaledByAnother, Counting, Normed))) for block in blocks], same_as_without)
    low = fsdp.Precision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for_each([(block, None, {"precision": low}) for block in (Scaled, Counting)], same_as_without)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize(("world_size", "blocks"), [(1, WITH_BUFFERS), (2, (ScaledByAnother, OwnStatistics))])
def test_buffers_that_a_block_writes(world_size: int, blocks: tuple[type[nn.Module], ...]) -> None:
    run(world_size, body_of_buffers, blocks)


# ---- inputs


class InDict(Block):
    """Replaces what is in its input."""

    def forward(self, state: dict) -> dict:
        state["depth"] += 1
        state["x"] = state["x"] + torch.tanh(self.linear(state["x"])) / state["depth"]
        return state


def through_a_dict(blocks: Any, x: Tensor) -> Tensor:
    state = {"x": x, "depth": 0}
    for block in blocks:
        state = block(state)
    return state["x"]


class Carrier:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.sizes: list[float] = []


class InObject(Block):
    def forward(self, carrier: Carrier) -> Carrier:
        carrier.sizes.append(1.0 + len(carrier.sizes))
        carrier.x = carrier.x + torch.tanh(self.linear(carrier.x)) / sum(carrier.sizes)
        return carrier


def through_an_object(blocks: Any, x: Tensor) -> Tensor:
    carrier = Carrier(x)
    for block in blocks:
        carrier = block(carrier)
    assert len(carrier.sizes) == len(blocks)
    return carrier.x


class Cached(Block):
    def forward(self, x: Tensor, *, cache: dict) -> Tensor:
        if "first" not in cache:
            cache["first"] = torch.tanh(self.linear(x))
        return x + torch.tanh(self.linear(x * cache["first"]))


def with_a_cache(blocks: Any, x: Tensor) -> Tensor:
    cache: dict[str, Tensor] = {}
    for block in blocks:
        x = block(x, cache=cache)
    return x


class Noting(Block):
    def forward(self, x: Tensor, notes: list, options: dict) -> Tensor:
        options["depth"] = options.get("depth", 0) + 1  # a container without tensors
        y = torch.tanh(self.linear(x)) / options["depth"]
        notes.append(y.square().mean())
        return x + y


def with_notes(blocks: Any, x: Tensor) -> Tensor:
    notes: list[Tensor] = []
    options: dict[str, int] = {}
    for block in blocks:
        x = block(x, notes, options)
    assert len(notes) == options["depth"] == len(blocks)
    return x + sum(notes)


def body_of_inputs() -> None:
    cases = ((InDict, through_a_dict), (InObject, through_an_object), (Cached, with_a_cache), (Noting, with_notes))
    for_each(cases, same_as_without)


def test_inputs_that_a_block_writes_into() -> None:
    run(2, body_of_inputs)


# ---- plans inside plans


class Plain(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stage(nn.Module):
    """Blocks of equal shapes: values in the wrong place would not be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Plain() for _ in range(4)))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(x))


def nested(inner: Any, outer: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Stack(Stage, depth=4)
    for stage in model.blocks:
        fsdp.fsdp_wrap(stage, recompute=inner)
    fsdp.fsdp_wrap(model, recompute=outer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        x, y = batch(step)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def body_of_nested() -> None:
    expected = nested(None, None)
    ways = ("sqrt", fsdp.recompute_within(1200), fsdp.by_class(Plain))
    for inner in ways:
        for outer in (*ways[:2], fsdp.by_class(Stage)):
            assert_same_bits(nested(inner, outer), expected, f"{inner} in {outer}")


def test_recomputation_inside_recomputation() -> None:
    run(2, body_of_nested)


# ---- weights


def body_of_weights() -> None:
    for recompute in ("sqrt", fsdp.by_class(Plain)):
        for policy in (fsdp.by_class(Plain), fsdp.by_class(Plain, nn.Linear), fsdp.by_class(nn.Linear), None):
            torch.manual_seed(0)
            model = fsdp.fsdp_wrap(Stack(Plain), policy, recompute=recompute)
            x, _ = batch(0)
            model(x).sum().backward()
            loss = model(x).sum()
            torch.optim.SGD(model.blocks[0].parameters(), lr=0.1).step()
            expect_loud(loss.backward, "a weight changed", "blocks.0" if policy is not None else "linear")
            model.zero_grad()
            model(x).sum().backward()  # and it goes on


def test_weights_changed_before_backward() -> None:
    run(1, body_of_weights)


def gradients_of_an_activation(recompute: Any, stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Stack(Plain), recompute=recompute, stage=stage)
    kept: list[Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output))
    model(batch(0)[0])
    handle.remove()
    kept[0].square().sum().backward()
    found = [fsdp.full_grad(model, f"blocks.{n}.linear.weight").clone() for n in (0, 1)]
    assert_rested(model)
    return found


def body_of_activations() -> None:
    for stage in (1, 2, 3):
        expected = gradients_of_an_activation(None, stage)
        for recompute in ("sqrt", fsdp.by_class(Plain)):
            for one, other in zip(gradients_of_an_activation(recompute, stage), expected, strict=True):
                assert torch.equal(one, other), f"stage {stage}, {recompute}: {one} instead of {other}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_on_an_activation_of_one_unit(world_size: int) -> None:
    run(world_size, body_of_activations)
