"""recompute="sqrt" and a byte budget: the bits, collectives and bytes of a run without, whatever the blocks do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdplite as fsdp
from fsdplite.recompute.budget import Cut, cut_sqrt, cut_within, parse_bytes
from tests.cases.test_N_memory import LiveBytes
from tests.harness import Counts, assert_rested, expect_loud, for_each, run
from tests.memory.parts import Layer, Net, assert_same_bits, batch, build, train, whole

LEVERS = ("sqrt", fsdp.recompute_within(1), fsdp.recompute_within("1MiB"), ("auto", "4KB"))


def same_as_without(lever: Any, options: dict, loop: dict, depth: int = 5, make: Any = None, sgd: bool = False) -> None:
    found = []
    for recompute in (None, lever):
        model = build(make or (lambda: Net(depth)), recompute=recompute, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if sgd else torch.optim.AdamW(model.parameters(), lr=0.1)
        counts = []
        seen = []
        for step in range(3):
            with Counts() as counted:
                seen += train(model, optimizer, range(step, step + 1), **loop)
            counts.append(counted.by_kind())
        found.append((seen, counts[-1], whole(model)))
        assert_rested(model)
    (losses, collectives, values), (seen, counted, others) = found
    assert seen == losses, f"{seen} instead of {losses}"
    assert counted == collectives, f"{counted} instead of {collectives}"
    assert_same_bits(others, values)


def matrix(world_size: int) -> list[tuple]:
    loops = ({}, {"accumulate": 2, "clip": 0.5}, {"accumulate": 2, "no_sync": True})
    rows = []
    for number, lever in enumerate(LEVERS):
        for stage in (3,) if world_size == 3 else (1, 2, 3):
            precision = ("fp32", "bf16")[(number + stage) % 2]
            rows.append((lever, {"stage": stage, "precision": precision}, loops[(number + stage) % 3]))
    return [*rows, ("sqrt", {"stage": 0}, {}), ("sqrt", {"precision": "bf16", "reshard_after_forward": False}, loops[1])]


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_and_collectives_of_a_run_without(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), same_as_without)


def scale_between(x: Tensor) -> Tensor:
    return x * 1.5


def grow_in_place(x: Tensor) -> Tensor:
    x += 1.0  # the block's own output, changed before the next one takes it
    return x


class Branched(nn.Module):
    """Layers called in another order than they are listed, twice, with keywords, in tuples, and past each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        scale = torch.sigmoid(x[:, :1])
        skip = first(x, scale=scale)
        y = rest[3](skip)
        for layer in rest:
            y = layer(y, scale=scale) + 0.1 * skip
        y = first(y) + rest[0](skip)
        with torch.no_grad():
            y = y + rest[1](y)
        return self.head(rest[4](y))


class Checkpointed(nn.Module):
    """Users' own checkpoints, inside of blocks and around some of them."""

    class Inner(Layer):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)

    def __init__(self, around: bool, use_reentrant: bool) -> None:
        super().__init__()
        self.around, self.use_reentrant = around, use_reentrant
        self.layers = nn.ModuleList((Layer if around else self.Inner)() for _ in range(5))
        for layer in self.layers:
            layer.use_reentrant = use_reentrant
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        if not self.around:
            return self.head(nn.Sequential(*self.layers)(x))
        x = checkpoint(lambda y: self.layers[1](self.layers[0](y)), x, use_reentrant=self.use_reentrant)
        for layer in self.layers[2:]:
            x = layer(x)
        return self.head(x)


class Normed(nn.Module):
    """Running statistics: computing a block again must not count a batch twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(self.norm(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(4)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def shapes() -> list[tuple]:
    return [
        ("sqrt", {}, {}, 5, lambda: Net(7, between=scale_between)),
        ("sqrt", {}, {}, 5, lambda: Net(7, between=grow_in_place)),
        ("sqrt", {}, {"accumulate": 2, "no_sync": True}, 5, Branched),
        ("sqrt", {"policy": fsdp.by_class(Layer, nn.Linear)}, {}, 5),
        ("sqrt", {"policy": None}, {}, 5),
        *[("sqrt", {}, {}, 5, lambda a=a, r=r: Checkpointed(a, r)) for a in (False, True) for r in (False, True)],
    ]


def body_of_shapes() -> None:
    for_each([row for row in shapes() if row[4:]] + [row for row in shapes() if not row[4:]], lenient)


def lenient(lever: Any, options: dict, loop: dict, depth: int, make: Any = None) -> None:
    """Blocks that are not wrapped one by one, or nested recomputation, may gather once more; the bits stay."""
    found = []
    for recompute in (None, lever):
        policy = options.get("policy", fsdp.by_class(Layer, Checkpointed.Inner))
        model = build(make or (lambda: Net(depth)), recompute=recompute, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Counts() as counts:
            seen = train(model, optimizer, range(3), **loop)
        found.append((seen, len(counts.gathers), whole(model)))
        assert_rested(model)
    assert found[1][0] == found[0][0], f"{found[1][0]} instead of {found[0][0]}"
    assert found[1][1] <= 1.5 * found[0][1]
    assert_same_bits(found[1][2], found[0][2])


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_whatever_blocks_do(world_size: int) -> None:
    run(world_size, body_of_shapes)


def running_statistics() -> None:
    states = []
    for recompute in (None, "sqrt"):
        model = build(Normed, policy=fsdp.by_class(Normed.Block), recompute=recompute)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        states.append({**whole(model), **{n: b.clone() for n, b in model.named_buffers()}})
        assert_rested(model)
    assert_same_bits(states[1], states[0])


def test_running_statistics_count_a_batch_once() -> None:
    run(2, running_statistics)


# ---- autograd


def autograd_pass(recompute: Any) -> list[Tensor]:
    model = build(Net, recompute=recompute, policy=fsdp.by_class(Layer), precision=None)
    model.eval()
    found: list[Tensor] = []
    x, y = batch(0)
    x.requires_grad_()
    loss = (model(x) - y).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()  # the same graph twice
    found += [x.grad.clone(), *whole(model).values()]
    x.grad = None
    model.zero_grad()
    (slope,) = torch.autograd.grad((model(x) - y).square().mean(), x, create_graph=True)
    slope.square().sum().backward()  # a gradient penalty
    found.append(x.grad.clone())
    first, second = model(x).sum(), model(2 * x).sum()  # two forwards before their backwards, in either order
    second.backward()
    first.backward()
    found.append(x.grad.clone())
    kept: list[Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda module, args, output: kept.append(output))
    model(x)
    handle.remove()
    kept[0].square().sum().backward()  # a loss on an activation: later blocks have no backward
    found.append(x.grad.clone())
    with torch.no_grad():
        found.append(model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()
    found.append(x.grad.clone())
    model.zero_grad()
    assert_rested(model)
    return found


def autograd_body() -> None:
    for one, other in zip(autograd_pass(None), autograd_pass("sqrt"), strict=True):
        assert torch.equal(one, other), f"{other} instead of {one}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_autograd_in_all_its_ways(world_size: int) -> None:
    run(world_size, autograd_body)


class Unsteady(nn.Module):
    """Saves other tensors each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x.repeat(self.calls, 1)).tanh()[: len(x)]


class UnsteadyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Unsteady() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x.mul_(2.0)
        return super().forward(x)


class InPlaceNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlace() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


def loud_body() -> None:
    x, _ = batch(0)
    model = build(UnsteadyNet, policy=fsdp.by_class(Unsteady), recompute="sqrt")
    expect_loud(lambda: model(x).sum().backward(), "Unsteady", "other tensors")
    model = build(InPlaceNet, policy=fsdp.by_class(InPlace), recompute="sqrt")
    expect_loud(lambda: model(x).sum().backward(), "changed in place")
    model = build(Net, recompute="sqrt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda module, args, output: kept.append(output))
    model(x)
    handle.remove()
    model(x).sum().backward()
    optimizer.step()
    expect_loud(kept[0].sum().backward, "a weight changed", "computes its block again", "layers.")
    optimizer.zero_grad()
    model(x).sum().backward()  # and it goes on
    assert_rested(model)


def test_what_cannot_be_computed_again_is_loud() -> None:
    run(1, loud_body)


def copies_body() -> None:
    model = build(Net, recompute="sqrt")
    model(batch(0)[0]).sum().backward()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    model.zero_grad(), twin.zero_grad()
    for m, optimizer in zip((model, twin), optimizers):
        train(m, optimizer, range(2))
    assert_same_bits(whole(twin), whole(model))
    assert_rested(model, twin)
    assert type(model.layers[0]).__name__ == "Layer" and isinstance(model.layers[0], (Layer, fsdp.FSDPUnit))
    assert len(model.layers[:2]) == 2 and list(dict(twin.named_parameters())) == list(dict(Net().named_parameters()))


def test_copies_and_names() -> None:
    run(2, copies_body)


def by_hand_body() -> None:
    values = []
    for recompute in (None, "sqrt"):
        torch.manual_seed(0)
        model = Net(6)
        for layer in model.layers:
            fsdp.fsdp_wrap(layer)
        fsdp.fsdp_wrap(model, recompute=recompute)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        values.append(whole(model))
    assert_same_bits(values[1], values[0])


def test_units_wrapped_by_hand() -> None:
    run(2, by_hand_body)


# ---- options


def test_options_are_checked() -> None:
    expect_loud(lambda: fsdp.fsdp_wrap(Net(), recompute="sqr"), "sqrt", "recompute_within")
    expect_loud(lambda: fsdp.fsdp_wrap(Net(), recompute="auto"), "recompute_within")
    expect_loud(lambda: fsdp.fsdp_wrap(Net(), recompute=("auto", "2 bananas")), "2 bananas", "GiB")
    expect_loud(lambda: fsdp.fsdp_wrap(nn.Linear(2, 2), recompute="sqrt"), "no blocks", "by_class")
    assert parse_bytes("2GiB", "") == 2**31 and parse_bytes("1.5 MB", "") == 1_500_000 and parse_bytes(7, "") == 7


def test_the_cut() -> None:
    assert [cut_sqrt(n).sizes for n in (1, 2, 4, 5, 16)] == [(), (1,), (2,), (2, 2), (4, 4, 4)]
    assert [Cut((2, 1)).segment_of(i, 4) for i in range(6)] == [0, 0, 1, None, 2, 2]
    # Eight blocks that save 10 each and cost 1 as an input: all fit into 80, none into 10.
    assert cut_within(80, 8, 10, 1) == (Cut(()), 80)
    assert cut_within(79, 8, 10, 1)[0].recomputed == 1  # the first block alone: 1 + 70
    cut, peak = cut_within(45, 8, 10, 1)
    assert (cut.recomputed, peak) == (4, 41) and cut.sizes == (4,)
    assert cut_within(1, 8, 10, 1)[1] == 17  # 7 inputs and one block: nothing is lower


# ---- bytes


def held_and_peak_bytes(depth: int, recompute: Any) -> tuple[int, int, int]:
    """Bytes of activations when forward is over, and most bytes above rest in forward and in backward."""
    width, rows = 32, 512
    model = build(lambda: Net(depth, width, inner=width, dropout=0.1), recompute=recompute)
    x, y = batch(0, width, rows)
    for _ in range(2):  # a budget is settled after the first
        (model(x) - y).square().mean().backward()
        model.zero_grad()
    with LiveBytes() as live:
        loss = (model(x) - y).square().mean()
        held = live.now()
        live.peak = 0
        loss.backward()
    return held, live.peak, rows * width * 4


def bytes_body() -> list[tuple[int, ...]]:
    return [held_and_peak_bytes(depth, recompute) for recompute in (None, "sqrt") for depth in (4, 16, 64)]


@pytest.mark.slow
def test_activations_grow_as_the_square_root() -> None:
    (found,) = run(1, bytes_body)
    plain, sqrt = found[:3], found[3:]
    unit = plain[0][2]
    # Without: four times the blocks, four times the bytes. With: about twice, and far below.
    for position in (0, 1):
        assert plain[2][position] > 3.2 * plain[1][position]
        assert sqrt[1][position] < 2.3 * sqrt[0][position] and sqrt[2][position] < 2.3 * sqrt[1][position], sqrt
    per_block = (plain[2][0] - plain[1][0]) / 48
    # At the end of forward: 7 inputs and the last 8 blocks; in backward: the inputs and a segment of 8, and what
    # one block's backward makes and its unit holds.
    assert sqrt[2][0] < 8 * unit + 8 * per_block + 2 * per_block
    assert sqrt[2][1] < 8 * unit + 8 * per_block + 4 * per_block


def budget_body(budget: int) -> int:
    return held_and_peak_bytes(16, fsdp.recompute_within(budget))[0]


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_a_budget_is_used_and_kept(share: float) -> None:
    (found,) = run(1, held_and_peak_bytes, 16, None)
    budget = int(share * found[0])
    (held,) = run(1, budget_body, budget)
    assert held <= budget * 1.05
    assert share < 0.5 or held > 0.7 * budget  # and no more is recomputed than has to be


def warns_body() -> None:
    model = build(Net, recompute=fsdp.recompute_within(1))
    with pytest.warns(UserWarning, match="budget"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))


def test_a_budget_that_cannot_be_met_says_so() -> None:
    run(1, warns_body)
