"""U. Not every rank, not every step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdplite as fsdp
from tests.cases.matrix import WORLD_SIZES, Setup, matrix, wrap
from tests.harness import (
    Block,
    Counts,
    Stack,
    Vec,
    adamw,
    all_gather_objects,
    assert_all,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    gather_grads,
    here,
    local_batch,
    mean_backward,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

F64 = torch.float64


class Trunk(nn.Linear):
    """A Linear(4,4) that may own a parameter which nothing uses."""

    def __init__(self, spare: bool) -> None:
        super().__init__(4, 4, dtype=F64)
        if spare:
            self.spare = nn.Parameter(torch.ones(3, dtype=F64))


class TwoHeads(nn.Module):
    def __init__(self, *, run_b: bool, spare: bool) -> None:
        super().__init__()
        self.trunk = Trunk(spare)
        self.a = nn.Linear(4, 2, dtype=F64)
        self.b = nn.Linear(4, 2, dtype=F64)
        self.run_b = run_b

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x).tanh()
        if self.run_b:
            self.b(h)
        return self.a(h)


VARIANTS = ({"run_b": True, "spare": False}, {"run_b": False, "spare": False}, {"run_b": False, "spare": True})


def unused_has_no_gradient(setup: Setup) -> None:
    batch_of = partial(local_batch, fan_in=4, fan_out=2)
    for variant in VARIANTS:
        reference, model = seeded(TwoHeads, **variant), seeded(TwoHeads, **variant)
        start = gather(model)
        wrap(model, setup, {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear)})
        optimizer, ref_optimizer = adamw(model), adamw(reference)
        train_rank(model, optimizer, range(2), batch_of, here.rank, after_step=lambda model=model: assert_rested(model))
        train_ref(reference, ref_optimizer, range(2), batch_of, here.world_size)
        assert_parity(model, reference)
        full = gather(model)
        unused = ["b.weight", "b.bias", *(["trunk.spare"] if variant["spare"] else [])]
        for name in unused:
            parameter = model.get_parameter(name)
            assert parameter.grad is None, name
            assert torch.equal(full[name], start[name]), name
            assert parameter not in set(optimizer.state), name
        assert len(ref_optimizer.state) == len(list(model.parameters())) - len(unused)
        assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_U1_a_parameter_or_unit_that_nobody_used(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), unused_has_no_gradient)


class Switch(nn.Module):
    """A deeper variant: which branch is used changes from step to step, equally on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Block(5) for _ in range(3))
        self.scale = nn.Parameter(torch.ones((), dtype=F64))
        self.head = nn.Linear(5, 3, dtype=F64)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.branches[self.turn % 3](x)
        return self.head(x * self.scale if self.turn % 2 else x)


def changing_use(setup: Setup) -> None:
    reference, model = seeded(Switch), seeded(Switch)
    wrap(model, setup, {"block": fsdp.by_class(Block), "leaf": fsdp.by_class(nn.Linear)})
    optimizer, ref_optimizer = adamw(model), adamw(reference)
    for turn in (0, 1, 1, 2, 0, 5):
        model.turn = reference.turn = turn
        train_rank(model, optimizer, [turn], stack_batch, here.rank)
        train_ref(reference, ref_optimizer, [turn], stack_batch, here.world_size)
        assert_parity(model, reference)
        assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_U1_what_is_used_changes_between_steps(world_size: int) -> None:
    run(world_size, for_each, matrix(world_size), changing_use)


class Half(nn.Module):
    """Which head reaches the loss is up to each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 5, dtype=F64)
        self.a = nn.Linear(5, 3, dtype=F64)
        self.b = nn.Linear(5, 3, dtype=F64)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        h = self.trunk(x)
        a, b = self.a(h), self.b(h)
        return a.sum() + b.sum() if use_b else a.sum()


def used_on_one_rank(setup: Setup) -> None:
    """In one unit the ranks without a gradient count as zero; across units it is either right or LOUD."""
    reference, model = seeded(Half), wrap(seeded(Half), setup, {})
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        who = step % here.world_size
        model(stack_batch(step, here.rank)[0], here.rank == who).backward()
        mean_backward(reference, here.world_size, lambda m, r, who=who: m(stack_batch(step, r)[0], r == who))
        assert_parity(model, reference)
        assert_rested(model)
    apart = wrap(seeded(Half), setup, {"block": fsdp.by_class(nn.Linear), "leaf": fsdp.by_class(nn.Linear)})
    reference = seeded(Half)
    mean_backward(reference, here.world_size, lambda m, r: m(stack_batch(0, r)[0], r == 0))
    try:
        apart(stack_batch(0, here.rank)[0], here.rank == 0).backward()
    except fsdp.FSDPError as error:
        assert here.world_size > 1 and re.search("'[ab]'", str(error)), str(error)
    else:
        assert_parity(apart, reference)
    assert_rested(apart)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_U1_a_parameter_that_only_one_rank_uses(world_size: int) -> None:
    setups = [Setup(), Setup(stage=0), Setup(stage=2)] if world_size == 2 else [Setup()]
    run(world_size, for_each, setups, used_on_one_rank)


class Reordered(nn.Module):
    """Runs its units in the order it is told."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(5, 5, dtype=F64) for _ in range(count))
        self.order: tuple[int, ...] = tuple(range(count))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.units[index](x).tanh()
        return x


def order_changes(orders: tuple[tuple[int, ...], ...], setup: Setup) -> None:
    count = 1 + max(max(order) for order in orders)
    reference, model = seeded(Reordered, count), seeded(Reordered, count)
    wrap(model, setup, {"block": fsdp.by_class(nn.Linear)})
    optimizer, ref_optimizer = sgd(model), sgd(reference)
    batch_of = partial(local_batch, fan_in=5, fan_out=5)
    for step, order in enumerate(orders):
        model.order = reference.order = order
        with Counts() as counts:
            train_rank(model, optimizer, [step], batch_of, here.rank)
        gathers = all_gather_objects(counts.gathers)
        assert all(other == gathers[0] for other in gathers), gathers
        assert_rested(model)
        train_ref(reference, ref_optimizer, [step], batch_of, here.world_size)
        assert_parity(model, reference)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_U3_the_order_of_units_changes_between_steps(world_size: int) -> None:
    alternating = ((0, 1), (1, 0), (0, 1), (1, 0))
    longer = ((0, 1, 2, 3), (3, 1, 0, 2), (3, 1, 0, 2), (0, 2), (2, 2, 1), (0, 1, 2, 3))
    resharding = (None, True, False) if world_size == 2 else (None,)
    setups = [Setup(prefetch=prefetch, reshard=reshard) for prefetch in (1, 2, 0) for reshard in resharding]
    run(world_size, for_each, [(orders, s) for orders in (alternating, longer) for s in setups], order_changes)


class AnyOrder(nn.Module):
    """Calls units of equal size in the order given to forward."""

    def __init__(self, names: tuple[str, ...], n: int) -> None:
        super().__init__()
        for index, name in enumerate(names):
            self.add_module(name, Vec(n, 1.0 + index))

    def forward(self, order: tuple[str, ...], c: float) -> Tensor:
        return sum((getattr(self, name)(c) for name in order), torch.zeros((), dtype=F64))


def ranks_disagree(names: tuple[str, ...], n: int, equal_steps: int, setup: Setup) -> None:
    model = wrap(AnyOrder(names, n), setup, {"block": fsdp.by_class(Vec)})
    optimizer = sgd(model)
    for _ in range(equal_steps):
        optimizer.zero_grad()
        model(names, 0.0).backward()
        optimizer.step()
    order = names if here.rank == 0 else (names[1], names[0], *names[2:])

    def step() -> None:
        optimizer.zero_grad()
        model(order, 1.0).backward()

    if setup.stage == 3:
        expect_loud(step, names[0], names[1])
    else:
        # Nothing is gathered in an order here: the right gradients are fine too.
        try:
            step()
        except fsdp.FSDPError as error:
            assert names[0] in str(error) and names[1] in str(error)
        else:
            assert_all(gather_grads(model), 1.0)
    full = gather(model)
    for index, name in enumerate(names):
        assert_all({name: full[f"{name}.w"]}, 1.0 + index)
    assert_rested(model)


def together(fn: Any, calls: list[tuple[int, tuple]], *, last_is_absent: bool = False) -> list[list[Any]]:
    """`run` with fresh ranks and a short timeout, side by side: most of the time they wait."""
    with ThreadPoolExecutor(len(calls)) as threads:
        started = [
            threads.submit(
                run,
                world_size,
                fn,
                *args,
                fresh=True,
                pg_timeout_s=5,
                absent={world_size - 1} if last_is_absent else (),
            )
            for world_size, args in calls
        ]
        return [call.result() for call in started]


@pytest.mark.slow
@pytest.mark.parametrize("equal_steps", [0, 2])
@pytest.mark.parametrize("names", [("alpha", "beta"), ("first", "second", "third")])
def test_U4_ranks_run_equal_sized_units_in_a_different_order(names: tuple[str, ...], equal_steps: int) -> None:
    setups = [Setup(), Setup(prefetch=2, reshard=True), Setup(prefetch=0, reshard=False), Setup(stage=2)]
    setups.append(Setup(stage=0))
    together(ranks_disagree, [(2, (names, 4, equal_steps, setup)) for setup in setups])


class Headless(nn.Module):
    """As `Stack`, but the root owns nothing: the first unit gathered is a block."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def act_alone(model: nn.Module, act: str, x: Tensor) -> None:
    if act == "forward":
        model(x)
    elif act == "clip":
        model.clip_grad_norm_(1.0)
    elif act == "full_params":
        with fsdp.full_params(model):
            pass
    else:
        fsdp.full_state_dict(model)


def one_rank_calls(build: Any, act: str, first: str, how: str, steps_before: int) -> float:
    """All ranks but the last go on to `act`; the error names the unit, the phase and who is missing."""
    model = fsdp.fsdp_wrap(seeded(build, 2), fsdp.by_class(Block))
    x, _ = stack_batch(0, here.rank)
    for _ in range(steps_before):
        model.zero_grad()
        model(x).sum().backward()
    loss = model(x).sum() if act == "backward" else None
    if here.rank == here.world_size - 1:
        if how == "exits":
            os._exit(0)
        time.sleep(60)
    started = time.monotonic()
    text = expect_loud(loss.backward if loss is not None else lambda: act_alone(model, act, x), first)
    took_s = time.monotonic() - started
    if act in ("forward", "backward"):
        assert re.search("all.gather", text) and act in text, text
    missing = re.search(r"missing: ([^\n]*)", text)
    assert missing and re.findall(r"rank (\d+)", missing[1]) == [str(here.world_size - 1)], text
    del loss
    assert_rested(model)
    return took_s


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", "exits"])
def test_U6_only_some_ranks_call_the_model(how: str) -> None:
    calls = [
        (2, (Stack, "forward", "root", how, 0)),
        (2, (Headless, "forward", "blocks.0", how, 1)),
        (3, (Headless, "forward", "blocks.0", how, 0)),
        (2, (Headless, "backward", "blocks.1", how, 0)),
    ]
    results = together(one_rank_calls, calls, last_is_absent=True)
    assert all(took_s < 15 for result in results for took_s in result[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", "exits"])
def test_U6_only_some_ranks_measure_or_save(how: str) -> None:
    calls = [(2, (Stack, act, "", how, 1)) for act in ("clip", "full_params", "full_state_dict")]
    results = together(one_rank_calls, calls, last_is_absent=True)
    assert all(took_s < 15 for result in results for took_s in result[:-1])


SCRIPT = """
import os, torch, fsdplite as fsdp
from tests.harness import Block, Stack, seeded
fsdp.init_distributed(backend="gloo", timeout=5)
model = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class(Block))
if torch.distributed.get_rank() == 1:
    os._exit(0)  # at once: gloo's threads may abort an interpreter that ends while they run
model(torch.ones(4, 5, dtype=torch.float64))
"""


@pytest.mark.slow
def test_U6_a_program_that_does_not_catch_the_error_ends_with_its_traceback() -> None:
    """As torchrun starts them: whole interpreters, so that their way out is tested as well."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = time.monotonic()
    programs = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        programs.append(
            subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [program.communicate(timeout=40)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [1, 0], outputs
    assert "CollectiveError" in outputs[0] and "(root)" in outputs[0], outputs[0]
    assert time.monotonic() - started < 40
