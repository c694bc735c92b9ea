"""Ranks that do different things where sizes agree: each of these exchanged foreign weights in silence once."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import Vec, expect_loud, here, run, run_together

pytestmark = pytest.mark.slow  # most of these wait for a time-out


def two_equal_models() -> None:
    first, second = fsdp.fsdp_wrap(Vec(4, 1.0)), fsdp.fsdp_wrap(Vec(4, 2.0))
    models = (first, second) if here.rank == 0 else (second, first)

    def both() -> None:
        (models[0](1.0) + models[1](1.0)).backward()

    expect_loud(both)


def test_two_equal_models_in_another_order() -> None:
    run(2, two_equal_models, fresh=True, pg_timeout_s=5)


def other_divisors() -> None:
    model = fsdp.fsdp_wrap(Vec(4, 1.0))
    model.set_gradient_divide_factor(1.0 + here.rank)
    expect_loud(lambda: model(1.0).backward(), "rank 0: 1.0; rank 1: 2.0", "set_gradient_divide_factor")


def test_a_divisor_that_differs() -> None:
    run(2, other_divisors, fresh=True, pg_timeout_s=5)


def steps_of_other_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), stage=1, prefetch=0)
    x = torch.ones(2, 4)
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in model]
    model(x).sum().backward()
    optimizers[here.rank].step()
    expect_loud(lambda: model(x).sum().backward())


def test_shards_that_changed_on_one_rank_only() -> None:
    run(2, steps_of_other_blocks, fresh=True, pg_timeout_s=5)


def gradient_on_one_rank() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    x = torch.ones(2, 4)
    model(x).sum().backward()

    def on_rank_0() -> None:
        if here.rank == 0:
            fsdp.full_grad(model, "0.weight")
        model(x).sum().backward()

    expect_loud(on_rank_0)


def test_a_gradient_gathered_on_one_rank_only() -> None:
    run(2, gradient_on_one_rank, fresh=True, pg_timeout_s=5)


class MixedParts(nn.Module):
    """One unit of two dtypes; which of them gets a gradient depends on the rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.float32))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, part: str) -> torch.Tensor:
        return getattr(self, part).sum()


def parts_by_rank() -> None:
    model = fsdp.fsdp_wrap(MixedParts())
    model("narrow" if here.rank == 0 else "wide").backward()
    for name in ("narrow", "wide"):
        # One rank's gradient is 1, the other's 0: the mean is 1/2.
        assert torch.equal(fsdp.full_grad(model, name), torch.full((4,), 0.5, dtype=getattr(model, name).dtype)), name


def test_parts_of_a_unit_that_only_some_ranks_use() -> None:
    run(2, parts_by_rank)


def one_evaluates() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    x = torch.ones(2, 4)
    for _ in range(2):
        model(x).sum().backward()

    def step() -> None:
        if here.rank == 0:
            with torch.no_grad():
                model(x)
        model(x).sum().backward()

    text = expect_loud(step)
    assert "no rank is missing" in text and "evaluation" in text and "missing ranks" not in text, text
    assert f"rank {here.rank} waits in" in text and "agreement before" in text


def test_an_evaluation_on_one_rank_only() -> None:
    run(2, one_evaluates, fresh=True, pg_timeout_s=5)


def other_options() -> None:
    text = expect_loud(lambda: fsdp.fsdp_wrap(nn.Linear(3, 3), prefetch=here.rank), "prefetch=0", "prefetch=1")
    assert "stage" not in text and "recompute" not in text, text
    expect_loud(lambda: fsdp.fsdp_wrap(nn.Linear(3, 3), stage=2 + here.rank), "stage=2", "stage=3")


def test_the_option_that_differs_is_named() -> None:
    run(2, other_options, fresh=True, pg_timeout_s=5)


class Routed(nn.Module):
    """A unit inside, and two experts of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Vec(4, 1.0)
        self.experts = nn.ModuleList(Vec(4, 1.0) for _ in range(2))

    def forward(self, used: int) -> torch.Tensor:
        return self.inner(1.0) * sum(expert(1.0) for expert in self.experts[:used])


def unequal_routes() -> None:
    model = nn.Sequential(Routed())
    fsdp.fsdp_wrap(model, fsdp.by_name("0", "0.inner"))
    needles = ("0.experts.1.w", "rank 1 has no gradient", "without units inside")
    expect_loud(lambda: model(2 - here.rank).backward(), *needles)
    alone = fsdp.fsdp_wrap(nn.Sequential(Routed()), fsdp.by_name("0"))
    alone(2 - here.rank).backward()  # the cure
    assert fsdp.full_grad(alone, "0.experts.1.w").tolist() == [4 / here.world_size] * 4


def test_ranks_that_use_different_parameters_of_a_unit_with_units_inside() -> None:
    run(2, unequal_routes, fresh=True, pg_timeout_s=5)


def unequal_routes_later() -> None:
    """A step that a record predicts asks nobody first, so this ends with the time-out; the error says what differs."""
    model = nn.Sequential(Routed())
    fsdp.fsdp_wrap(model, fsdp.by_name("0", "0.inner"))
    for _ in range(2):
        model(2).backward()
    lacking = "without a gradient of 0.experts.1.w of unit '0', which has others"
    expect_loud(lambda: model(2 - here.rank).backward(), "rank 0: reduce-scatter of unit '0'", lacking)


def test_ranks_that_use_different_parameters_in_a_later_step() -> None:
    run(2, unequal_routes_later, fresh=True, pg_timeout_s=3)


class Uneven(nn.Module):
    """Units of other sizes: a gather of one that meets a gather of another kills a gloo process."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.fails:
            raise ValueError("boom")
        return x


def goes_on_alone(how: str) -> None:
    """Rank 1 catches an error of its own, or drops an output, and begins the next step while rank 0 is in backward."""
    model = fsdp.fsdp_wrap(Uneven(), fsdp.by_name("blocks.*"))
    x = torch.ones(2, 5)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()

    def step() -> None:
        if here.rank == 1:
            model.fails = how == "raises"
            with contextlib.suppress(ValueError):
                model(x)
            model.fails = False
        model(x).sum().backward()

    expect_loud(step, "rank 1 waits in agreement before", "rank 0 waits in all-gather in backward")


def test_a_rank_that_begins_its_next_step_alone() -> None:
    run_together(2, goes_on_alone, [(("raises",), ()), (("drops",), ())], pg_timeout_s=3)


def absent_from_wrapping() -> None:
    if here.rank == 0:
        expect_loud(lambda: fsdp.fsdp_wrap(Vec(4, 1.0)), "missing: ranks [1]", "fsdp_wrap on every rank")
    else:
        time.sleep(8)


def test_a_rank_that_never_wraps() -> None:
    run(2, absent_from_wrapping, fresh=True, pg_timeout_s=4)
