"""Whether a plan fits, what would make it fit, and a plan beside a measured run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.errors import ConfigError, DoesNotFitError
from fsdplite.planning.changes import price
from fsdplite.planning.prediction import Plan
from tests.harness import here, run, seeded
from tests.planning.models import GPT, Block

TOKENS = torch.zeros(16, 64, dtype=torch.long)


@pytest.fixture(scope="module")
def root_only() -> Plan:
    """A model that is one unit, which is seldom wise."""
    return fsdp.plan(lambda: GPT(4, 128, 1024, 64, tied=False), world_size=2, inputs=TOKENS)


def refusal(plan: object, budget: object) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        plan.fits(budget)
    return caught.value


def test_what_fits_is_true(root_only: Plan) -> None:
    plan = root_only
    assert root_only.fits(root_only.peak_bytes) is True and root_only.fits("80GiB") is True
    refusal(root_only, root_only.peak_bytes - 1)


@pytest.mark.parametrize("budget", ["much", "80 apples", 0, -1, None, 1.5])
def test_a_budget_is_bytes(root_only: Plan, budget: object) -> None:
    with pytest.raises(ConfigError, match="budget"):
        root_only.fits(budget)


def test_remedies_fit_are_sorted_and_tell_saving_and_price(root_only: Plan) -> None:
    plan = root_only
    budget = int(plan.peak_bytes * 0.75)
    error = refusal(plan, budget)
    assert error.remedies and all(remedy.peak_bytes <= budget for remedy in error.remedies)
    assert all(remedy.saved_bytes == plan.peak_bytes - remedy.peak_bytes for remedy in error.remedies)
    weights = [remedy.price.weight for remedy in error.remedies]
    assert weights == sorted(weights)
    assert "saves" in str(error) and "costs" in str(error) and error.remedies[0].text in str(error)
    # What is advised is what a plan made by hand says too.
    by_hand = {
        'recompute="sqrt"': {"recompute": "sqrt"},
        'recompute=by_class("Block")': {"recompute": fsdp.by_class("Block")},
        'precision="bf16"': {"precision": "bf16"},
        'policy=by_class("Block")': {"policy": fsdp.by_class("Block")},
        "world_size=4": {"world_size": 4},
        "microbatches=2 of half the size": {"microbatches": 2, "inputs": TOKENS[:8]},
    }
    checked = 0
    for remedy in error.remedies:
        if remedy.text in by_hand:
            options = {"world_size": 2, "inputs": TOKENS} | by_hand[remedy.text]
            again = fsdp.plan(lambda: GPT(4, 128, 1024, 64, tied=False), **options)
            assert again.peak_bytes == remedy.peak_bytes, remedy.text
            checked += 1
    assert checked


@pytest.mark.parametrize("policy", [fsdp.by_class("Block"), None], ids=str)
def test_a_large_embedding_is_advised_to_be_a_unit_where_that_is_cheapest(policy: object) -> None:
    """Two matrices of 20,000 x 64 that the root holds for the whole step, beside blocks of 50,000 elements."""
    options = {"world_size": 8, "policy": policy, "precision": "bf16", "inputs": TOKENS[:1]}
    plan = fsdp.plan(lambda: GPT(2, 64, 20_000, 64, tied=False), **options)
    by_hand = plan.but(policy=fsdp.by_class("Block") | fsdp.by_name("embed", "head"))
    remedy = refusal(plan, by_hand.peak_bytes).remedies[0]
    assert remedy.text == 'policy=by_class("Block") | by_name("embed", "head")'
    assert remedy.peak_bytes == by_hand.peak_bytes < plan.peak_bytes - 2 * 20_000 * 64
    assert not any("by_name" in remedy.text for remedy in refusal(by_hand, by_hand.peak_bytes - 1).remedies)


@pytest.mark.slow
def test_changes_are_combined_where_none_is_enough(root_only: Plan) -> None:
    plan = root_only
    error = refusal(plan, int(plan.peak_bytes * 0.3))
    assert len(error.remedies) == 1 and ", " in error.remedies[0].text
    assert error.remedies[0].peak_bytes <= plan.peak_bytes * 0.3


def test_offload_is_advised_beside_a_device() -> None:
    plan = fsdp.plan(lambda: GPT(2, 64, 1024, 16, tied=False), world_size=2, precision="bf16", inputs=TOKENS[:1, :16])
    error = refusal(plan, plan.peak_bytes - plan.resting.optimizer // 2)
    advised = [remedy for remedy in error.remedies if "Offload" in remedy.text]
    assert advised and advised[0].note.endswith("updated there") and advised[0].price.weight > 0
    assert not any("Offload" in remedy.text for remedy in refusal(plan.but(device="cpu"), 1024).remedies)


@pytest.mark.slow
def test_the_least_that_was_found_is_said(root_only: Plan) -> None:
    error = refusal(root_only, 1024)
    assert not error.remedies and "no combination" in str(error)


def test_recomputation_is_priced_as_one_more_forward() -> None:
    """A stack of Linears: 2 + 4 flops a weight and row, 8 with recomputation."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    options = {"world_size": 64, "policy": fsdp.by_name("?"), "inputs": torch.ones(4096, 64, requires_grad=True)}
    plain, recomputed = (fsdp.plan(model, recompute=again, **options) for again in (None, fsdp.by_name("?")))
    found = price(plain, recomputed)
    assert found.flops == pytest.approx(8 / 6) and found.sent == found.ranks == 1
    assert str(found) == "+33% computation"


def compared() -> dict:
    model = seeded(GPT, 3, 64, 256, 32, tied=True)
    plan = fsdp.plan(model, world_size=here.world_size, policy=fsdp.by_class(Block), inputs=TOKENS[:4, :32],
                     device="cpu", rank=here.rank)  # fmt: skip
    fsdp.fsdp_wrap(model, fsdp.by_class(Block))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(TOKENS[:4, :32]).backward()
        optimizer.step()
        optimizer.zero_grad()

    comparison = plan.compare(model, step)
    assert "all gather calls" in str(comparison) and max(map(len, str(comparison).splitlines())) <= 80
    assert len(plan.compare(model).rows) == 3
    other = fsdp.plan(lambda: GPT(3, 64, 256, 32, tied=True), world_size=2)
    with pytest.raises(ConfigError, match="same policy"):
        other.compare(model, step)
    return comparison.to_dict()["rows"]


def test_prediction_beside_measurement() -> None:
    for rows in run(2, compared):
        for what, row in rows.items():
            tolerance = 0.05 if what == "peak_bytes" else 0
            assert abs(row["predicted"] - row["measured"]) <= tolerance * row["measured"], (what, row)
        assert rows["all_gather_calls"]["measured"] == 2 * 3 + 1
