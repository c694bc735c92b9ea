"""`fsdp.auto` beside wrapping by block: never worse by its own measure, and better in what a run holds and sends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.errors import ConfigError
from tests.harness import Counts, run, seeded
from tests.planning.measure import peak_of
from tests.planning.models import GPT


class Chain(nn.Module):
    """Many blocks of next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stages(nn.Module):
    """Two stages, which are called, of small blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(Chain() for _ in range(2))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def tokens(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


# name: (model, batch, what auto is told); the budgets are below what wrapping by block needs.
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "chain": (Chain, torch.ones(4, 16), {}),
    "stages": (Stages, torch.ones(4, 16), {}),
    "big embedding": (lambda: GPT(3, 64, 4000, 32, tied=False), tokens(2, 32), {"budget": 9_000_000}),
    "activations": (lambda: GPT(4, 64, 256, 32, tied=True), tokens(16, 32), {"budget": "6MiB"}),
    "gpt": (lambda: GPT(4, 64, 256, 32, tied=True), tokens(4, 32), {}),
}


@functools.cache
def choose(name: str) -> Any:
    build, batch, told = MODELS[name]
    return fsdp.auto(inputs=batch, world_size=2, device="cpu", **told).choose(build)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_never_worse_than_by_block_by_its_own_measure(name: str) -> None:
    choice = choose(name)
    base, best = choice.by_block, choice.best
    if choice.budget_bytes is None or base.peak_bytes <= choice.budget_bytes:
        assert best.step_s <= base.step_s
    else:
        assert best.peak_bytes <= choice.budget_bytes or best.peak_bytes == min(c.peak_bytes for c in choice.considered)
    assert max(map(len, str(choice).splitlines())) <= 80 and "chosen" in str(choice)


def measured(name: str, options: dict[str, Any]) -> tuple[int, int]:
    """Peak bytes and collectives of a real step."""
    build, batch, _ = MODELS[name]
    model = fsdp.fsdp_wrap(seeded(build), **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        output = model(batch)
        (output if output.dim() == 0 else output.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    peak = peak_of(step)
    with Counts() as counts:
        step()
    return peak, len(counts.calls)


def both(name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    choice = choose(name)
    return measured(name, choice.by_block.options), measured(name, choice.options)


@pytest.mark.parametrize("name", ["big embedding", pytest.param("activations", marks=pytest.mark.slow)])
def test_a_run_fits_the_budget_that_by_block_breaks(name: str) -> None:
    budget = choose(name).budget_bytes
    (by_block, _), (chosen, _) = run(2, both, name)[0]
    assert chosen <= budget < by_block, (chosen, budget, by_block)


@pytest.mark.parametrize("name", ["chain", pytest.param("stages", marks=pytest.mark.slow)])
def test_a_run_sends_fewer_messages_where_latency_is_all(name: str) -> None:
    (_, by_block), (_, chosen) = run(2, both, name)[0]
    assert 3 * chosen <= by_block


def test_links_decide() -> None:
    """The same model: far apart it is one unit; where messages cost nothing and memory is short it has many."""
    build, batch, _ = MODELS["gpt"]
    far = fsdp.auto(inputs=batch, world_size=8, latency=1e-2).choose(build)
    assert far.options["policy"] is None
    near = fsdp.auto(inputs=batch, world_size=8, latency=0.0, budget=far.best.peak_bytes - 1).choose(build)
    assert near.options["policy"] is not None and near.best.peak_bytes < far.best.peak_bytes


def test_it_says_what_it_planned_for() -> None:
    small = " ".join(str(choose("big embedding")).split())  # wrapping by block is too large there, the choice is not
    assert "beside wrapping by block, which does not fit the budget: " in small
    alone = fsdp.auto(inputs=torch.ones(2, 8)).choose(nn.Linear(8, 8))
    assert str(alone).startswith("planned for 1 rank, stage 3, fp32, AdamW, on cuda\n")
    asked = fsdp.auto(inputs=torch.ones(2, 8), mesh=(2, 32), precision="bf16", optimizer=None, stage=2)
    first = str(asked.choose(nn.Linear(8, 8))).splitlines()[0]
    assert first == "planned for 64 ranks (2 replicas of 32), stage 2, bf16, no optimizer, on cuda"


@pytest.mark.slow
def test_as_a_policy_it_chooses_the_units() -> None:
    build, batch, told = MODELS["big embedding"]
    policy = fsdp.auto(inputs=batch, world_size=2, device="cpu", **told)
    planned = {unit.name for unit in fsdp.plan(build, world_size=2, policy=policy).units}
    assert "embed" in planned and "head" in planned and "blocks.0" in planned
    model = fsdp.fsdp_wrap(build(), fsdp.auto(inputs=batch))
    assert isinstance(model, fsdp.FSDPUnit)


def test_budgets_and_models_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="budget"):
        fsdp.auto(budget="plenty")
    choice = fsdp.auto(budget=1000, inputs=torch.ones(4, 16), world_size=2).choose(Chain)
    assert "nothing fits" in str(choice)
    assert fsdp.auto(inputs=torch.ones(2, 8), world_size=2).choose(nn.Linear(8, 8)).options["policy"] is None
