"""fsdp.offloaded(..., in_backward=True): the bits of the run without, updates before backward ends, and what is refused."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdplite as fsdp
from fsdplite.offload.files import StateFile
from tests.harness import expect_loud, for_each, here, run
from tests.memory.parts import Net, assert_same_bits, batch, build, train, whole
from tests.memory.test_offloaded import Partly, place, states


def bits(folder: str, kind: str, stage: int, precision: str, loop: dict, net: Any, params: str | None) -> None:
    """Against the plain optimizer, which nothing offloads."""
    expected = None
    for offload in (None, place(kind, folder, params=params)):
        model = build(net, stage=stage, precision=precision, offload=offload)
        if offload is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        else:
            optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1, in_backward=True)
        seen = train(model, optimizer, range(5), **loop)
        found = seen, whole(model), states(model, optimizer)
        expected = expected or found
        assert found[0] == expected[0], (kind, stage, precision, loop)
        assert_same_bits(found[1], expected[1], f"{kind} {stage} {precision}")
        assert_same_bits(found[2], expected[2], f"{kind} {stage} {precision}")


class Repeated(Net):
    """The first layer runs twice, so its gradient comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[0](self.layers[-1](x)))


class Uneven(Net):
    """The root's own scale is used on the first rank only: the others learn at the end that it has a gradient."""

    def __init__(self) -> None:
        super().__init__(2)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale if here.rank == 0 else x)


def rows(folder: str) -> list[tuple]:
    several = {"accumulate": 2, "no_sync": True}
    wide = {"width": 6, "inner": 900}
    return [
        (folder, "nvme", 3, "fp32", {}, Net, None),
        (folder, "nvme", 3, "fp32", {}, Uneven, None),
        (folder, "nvme", 3, "bf16", several, partial(Net, 3, **wide), "cpu"),
        (folder, "cpu", 3, "fp32", several, Repeated, None),
        (folder, "nvme", 3, "fp32", {}, partial(Partly, 2), None),
        (folder, "nvme", 2, "bf16", {}, Repeated, "cpu"),
        (folder, "cpu", 1, "fp32", {}, partial(Partly, 2), None),
        (folder, "cpu", 0, "fp32", {}, Net, None),
        (folder, "nvme", 0, "bf16", {}, Net, None),
    ]


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_of_a_run_without(tmp_path: Any, world_size: int) -> None:
    run(world_size, for_each, rows(str(tmp_path))[: None if world_size < 3 else 5], bits)


def order_body(folder: str) -> None:
    """The last layer's shard changes while backward is in the first one; its gradient is gone by then."""
    model = build(Net, offload=place("nvme", folder))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1, in_backward=True)
    train(model, optimizer, range(1))
    last = list(model.layers[-1].parameters())

    def slices() -> Tensor:
        return torch.cat([p.detach().as_subclass(Tensor) for p in last])

    before = slices()
    seen = []

    def at_the_end(gradient: Tensor) -> None:
        deadline = time.monotonic() + 20
        while torch.equal(slices(), before) and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(not torch.equal(slices(), before))

    x, y = batch(1)
    x.requires_grad_().register_hook(at_the_end)
    loss = (model(x) - y).square().mean()
    with fsdp.trace(model) as trace:
        loss.backward()
    assert seen == [True] and all(p.grad is None for p in last)
    kinds = [(event.kind, event.unit) for event in trace.events]
    layers = [f"layers.{i}" for i in range(5)]
    updated = [unit for kind, unit in kinds if kind == "update"]
    assert sorted(updated) == ["", *layers]
    assert kinds.index(("update", "layers.4")) < kinds.index(("backward_start", "layers.1"))
    assert kinds.index(("update", "layers.0")) < kinds.index(("backward_stop", ""))
    after = slices()
    optimizer.step()
    assert torch.equal(slices(), after), "once"
    assert optimizer.last_step.read_bytes == optimizer.last_step.written_bytes > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_updates_run_beside_backward(tmp_path: Any, world_size: int) -> None:
    run(world_size, order_body, str(tmp_path))


def refused_body(folder: str) -> None:
    model = build(Net, offload=place("nvme", folder))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1, in_backward=True)
    expect_loud(lambda: fsdp.offloaded(torch.optim.SGD, model, lr=0.1, in_backward=True), "another optimizer")
    for step in range(2):
        x, y = batch(step)
        (model(x) - y).square().mean().backward()
        expect_loud(lambda: model.clip_grad_norm_(1.0), "clip_grad_norm_", "in_backward")
        if step == 0:  # there are gradients: nothing predicted the end of a unit's backward
            expect_loud(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "in_backward")
        expect_loud(lambda: fsdp.LossScaler().unscale_(optimizer), "LossScaler", "in_backward")
        optimizer.step()
        optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    before = whole(model)
    expect_loud(lambda: (model(x) - y).square().mean().backward(), "before optimizer.step()", "no_sync")
    assert_same_bits(whole(model), before)
    optimizer.step()
    train(model, optimizer, range(3, 4))
    optimizer.close()
    plain = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    train(model, plain, range(4, 5), clip=1.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_refused(tmp_path: Any, world_size: int) -> None:
    run(world_size, refused_body, str(tmp_path))


class Again(Net):
    """Uses its last layer a second time, early in forward, when told to; its gradient comes from each use by itself."""

    again = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in [*(self.layers[-1:] if self.again else ()), *self.layers[1:]]:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def late_use_body(folder: str) -> None:
    """A use that the last backward did not have comes after the unit's update: an error, on all ranks."""
    model = build(Again, offload=place("cpu", folder))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1, in_backward=True)
    train(model, optimizer, range(2))
    model.again = True
    text = expect_loud(lambda: train(model, optimizer, range(2, 3)), "used again in a backward that has updated it")
    assert "layers.4" in text
    expect_loud(optimizer.step, "load a checkpoint")


def failing_body(folder: str) -> None:
    """A backward, then a disk, that fails on the way: no further step until a checkpoint is loaded."""
    import os

    state, root = os.path.join(folder, "state"), os.path.join(folder, "checkpoints")
    if here.rank == 0:
        os.mkdir(state)
    if here.world_size > 1:
        torch.distributed.barrier()
    reference = build(Net)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.1), range(4))
    model = build(Net, offload=place("nvme", state))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1, in_backward=True)
    train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)

    def bad(gradient: Tensor) -> None:
        raise ValueError("a user's hook")

    x, y = batch(20)
    x.requires_grad_().register_hook(bad)
    with pytest.raises(ValueError, match="a user's hook"):
        (model(x) - y).square().mean().backward()
    expect_loud(optimizer.step, "load a checkpoint")
    optimizer.zero_grad()
    fsdp.load_checkpoint(root, model, optimizer)
    original = StateFile.write_at

    def full(file: StateFile, offset: int, view: memoryview) -> int:
        if here.rank == here.world_size - 1:
            raise OSError(28, "No space left on device")
        return original(file, offset, view)

    StateFile.write_at = full
    try:
        expect_loud(lambda: train(model, optimizer, range(2, 3)), "errno 28", state)
    finally:
        StateFile.write_at = original
    optimizer.zero_grad()
    fsdp.load_checkpoint(root, model, optimizer)
    train(model, optimizer, range(2, 4))
    assert_same_bits(whole(model), whole(reference))
    optimizer.close()


@pytest.mark.parametrize("world_size, body", [(1, late_use_body), (2, late_use_body), (1, failing_body), (2, failing_body)])
def test_failures(tmp_path: Any, world_size: int, body: Any) -> None:
    run(world_size, body, str(tmp_path))
