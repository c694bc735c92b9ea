"""Optimizers that set ``p.data`` to another tensor in their step, as many do: the shard gets the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.errors import ParameterUseError
from tests.harness import MLP, assert_close, assert_rested, for_each, gather, here, run, seeded


class AssigningSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class Cutting(AssigningSGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = p.data[1:].clone()


class Plus(nn.Module):
    """With a parameter that no unit owns, and one that rank 1 has nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.ignored = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ignored((self.net(x) * self.one.to(x.dtype)).to(self.ignored.weight.dtype))


def steps(model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float64) -> None:
    for step in range(3):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)  # on all ranks
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def body(folder: str, stage: int, offload: dict, precision: str | None) -> None:
    dtype = torch.float32 if precision else torch.float64
    where = {"path": folder} if offload.get("optimizer") == "nvme" else {}
    reference = seeded(Plus).to(dtype)
    if precision:  # masters in fp32, the same update in place
        fsdp.fsdp_wrap(reference, stage=stage, precision=precision, ignored=(reference.ignored,))
        steps(reference, torch.optim.SGD(reference.parameters(), lr=0.5), dtype)
    else:
        steps(reference, AssigningSGD(reference.parameters(), lr=0.5))
    model = seeded(Plus).to(dtype)
    made = fsdp.Offload(**offload, **where) if offload else None
    fsdp.fsdp_wrap(model, stage=stage, precision=precision, ignored=(model.ignored,), offload=made)
    is_offloaded = "optimizer" in offload
    optimizer = (
        fsdp.offloaded(AssigningSGD, model, lr=0.5) if is_offloaded else AssigningSGD(model.parameters(), lr=0.5)
    )
    steps(model, optimizer, dtype)
    expected = gather(reference) if precision else dict(reference.named_parameters())
    found = gather(model)
    for name, value in expected.items():
        assert_close(found[name], value.detach())
    assert_rested(model)
    if is_offloaded:
        optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_assigned_values_reach_the_shard(tmp_path: Any, world_size: int) -> None:
    rows = [
        *((str(tmp_path), stage, {}, None) for stage in (0, 1, 2, 3)),
        (str(tmp_path), 3, {"params": "cpu"}, None),
        (str(tmp_path), 3, {"optimizer": "cpu"}, None),
        (str(tmp_path), 3, {"optimizer": "nvme"}, None),
        (str(tmp_path), 3, {"params": "cpu", "optimizer": "nvme"}, "bf16"),
    ]
    run(world_size, for_each, rows, body)


def cut_body() -> None:
    model = seeded(MLP)
    fsdp.fsdp_wrap(model)
    before = gather(model)
    optimizer = Cutting(model.parameters(), lr=0.1)
    with pytest.raises(ParameterUseError, match=r"set \.data of a parameter[\s\S]*0\.weight"):
        optimizer.step()
    assert {type(p).__name__ for p in model.parameters()} == {"ShardedParameter"}
    assert all(torch.equal(before[name], value) for name, value in gather(model).items())
    assert here.world_size == 2


def test_another_shape_is_refused() -> None:
    run(2, cut_body)
