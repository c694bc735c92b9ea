"""A plain optimizer whose step raises: afterwards parameters are guarded, and the next forward has what the shards hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.errors import ShardedAccessError
from tests.harness import MLP, assert_rested, expect_loud, for_each, here, plain, run, seeded


class Breaks(Exception):
    pass


class HalfSGD(torch.optim.Optimizer):
    """Updates some parameters and raises, while ``breaks_at`` says so."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.breaks_at: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if number == self.breaks_at:
                raise Breaks
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def whole_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """An unwrapped one with the masters' values."""
    twin = seeded(MLP)
    twin.load_state_dict(fsdp.full_state_dict(model, rank0_only=False))
    return twin.to(dtype)


def body(stage: int, precision: str | None, offload: dict | None, closure: bool, held: bool) -> None:
    model = seeded(MLP).to(torch.float32)
    fsdp.fsdp_wrap(model, stage=stage, precision=precision, offload=fsdp.Offload(**offload) if offload else None)
    optimizer = HalfSGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(here.rank))

    def backward() -> None:
        model(x).float().square().sum().backward()

    backward()
    before = {name: plain(value) for name, value in fsdp.full_state_dict(model, rank0_only=False).items()}
    optimizer.breaks_at = 2
    problem: Any = None
    try:
        if closure:
            optimizer.step(backward)
        else:
            optimizer.step()
    except Breaks as found:
        problem = found if held else None  # a program may keep it, and with it the frames of the step
    else:
        raise AssertionError("nothing was raised")
    if not held:
        assert {type(p).__name__ for p in model.parameters()} == {"ShardedParameter"}
        assert [p.ndim for p in model.parameters()] == [2, 1, 2, 1]
        expect_loud(lambda: model[0].weight @ x.T, "0.weight")
    found = model(x)
    after = fsdp.full_state_dict(model, rank0_only=False)
    changed = [not torch.equal(before[name], value) for name, value in after.items()]
    assert changed == [True, True, False, False]
    dtype = torch.bfloat16 if precision else torch.float32
    assert torch.equal(found.float(), whole_model(model, dtype)(x.to(dtype)).float())
    del found, problem
    model.zero_grad()
    optimizer.breaks_at = None
    backward()
    optimizer.step()
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_raises_half_way(world_size: int) -> None:
    rows = [
        (stage, precision, offload, closure, held)
        for stage, precision, offload in (
            (0, None, None), (1, "bf16", None), (2, None, None), (3, "bf16", None),
            (3, "bf16", {"params": "cpu"}), (2, "bf16", {"params": "cpu"}), (3, None, {"params": "cpu"}),
        )
        for closure, held in ((False, False), (False, True), (True, False))
    ]  # fmt: skip
    run(world_size, for_each, rows, body)


def hook_body() -> None:
    """A user's hook that raises before the step, and one that hands on other arguments."""
    model = seeded(MLP)
    fsdp.fsdp_wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def breaks(*_: Any) -> None:
        raise Breaks

    model(torch.ones(1, 7, dtype=torch.float64)).sum().backward()
    handle = optimizer.register_step_pre_hook(breaks)
    try:
        optimizer.step()
    except Breaks:
        pass
    assert {type(p).__name__ for p in model.parameters()} == {"ShardedParameter"}
    handle.remove()
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, *args[1:]), dict(kwargs)))
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.extend(type(p).__name__ for p in model.parameters()))
    before = fsdp.full_state_dict(model, rank0_only=False)
    optimizer.step()
    assert seen == ["Parameter"] * 4  # plain until the step is over
    after = fsdp.full_state_dict(model, rank0_only=False)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert {type(p).__name__ for p in model.parameters()} == {"ShardedParameter"}


def test_hooks_of_the_user() -> None:
    run(2, hook_body)


def sparse_body(folder: str) -> None:
    model = seeded(MLP)
    fsdp.fsdp_wrap(model, offload=fsdp.Offload(optimizer="cpu"))
    with pytest.raises(ShardedAccessError, match=r"SparseAdam updates by sparse gradients[\s\S]*use Adam"):
        fsdp.offloaded(torch.optim.SparseAdam, model)
    model(torch.ones(1, 7, dtype=torch.float64)).sum().backward()
    with pytest.raises(ShardedAccessError, match=r"SparseAdam updates by sparse gradients[\s\S]*use Adam"):
        torch.optim.SparseAdam(model.parameters()).step()


def test_sparse_adam_is_refused_by_name(tmp_path: Any) -> None:
    run(1, sparse_body, str(tmp_path))
