"""State that outlives what made it: dead steps, dropped gradients, kept leaves, copies, late additions.

Each of these was wrong in silence, or a crash, once.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import assert_parity, assert_rested, expect_loud, for_each, gather_grads, here, run, seeded


class Pair(nn.Module):
    """Two units that a forward may use or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        out = x
        for name in use:
            out = getattr(self, name)(out)
        return out


def wrapped(**options: Any) -> Pair:
    model = seeded(Pair).double()
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), **options)
    return model


ONES = torch.ones(2, 3, dtype=torch.float64)


def written_through_views(stage: int, precision: str | None) -> None:
    """What rests full is gathered again after a write through a view of a slice, as averages of weights make them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), stage=stage, precision=precision)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    x = torch.ones(2, 3)
    expected = None
    for value in (4.0, 8.0, 2.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.fill_(value)
            expected = value if expected is None else (expected + value) / 2
            averaged.update_parameters(model)
            for each, weight in ((model, value), (averaged, expected)):
                assert each(x).tolist() == [[weight * 3 * (weight * 4) + weight] * 3] * 2, (each, weight)
    before = model[0].weight.data.clone()
    before.mul_(2.0)  # a copy is a copy
    with torch.no_grad():
        model.state_dict()["1.bias"][...] = 1.0
        assert model(x).tolist() == [[2.0 * 3 * 8.0 + 1.0] * 3] * 2


def every_view() -> None:
    for_each([(stage, precision) for stage in range(4) for precision in (None, "bf16")], written_through_views)


@pytest.mark.parametrize("world_size", [1, 2])
def test_writes_through_views_of_slices_are_seen(world_size: int) -> None:
    run(world_size, every_view)


def moved_to_where_it_is() -> None:
    """`model.to()` that changes nothing stays fine where torch swaps parameters instead of setting their data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = wrapped()
        model(ONES).sum().backward()
        assert model.to(torch.float64) is model and model.double() is model
        model(ONES).sum().backward()
        assert torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_move_that_changes_nothing_swaps_nothing(world_size: int) -> None:
    run(world_size, moved_to_where_it_is)


def a_step_that_raised(stage: int) -> None:
    model = wrapped(stage=stage)
    dead = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        dead.step(closure)
    model(ONES).sum().backward()
    expect_loud(lambda: next(model.parameters()).sum(), "a.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ONES).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2], losses  # weights that were gathered once would give one loss for ever


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_a_step_that_raised_training_goes_on(stage: int) -> None:
    run(2, a_step_that_raised, stage)


def dropped_gradients() -> None:
    model = wrapped()
    with model.no_sync():
        (model(ONES).sum() * float("nan")).backward()
    for parameter in model.parameters():
        parameter.grad = None
    model(ONES, "a").sum().backward()
    grads = gather_grads(model)
    assert grads["b.weight"] is None and torch.isfinite(grads["a.weight"]).all()

    model.zero_grad()
    with model.no_sync():
        model.a.set_requires_gradient_sync(True)
        (model(ONES).sum() * 100).backward()
    model.zero_grad()
    model(ONES, "a").sum().backward()
    # The gradient of sum(x W^T + b) with respect to W is the sum of the rows of x: 2 ones.
    assert torch.equal(gather_grads(model)["a.weight"], torch.full((3, 3), 2.0, dtype=torch.float64))
    model.zero_grad()
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_zero_grad_dropped_stays_dropped(world_size: int) -> None:
    run(world_size, dropped_gradients)


def zeroed_in_place() -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(ONES, "a").sum().backward()
    with model.no_sync():
        model(ONES, "ab").sum().backward()
    optimizer.zero_grad(set_to_none=False)
    model(ONES, "a").sum().backward()
    assert torch.equal(gather_grads(model)["a.weight"], torch.full((3, 3), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("world_size", [1, 2])
def test_zeroing_in_place_reaches_reduced_and_pending_gradients(world_size: int) -> None:
    run(world_size, zeroed_in_place)


class WithIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 3)
        self.left = nn.Parameter(torch.ones(3))
        self.late = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) * self.left * self.late


def ignored_parameters() -> None:
    model = seeded(WithIgnored).double()
    fsdp.fsdp_wrap(model, ignored=(model.left, model.late))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = here.rank + 1.0
    with model.no_sync():
        (model(ONES).sum() * 1000).backward()
    expect_loud(optimizer.step, "no_sync")
    expect_loud(torch.optim.SGD([model.left], lr=0.1).step, "left", "no_sync")
    optimizer.zero_grad()
    model.late.requires_grad_(True)
    (model(ONES).sum() * scale).backward()
    plain = seeded(WithIgnored).double()
    plain.late.requires_grad_(True)
    mean = sum(range(1, here.world_size + 1)) / here.world_size
    (plain(ONES).sum() * mean).backward()
    for name in ("left", "late"):
        torch.testing.assert_close(getattr(model, name).grad, getattr(plain, name).grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ignored_parameters_are_averaged_and_forget_what_was_dropped(world_size: int) -> None:
    run(world_size, ignored_parameters)


def refusals() -> None:
    model = wrapped()
    kept = []
    model.a.register_forward_hook(lambda module, args, output: kept.append(module.weight))
    model(ONES).sum().backward()
    expect_loud(lambda: kept[0].norm(), "a.weight")
    expect_loud(lambda: kept[0].t() @ ONES.t(), "a.weight")
    gradient = model.a.weight.grad
    for norm in (
        lambda: gradient.norm(),
        lambda: gradient.data.norm(2),
        lambda: gradient.detach().norm(),
        lambda: torch.linalg.vector_norm(x=gradient.clone().double()) + 0,
    ):
        expect_loud(norm, "a.weight")
    with torch.no_grad():
        expect_loud(lambda: model.a.weight.copy_(model.b.bias), "a.weight")
    with fsdp.full_params(model):
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
        outside_step = model.a.weight
        assert outside_step.shape == (3, 3)
    expect_loud(inside.step, "full_params")
    model.extra = nn.Linear(3, 3)
    expect_loud(torch.optim.SGD(model.parameters(), lr=0.1).step, "extra.weight")
    del model.extra
    seen = []
    model.b.weight.register_hook(lambda grad: seen.append(grad.shape))
    model(ONES).sum().backward()
    assert seen == [(3, 3)]
    twin = copy.deepcopy(model)
    assert all(p.grad is None for p in twin.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_tensors_and_slices_are_not_taken_for_each_other(world_size: int) -> None:
    run(world_size, refusals)


class Registered(nn.Linear):
    """A base class with a registry, and a parameter with a mark that forward reads."""

    names: list[str] = []

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        Registered.names.append(key)

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight.gain = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.gain


def test_a_class_made_on_the_fly_reaches_no_registry_and_marks_are_seen() -> None:
    plain = seeded(Registered).double()
    expected = plain(ONES)
    fsdp.fsdp_wrap(plain, recompute=fsdp.by_class(nn.Linear))
    assert torch.equal(plain(ONES), expected)
    assert Registered.names == []


class Stream(nn.Linear):
    def chunks(self, x: torch.Tensor) -> Any:
        yield self(x)


def test_a_generator_cannot_be_a_forward_method() -> None:
    expect_loud(lambda: fsdp.fsdp_wrap(Stream(3, 3), forward_methods=("chunks",)), "chunks", "generator")


def odd_starts() -> None:
    torch.manual_seed(0)
    oracle = nn.LSTM(3, 2).double()
    with torch.device("meta"):
        model = nn.LSTM(3, 2, dtype=torch.float64)
    torch.manual_seed(0)
    fsdp.fsdp_wrap(model)
    model(ONES)[0].sum().backward()
    assert set(fsdp.full_state_dict(model, rank0_only=False)) == set(oracle.state_dict())

    carrier = nn.Linear(3, 3)
    carrier.table = nn.Parameter(torch.arange(5, dtype=torch.int16), requires_grad=False)
    carrier.register_buffer("more", torch.arange(3, dtype=torch.int16))
    fsdp.fsdp_wrap(carrier)
    carrier(ONES.float())
    assert torch.equal(fsdp.full_state_dict(carrier, rank0_only=False)["table"], torch.arange(5, dtype=torch.int16))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_recurrent_modules_start_from_meta_and_every_dtype_travels(world_size: int) -> None:
    run(world_size, odd_starts)


def hooks_of_the_unfrozen() -> None:
    """Hooks that were there before a parameter was frozen and wrapped fire once it is free again."""
    model = seeded(Pair).double()
    fired: list[str] = []
    parameters = list(model.a.parameters())
    parameters[0].register_hook(lambda gradient: fired.append("gradient"))
    handles = [p.register_post_accumulate_grad_hook(lambda p: fired.append("reduced")) for p in parameters]
    model.a.requires_grad_(False)
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    x = torch.ones(2, 3, dtype=torch.float64)
    model(x).sum().backward()
    assert not fired
    model.a.requires_grad_(True)
    model(x).sum().backward()
    assert sorted(fired) == ["gradient", "reduced", "reduced"]
    handles[0].remove()  # one from before wrapping
    model(x).sum().backward()
    assert sorted(fired) == ["gradient"] * 2 + ["reduced"] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_survive_freezing_and_unfreezing(world_size: int) -> None:
    run(world_size, hooks_of_the_unfrozen)


def made_in_inference_mode(what: str) -> None:
    """Wrapped, copied or built under inference_mode: what comes out of it trains."""
    with torch.inference_mode(what == "built"):
        model = seeded(Pair).double()
    with torch.inference_mode(what == "wrapped"):
        fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    with torch.inference_mode(what == "copied"):
        model = copy.deepcopy(model)
    reference = seeded(Pair).double()
    x = torch.ones(2, 3, dtype=torch.float64)
    for m in (model, reference):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_inference_mode_made_trains(world_size: int) -> None:
    run(world_size, for_each, [("built",), ("wrapped",), ("copied",)], made_in_inference_mode)


def shown_while_frozen(stage: int, frozen: bool) -> None:
    """full_params of a unit of which a part is frozen, or free again: it is shown, and has a gradient if it is free."""
    model, reference = seeded(Pair).double(), seeded(Pair).double()
    for m in (model, reference):
        m.a.requires_grad_(not frozen)
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), stage=stage)
    x = torch.ones(2, 3, dtype=torch.float64)
    for m in (model, reference):
        m.a.weight.requires_grad_(True)
        m.a.bias.requires_grad_(False)
    with fsdp.full_params(model):
        loss = model(x).sum() + model.a.weight.square().sum() + model.a.bias.sum()
    loss.backward()
    (reference(x).sum() + reference.a.weight.square().sum() + reference.a.bias.sum()).backward()
    assert_parity(model, reference)
    for m in (model, reference):
        m.zero_grad()
        m.requires_grad_(False)
        m(x)
        m.a.weight.requires_grad_(True)
    with fsdp.full_params(model):  # before any forward has seen that it is free
        model.a.weight.square().sum().backward()
    reference.a.weight.square().sum().backward()
    assert_parity(model, reference)
    with fsdp.full_params(model, writeback=True), torch.no_grad():
        model.a.bias.fill_(2.0)
    with torch.no_grad():
        reference.a.bias.fill_(2.0)
    assert_parity(model, reference)


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_params_of_a_unit_that_is_frozen_in_part(world_size: int) -> None:
    combinations = [(stage, frozen) for stage in (3, 1, 0) for frozen in (False, True)]
    run(world_size, for_each, combinations, shown_while_frozen)
