"""More that cannot work and is refused by name: writes through .data, recording a unit, modules of two managers."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import (
    Block,
    Stack,
    assert_all,
    assert_close,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    here,
    mse,
    run,
    stack_batch,
)
from tests.test_refused_by_name import INITIALISERS, still_trains, wrapped_stack


# ---- slices that a write through .data would take for the whole


def writes_through_data(stage: int) -> None:
    """P4 by the side door: what is drawn, or depends on a place or a shape, is refused on every rank."""
    model = nn.Sequential(nn.Linear(1, 1, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64))
    fsdp.fsdp_wrap(model, stage=stage)
    before = gather(model)
    writes: dict[str, Callable[[Any], Any]] = {
        name: lambda w, initialise=initialise: initialise(w.data) for name, initialise in INITIALISERS.items()
    }
    writes |= {
        "randn_like": lambda w: w.data.add_(torch.randn_like(w.data)),
        "dropout": lambda w: nn.functional.dropout(w.detach(), 0.5),
        "slice": lambda w: w.data.__setitem__(slice(0, 1), 5.0),
        "whole": lambda w: w.data.copy_(torch.zeros(w.full_shape, dtype=torch.float64)),
    }
    accepted = []
    for position in (0, 1):
        weight = model[position].weight
        for name, write in writes.items():
            if name == "whole" and position == 0:
                continue  # one element: a scalar for all purposes
            try:
                expect_loud(lambda write=write, weight=weight: write(weight), f"{position}.weight")
            except AssertionError as error:
                accepted.append(f"{name} of {position}: {error}")
    assert not accepted, "\n".join(accepted)
    for key, value in gather(model).items():
        assert_close(value, before[key], bitwise=True, what=key)
    for parameter in model.parameters():  # the same everywhere, whatever the place
        parameter.data[:] = 2.0
        parameter.data[parameter.data > 1] = 3.0
        nn.init.constant_(parameter.data, 4.0)
        parameter.data.mul_(torch.tensor([0.5], dtype=torch.float64)).add_(parameter.detach())
    fsdp.mark_updated(model)
    assert_all(gather(model), 4.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_writes_through_data_that_are_not_elementwise(world_size: int) -> None:
    run(world_size, for_each, [(3,), (0,)] if world_size == 2 else [(3,)], writes_through_data)


# ---- programs that would record a unit's call, or keep its weights apart from it


def recorded() -> None:
    model = wrapped_stack()
    x = stack_batch(0, here.rank)[0]
    from torch.fx.experimental.proxy_tensor import make_fx

    for record in (
        lambda: torch.jit.trace(model, x),
        lambda: torch.export.export(model, (x,)),
        lambda: make_fx(model)(x),
        lambda: torch.func.linearize(model, x),
    ):
        expect_loud(record, "traced or exported", "full_state_dict")
    expect_loud(lambda: torch.jit.script(model), "torch.jit.script", "full_state_dict")
    expect_loud(lambda: copy.copy(model), "copy.deepcopy")
    expect_loud(lambda: mse(model, stack_batch(0, 0)).backward(inputs=list(model.parameters())), "requires_grad_(False)")
    still_trains(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_recording_a_unit_is_refused(world_size: int) -> None:
    run(world_size, recorded)


def in_a_forked_process(work: Callable[[], Any]) -> str:
    """What `work` raises in a fork of this rank, as a worker of a DataLoader is one."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def forked(stage: int) -> None:
    model = wrapped_stack(stage)
    x = stack_batch(0, here.rank)[0]
    with torch.no_grad():
        model(x)
    text = in_a_forked_process(lambda: model(x).sum().backward())
    assert here.world_size == 1 or all(word in text for word in ("forked from rank", "full_state_dict", "unit")), text
    still_trains(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forked_process_takes_part_in_no_collective(world_size: int) -> None:
    run(world_size, for_each, (0, 3), forked)


class Aside(nn.Module):
    """Keeps its weight in a place of its own beside the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
        self.kept = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0].t()


class Items(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


class Later(nn.Linear):
    async def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def kept_aside() -> None:
    for model in (fsdp.fsdp_wrap(Aside()), fsdp.fsdp_wrap(nn.Sequential(Aside()), fsdp.by_class(Aside))):
        x = torch.ones(2, 5, dtype=torch.float64)
        expect_loud(lambda model=model, x=x: model(x), "weight", "reached past its module")
        assert_rested(model)
    for kind in (Items, Later):
        model = nn.Sequential(kind(5, 3))
        expect_loud(lambda model=model, kind=kind: fsdp.fsdp_wrap(model, fsdp.by_class(kind)), "generator", "'0'")


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_reached_past_their_modules(world_size: int) -> None:
    run(world_size, kept_aside)


class Sharing(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))


def managed_by_others() -> None:
    """A unit has one root; and what another engine manages is no plain module."""
    shared = fsdp.fsdp_wrap(Block())
    actor, critic = Sharing(shared), Sharing(shared)
    fsdp.fsdp_wrap(actor)
    expect_loud(lambda: fsdp.fsdp_wrap(critic), "another wrapped model", "'shared'")
    del actor
    gc.collect()
    fsdp.fsdp_wrap(critic)(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    if here.world_size > 1:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        inside = nn.Sequential(nn.parallel.DistributedDataParallel(Block()), nn.Linear(5, 3))
        expect_loud(lambda: fsdp.fsdp_wrap(inside), "'0'", "DistributedDataParallel")
        expect_loud(lambda: fsdp.fsdp_wrap(fully_shard(Stack(2))), "DTensor", "blocks.0.linear.weight")
        model = fsdp.fsdp_wrap(Stack(2))
        mse(model, stack_batch(0, here.rank)).backward()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        expect_loud(optimizer.step, "ZeroRedundancyOptimizer", "stages 1 to 3")


@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_that_somebody_else_manages(world_size: int) -> None:
    run(world_size, managed_by_others)
