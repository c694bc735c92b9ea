"""Optimizer classes of a program's own, offloaded: what they keep in groups counts once a step, or they are refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import expect_loud, for_each, here, run
from tests.memory.parts import build
from tests.memory.test_offloaded import compare, make, place
from tests.memory.test_optimizer_state import BOTH, steps, wide


class Counting(torch.optim.Optimizer):
    """Keeps a count and a history in its groups, as schedule-free and prodigy-like optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        for group in self.param_groups:
            group["history"], group["total"] = [], torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            scale = group["lr"] / (1 + group["k"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(scale * p.grad + 1e-3 * len(group["history"]) + group["total"])
            group["k"] += 1
            group["history"].append(scale)
            group["total"] += 1e-4
            group["last"] = scale


class CountingInFirst(torch.optim.SGD):
    """Keeps one count for all groups, in the first of them."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]
        first["k"] = first.get("k", 0) + 1
        for group in self.param_groups:
            group["weight_decay"] = 0.01 * first["k"]
        return super().step(closure)


class CountingTensor(torch.optim.Optimizer):
    """Its counter has the shape (1,), and so has a slice of one element."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["count"], state["sum"], state["three"] = torch.zeros(1), torch.zeros_like(p), torch.zeros(3)
                state["count"] += 1
                state["three"] += 2
                state["sum"].add_(p.grad)
                p.sub_(group["lr"] * state["sum"] / state["count"] + 1e-3 * state["three"].sum())


class OnItself(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(closure)


class Later(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["momentum"] > 0.5:
                self.seen = [group["momentum"]]
        return super().step(closure)


class PerParameter(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["updated"] = group.get("updated", 0) + sum(p.grad is not None for p in group["params"])
        return super().step(closure)


class Norms(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["largest"] = sum(float(p.detach().abs().sum()) for p in group["params"] if p.grad is not None)
        return super().step(closure)


class Small(nn.Module):
    """Slices of one element, and of three."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 0.25][: here.world_size]))
        self.shift = nn.Parameter(torch.arange(3.0 * here.world_size))
        self.linear = nn.Linear(64, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.sum() + self.shift.sum()


def counting_body(folder: str, cls: type) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        early = [p for p in model.parameters() if p.ndim > 1]
        groups = [{"params": early}, {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.05}]
        if hasattr(model, "head"):  # a group without gradients counts, too
            groups.append({"params": list(model.head.parameters())})
            head = {id(p) for p in model.head.parameters()}
            for group in groups[:2]:
                group["params"] = [p for p in group["params"] if id(p) not in head]
            model.head.requires_grad_(False)
        optimizer = make(cls, model, offload, groups)
        total = optimizer.param_groups[0].get("total")
        seen = steps(model, optimizer, range(3))
        assert total is optimizer.param_groups[0].get("total")
        return [*seen, *(str({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups)], optimizer

    for net in (wide, Small):
        compare(folder, [place(kind, folder) for kind in BOTH], loop, net, policy=None)


@pytest.mark.parametrize("world_size", [1, 2])
def test_classes_with_counters(tmp_path: Any, world_size: int) -> None:
    run(world_size, for_each, [(str(tmp_path), cls) for cls in (Counting, CountingInFirst, CountingTensor)], counting_body)


def in_backward_counting_body(folder: str) -> None:
    for kind in BOTH:
        expected = None
        for offload in (None, place(kind, folder)):
            model = build(wide, offload=offload)
            early = {} if offload is None else {"in_backward": True}
            optimizer = make(Counting, model, offload, **early)
            found = [*steps(model, optimizer, range(4)), str(optimizer.param_groups[0]["history"])]
            assert found == (expected := expected or found)


def refused_classes_body(folder: str) -> None:
    for kind in BOTH:
        model = build(wide, offload=place(kind, folder))
        expect_loud(lambda: fsdp.offloaded(OnItself, model, lr=0.1), "OnItself", "'calls'", "group['calls']")
        expect_loud(lambda: fsdp.offloaded(PerParameter, model, lr=0.1), "PerParameter", "group['updated']")
        assert os.listdir(folder) == []
        optimizer = fsdp.offloaded(Later, model, lr=0.1)
        steps(model, optimizer, range(1))
        optimizer.param_groups[0]["momentum"] = 0.9
        expect_loud(lambda: steps(model, optimizer, range(1)), "Later", "'seen'")
        expect_loud(optimizer.step, "load a checkpoint")
        optimizer.close()
        optimizer = fsdp.offloaded(Norms, model, lr=0.1)
        expect_loud(lambda: steps(model, optimizer, range(1)), "Norms", "group['largest']")
        optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_classes_that_pieces_would_get_wrong_are_refused(tmp_path: Any, world_size: int) -> None:
    run(world_size, refused_classes_body, str(tmp_path))
    run(world_size, in_backward_counting_body, str(tmp_path))
