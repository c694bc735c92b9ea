"""One fake step serves many policies, and tells of each what a step of its own would tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.planning.models import GPT, Block
from tests.planning.test_options import numbers


class Scaled(nn.Module):
    """A block that is given a table in fp32, which a low precision unit casts on its way in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.down(self.up(x * table.to(x.dtype)).relu())


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(48, 32))
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.head = nn.Linear(32, 500)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.table)
        return self.head(x)


def gpt() -> nn.Module:
    return GPT(3, 32, 500, 16, tied=False)


@pytest.mark.parametrize(
    "build, inputs, precision, recordings",
    [(gpt, torch.zeros(2, 16, dtype=torch.long), None, 1), (gpt, torch.zeros(2, 16, dtype=torch.long), "bf16", 1),
     (Tables, torch.ones(48, 32), None, 1), (Tables, torch.ones(48, 32), "bf16", 2)],
    ids=["fp32", "bf16", "table in fp32", "table that units cast"],
)  # fmt: skip
def test_a_shared_fake_step_tells_what_one_of_its_own_does(
    build: object, inputs: Tensor, precision: str | None, recordings: int
) -> None:
    options = {"world_size": 4, "inputs": inputs, "precision": precision}
    choice = fsdp.auto(**options).choose(build)
    assert sum(map(len, choice.best.plan.question.memory.recordings.values())) == recordings
    compared = 0
    for candidate in choice.considered:
        if candidate.options["prefetch"] == 1 and candidate.options["reshard_after_forward"] is None:
            own = fsdp.plan(build, **options, **candidate.options)
            assert numbers(candidate.plan) == numbers(own), candidate.describe()
            assert [(t.flops, t.operators) for t in candidate.plan.tasks] == [(t.flops, t.operators) for t in own.tasks]
            compared += 1
    assert compared >= 4


def test_recomputation_and_a_policy_of_its_own() -> None:
    inputs = torch.zeros(2, 16, dtype=torch.long)
    by_block = fsdp.by_class(Block)
    choice = fsdp.auto(world_size=2, inputs=inputs, budget=1000).choose(gpt)
    recomputed = [c for c in choice.considered if c.options["recompute"] is not None]
    assert {str(c.options["recompute"]) for c in recomputed} == {"sqrt", str(by_block)} or len(recomputed) >= 2
    for candidate in recomputed:
        own = fsdp.plan(gpt, world_size=2, inputs=inputs, **candidate.options)
        assert numbers(candidate.plan) == numbers(own), candidate.describe()
