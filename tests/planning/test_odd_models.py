"""Models that do unusual things are planned as they run: units called twice, recomputed by the user, nested, unused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdplite as fsdp
from tests.harness import Counts, here, run, seeded
from tests.planning.measure import peak_of
from tests.planning.models import GPT, Block

TOKENS = torch.zeros(2, 32, dtype=torch.long)


class Twice(GPT):
    """Every block is called twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x)).square().mean()


class Recomputed(GPT):
    """The user recomputes around the units."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x)).square().mean()


class Convolutions(nn.Module):
    """Running statistics, dropout, an unused layer, a dict for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.1))
            for a, b in ((3, 16), (16, 32))
        )
        self.last = nn.Linear(32, 10)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        for block in self.net:
            x = block(x)
        return {"y": self.last(x.mean((2, 3))), "nothing": None}


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "called twice": (lambda: Twice(2, 64, 256, 32, tied=True), TOKENS, {"policy": fsdp.by_class(Block)}),
    "recomputed": (lambda: Recomputed(3, 64, 256, 32, tied=True), TOKENS, {"policy": fsdp.by_class(Block)}),
    "convolutions": (
        Convolutions, torch.ones(2, 3, 16, 16), {"policy": fsdp.by_class("Sequential"), "precision": "bf16"},
    ),
    "nested": (lambda: GPT(2, 64, 256, 32, tied=False), TOKENS, {"policy": fsdp.by_class(Block, "Linear")}),
    "replicated": (lambda: GPT(2, 64, 256, 32, tied=False), TOKENS, {"stage": 0, "precision": "bf16"}),
}  # fmt: skip


def body(name: str) -> None:
    build, batch, options = MODELS[name]
    model = fsdp.fsdp_wrap(seeded(build), **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        output = model(batch)
        (output["y"].float().square().mean() if isinstance(output, dict) else output).backward()
        optimizer.step()
        optimizer.zero_grad()

    peak = peak_of(step)
    with Counts() as counts:
        step()
    plan = fsdp.plan(build, world_size=here.world_size, rank=here.rank, inputs=batch, device="cpu", **options)
    calls = [(call.kind, call.elements, call.dtype) for call in counts.calls]
    assert calls == [(c.kind, c.numel, c.dtype) for c in plan.traffic.calls if c.kind != "control"], name
    assert abs(plan.peak_bytes - peak) <= 0.05 * peak, (name, plan.peak_bytes, peak)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_unusual_models_run_as_planned(world_size: int) -> None:
    for name in MODELS:
        run(world_size, body, name)
