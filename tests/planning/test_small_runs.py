"""Small models whose every byte is predicted, on two ranks: odd sizes, and parameters that no unit owns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import here, run, seeded
from tests.planning.measure import peak_of
from tests.planning.models import GPT, Block

TOKENS = torch.zeros(4, 32, dtype=torch.long)


class Odd(nn.Module):
    """A 0-d and an empty parameter, and many small ones: more bytes of gradients than of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale + self.empty.sum()).square().mean()


def peaks(
    build: Callable[[], nn.Module], inputs: Tensor, optimizer_class: type = torch.optim.SGD, **options: Any
) -> tuple[int, int]:
    model = seeded(build)
    context = {"world_size": here.world_size, "inputs": inputs, "optimizer": optimizer_class, "device": "cpu"}
    plan = fsdp.plan(build, **context, **options)
    fsdp.fsdp_wrap(model, **options)
    optimizer = optimizer_class(model.parameters())

    def step() -> None:
        model(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return plan.peak_bytes, peak_of(step)


def test_small_gradients_go_into_the_buffer_as_they_come() -> None:
    """One rank: a transport's copies, which an observer sees late, are left out."""
    predicted, measured = run(1, peaks, Odd, torch.ones(1, 13))[0]
    assert predicted == measured


class Words(nn.Module):
    """One parameter is larger than all others."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(2000, 32, sparse=sparse), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens)).square().mean()


@pytest.mark.parametrize("ranks, sparse", [(1, False), (2, True)])
def test_the_optimizer_loops_over_unequal_parameters_and_a_sparse_gradient_is_dense_for_a_moment(
    ranks: int, sparse: bool
) -> None:
    for predicted, measured in run(ranks, peaks, functools.partial(Words, sparse), TOKENS, torch.optim.AdamW):
        assert predicted == measured


def test_a_sum_in_bf16_lives_until_its_copy_is_at_rest() -> None:
    precision = fsdp.Precision(torch.bfloat16, reduce_dtype=torch.bfloat16)
    options = {"precision": precision, "offload": fsdp.Offload(params="cpu")}
    for predicted, measured in run(1, peaks, functools.partial(Words, False), TOKENS, **options):
        assert predicted == measured


class Tables(nn.Module):
    """Tensors that are no buffers: one is an attribute, one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.table, self.more = torch.ones(4, 3200), [torch.ones(500, 32)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = (tokens.repeat(1, 100) * self.table).view(4, 32, 100).mean(-1) + self.more[0][:4]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_tensors_that_modules_hold_unregistered() -> None:
    for predicted, measured in run(1, peaks, Tables, TOKENS):
        assert predicted == measured


def ignored(microbatches: int) -> dict[str, Any]:
    """The embedding is larger than all units together."""
    model = seeded(GPT, 2, 64, 4000, 32, tied=False)
    plan = fsdp.plan(model, world_size=here.world_size, policy=fsdp.by_class(Block), ignored=[model.embed],
                     inputs=TOKENS, microbatches=microbatches, device="cpu", rank=here.rank)  # fmt: skip
    fsdp.fsdp_wrap(model, fsdp.by_class(Block), ignored=[model.embed])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(microbatches):
            model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return plan.compare(model, step).to_dict()["rows"]


@pytest.mark.slow
def test_averages_of_ignored_parameters_are_in_the_trace_and_in_the_plan() -> None:
    for microbatches in (1, 3):
        for rows in run(2, ignored, microbatches):
            assert rows["all_reduce_calls"]["measured"] == microbatches
            assert rows["all_reduce_bytes"]["measured"] == microbatches * 4 * 4000 * 64
            for what, row in rows.items():
                assert row["predicted"] == row["measured"], (what, row)
