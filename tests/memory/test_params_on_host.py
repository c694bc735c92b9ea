"""Offload(params="cpu"): shards and gradients rest in host memory. Cases A4, D8, G1, G7, X11."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdplite as fsdp
from fsdplite.offload import resting
from tests.harness import MLP, Vec, assert_rested, expect_loud, for_each, gather_grads, here, local_batch, mse, run, seeded
from tests.cases.matrix import mesh_of
from tests.memory.parts import Layer, Net, assert_same_bits, build, train, whole

HOST = fsdp.Offload(params="cpu")


def lever(stage: int, precision: str, loop: dict, kind: str = "AdamW") -> None:
    found = []
    for offload in (None, HOST):
        model = build(Net, stage=stage, precision=precision, offload=offload)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        scaler = fsdp.LossScaler(init_scale=1024.0) if precision == "fp16" else None
        seen = train(model, optimizer, range(3), scaler=scaler, **loop)
        keys = ("exp_avg", "exp_avg_sq") if kind == "AdamW" else ()
        found.append((seen, whole(model, optimizer, keys)))
        assert_rested(model)
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


def matrix() -> list[tuple]:
    loops = ({}, {"accumulate": 2, "clip": 0.5}, {"accumulate": 2, "no_sync": True})
    rows = [
        (stage, precision, loops[(stage + number) % 3])
        for stage in (1, 2, 3)
        for number, precision in enumerate(("fp32", "bf16", "fp16"))
    ]
    return [*rows, (3, "bf16", loops[1], "SGD")]


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_of_a_run_without(world_size: int) -> None:
    run(world_size, for_each, matrix() if world_size < 3 else matrix()[6:], lever)


def A4_body(stage: int, offload: Any) -> None:
    model = seeded(Vec, 4, 1.0)
    fsdp.fsdp_wrap(model, stage=stage, offload=offload)
    for expected in (3.0, 6.0):
        model(1.0).backward()
        model(2.0).backward()
        assert gather_grads(model)["w"].tolist() == [expected] * 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_A4_every_micro_batch_counts(world_size: int) -> None:
    combinations = [(0, None)] + [(stage, offload) for stage in (1, 2, 3) for offload in (None, HOST)]
    run(world_size, for_each, combinations, A4_body)


def G7_norm() -> None:
    """G1: two gradients whose norm over all ranks is 5."""
    model = fsdp.fsdp_wrap(seeded(Vec, 2, 1.0), offload=HOST)
    model(torch.tensor([3.0, 4.0], dtype=torch.float64)).backward()
    assert model.clip_grad_norm_(1.0).item() == 5.0
    for found, expected in zip(gather_grads(model)["w"].tolist(), (0.6, 0.8)):
        assert abs(found - expected) < 1e-6


def G7_body() -> None:
    found: list[Any] = []
    for offload in (None, HOST):
        model = seeded(MLP)
        fsdp.fsdp_wrap(model, offload=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Tensor] = []
        for step in range(3):
            optimizer.zero_grad()
            mse(model, local_batch(step, here.rank)).backward()
            if step % 2:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            else:
                seen.append(model.clip_grad_norm_(0.1))
            seen += gather_grads(model).values()
            optimizer.step()
        found.append([*seen, *whole(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_G7_clipping(world_size: int) -> None:
    run(world_size, G7_norm)
    run(world_size, G7_body)


def X11_body(kind: str) -> None:
    model = fsdp.fsdp_wrap(seeded(Vec, 2, 1.0), offload=HOST)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    scaler = fsdp.LossScaler(init_scale=1024.0)
    for c, weight in ((float("inf") if here.rank == 0 else 1.0, 1.0), (1.0, 0.9)):
        optimizer.zero_grad()
        scaler.scale(model(c)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512.0
        assert all(abs(w - weight) < 1e-6 for w in whole(model)["w"].tolist())
    if kind == "Adam":
        assert [s["step"].item() for s in optimizer.state.values()] == [1.0]


def test_X11_the_loss_scaler_is_one_decision() -> None:
    run(4, for_each, ["SGD", "Adam"], X11_body)


def D8_body(delay: str) -> None:
    lengths = {"none": lambda: 0.0, "fixed": lambda: 0.05, "random": lambda: random.uniform(0.0, 0.05)}
    original = resting.copy

    def late(into: Tensor, source: Tensor) -> None:
        time.sleep(lengths[delay]())
        original(into, source)

    results = []
    for offload in (None, HOST):
        resting.copy = original if offload is None else late
        try:
            model = seeded(MLP)
            fsdp.fsdp_wrap(model, offload=offload)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(5):
                optimizer.zero_grad()
                mse(model, local_batch(step, here.rank)).backward()
                optimizer.step()
        finally:
            resting.copy = original
        results.append(whole(model, optimizer, ("exp_avg", "exp_avg_sq")))
    assert_same_bits(results[1], results[0])


def test_D8_late_copies_change_nothing() -> None:
    run(2, for_each, ["fixed", "random"], D8_body)


def copies_body() -> None:
    model = build(Net, precision="bf16", offload=HOST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        with fsdp.trace(model) as trace:
            train(model, optimizer, range(1))
    kinds = [(event.kind, event.unit) for event in trace.events]
    for unit in [f"layers.{i}" for i in range(5)]:
        assert kinds.count(("from_host", unit)) == 2 and kinds.count(("to_host", unit)) == 1
    assert kinds.count(("from_host", "")) == 1 and kinds.count(("to_host", "")) == 1
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_one_copy_per_unit_and_direction() -> None:
    run(2, copies_body)


def mirror_body() -> None:
    """What gathers read follows every way of writing a master: values are those of a model without the lever."""
    from fsdplite import inspect

    offload = fsdp.Offload(params="cpu", optimizer="cpu")
    model, expected = build(Net, precision="bf16", offload=offload), build(Net, precision="bf16")
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1)
    x = torch.randn(4, 6)

    def same() -> None:
        model.eval(), expected.eval()
        with torch.no_grad():
            assert torch.equal(model(x), expected(x))
        model.train(), expected.train()

    same()
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        train(expected, plain, range(step, step + 1))
        flats = [flat for unit in inspect.units(model) for flat in unit.flats]
        assert all(flat.resting.is_mirrored(flat.generation) for flat in flats), "the update has written the mirror"
        same()
    for m in (model, expected):
        with torch.no_grad():
            m.layers[0].up.weight.mul_(0.5)
    same()
    for m in (model, expected):
        with fsdp.full_params(m.layers[1], writeback=True), torch.no_grad():
            m.layers[1].down.bias.fill_(0.25)
    same()
    for m in (model, expected):
        m.head.weight.data.add_(1.0)
        fsdp.mark_updated(m)
    same()
    for m in (model, expected):  # a plain optimizer on shards in host memory
        sgd = torch.optim.SGD(m.parameters(), lr=0.1)
        train(m, sgd, range(3, 4))
    same()
    with fsdp.trace(model) as trace:
        train(model, optimizer, range(5, 6))
    full = {flat.unit_name: flat.shard_numel * 2 for flat in flats}  # two bytes an element
    assert {e.unit: e.bytes for e in trace.events if e.kind == "from_host"} == full


def test_a_low_precision_mirror_follows_the_masters() -> None:
    run(2, mirror_body)


def combined_body(folder: str, mesh: tuple[int, int] | None = None) -> None:
    """All levers at once: recomputation in segments, shards in host memory, state in files."""
    found = []
    shape = None if mesh is None else mesh_of(mesh)
    for levers in (False, True):
        offload = fsdp.Offload(params="cpu", optimizer="nvme", path=folder, buffer_bytes=16384) if levers else None
        model = build(Net, precision="bf16", offload=offload, recompute="sqrt" if levers else None, mesh=shape)
        make = fsdp.offloaded if levers else lambda cls, m, **settings: cls(m.parameters(), **settings)
        optimizer = make(torch.optim.AdamW, model, lr=0.1)
        seen = train(model, optimizer, range(4), accumulate=2, clip=0.5)
        found.append((seen, whole(model, optimizer, ("exp_avg", "exp_avg_sq"))))
        assert_rested(model)
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_levers_at_once(tmp_path: Any, world_size: int) -> None:
    run(world_size, combined_body, str(tmp_path))


def test_all_levers_on_a_hybrid_mesh(tmp_path: Any) -> None:
    run(4, combined_body, str(tmp_path), (2, 2))


def meta_body() -> None:
    """Built on the meta device, made real one module at a time, at rest in host memory from the start."""
    found = []
    for offload in (None, HOST):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Net(3, dropout=0.0)
        fsdp.fsdp_wrap(model, fsdp.by_class(Layer), offload=offload, precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found.append((train(model, optimizer, range(2)), whole(model)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


def copies_and_thawing_body() -> None:
    """Deep copies, and a frozen flat parameter that is split, have resting places of their own."""
    import copy

    found = []
    for offload in (None, HOST):
        torch.manual_seed(0)
        model = Net(2, dropout=0.0)
        model.layers[0].up.weight.requires_grad_(False)
        fsdp.fsdp_wrap(model, fsdp.by_class(Layer), offload=offload, precision="bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = train(model, optimizer, range(1))
        twin = copy.deepcopy(model)
        model.layers[0].up.weight.requires_grad_(True)
        seen += train(model, optimizer, range(1, 3))
        seen += train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), range(1, 3))
        found.append((seen, whole(model), whole(twin)))
        assert_rested(model, twin)
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])
    assert_same_bits(found[1][2], found[0][2])


@pytest.mark.parametrize("body", [meta_body, copies_and_thawing_body])
def test_start_up_copies_and_thawing(body: Any) -> None:
    run(2, body)


def test_options_are_checked() -> None:
    expect_loud(lambda: fsdp.Offload(params="cuda"), "params", "cpu")
    expect_loud(lambda: fsdp.Offload(optimizer="nvm"), "nvme")
    expect_loud(lambda: fsdp.Offload(optimizer="nvme"), "path")
    expect_loud(lambda: fsdp.Offload(params="cpu", path="/x"), "optimizer")
    expect_loud(lambda: fsdp.fsdp_wrap(Net(), offload="cpu"), "Offload")
    expect_loud(lambda: fsdp.fsdp_wrap(Net(), stage=0, offload=HOST), "stage 0")
