"""Masters in files: whatever fails while they move or are updated, nothing is lost and nothing is wrong in silence."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.errors import FSDPError, OffloadError
from fsdplite.offload.files import BLOCK_BYTES, StateFile
from fsdplite.offload.resting import OnHost
from tests.harness import expect_loud, for_each, here, run
from tests.memory.parts import Net, assert_same_bits, build, train, whole
from tests.memory.test_masters_in_files import both, files, in_memory
from tests.memory.test_state_files import Faulty


def made(folder: str, cls: type = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    model = build(Net, precision="bf16", offload=both(folder), **options)
    return model, fsdp.offloaded(cls, model, lr=0.1)


def plain(steps: int, cls: type = torch.optim.AdamW, **options: Any) -> tuple[list[float], dict]:
    model = build(Net, precision="bf16", **options)
    return train(model, cls(model.parameters(), lr=0.1), range(steps)), whole(model)


def fails(call: str, number: int, rank: int = -1) -> Faulty:
    """The ``number``-th read or write of data on a rank (-1: on each) is an error of the disk."""
    seen = []

    def at(kind: str, file: StateFile, offset: int, view: memoryview, real: Any) -> int:
        if kind == call and offset >= BLOCK_BYTES and rank in (here.rank, -1):
            seen.append(offset)
            if len(seen) == number:
                raise OSError(5, os.strerror(5))
        return real(file, offset, view)

    return Faulty(at)


# ------------------------------------------------------------------ a step that fails


def other_rank_body(folder: str, stage: int, offload: dict) -> None:
    """The disk of one rank fails in a step. After a load all ranks gather what was loaded."""
    root, state = os.path.join(folder, f"checkpoints-{stage}-{len(offload)}"), os.path.join(folder, "state")
    os.makedirs(state, exist_ok=True)
    losses, expected = plain(5, stage=stage)
    model = build(Net, precision="bf16", stage=stage, offload=fsdp.Offload(path=state, optimizer="nvme", **offload))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    seen = train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    with fails("write", 1, rank=1):
        expect_loud(lambda: train(model, optimizer, range(2, 3)), "rank 1")
    optimizer.zero_grad()
    fsdp.load_checkpoint(root, model, optimizer)
    seen += train(model, optimizer, range(2, 5))
    assert seen == losses
    assert_same_bits(whole(model), expected)
    optimizer.close()


@pytest.mark.slow
def test_a_step_that_fails_on_another_rank_leaves_no_stale_mirror(tmp_path: Any) -> None:
    rows = [(str(tmp_path), stage, {"params": "cpu"}) for stage in (1, 2, 3)] + [(str(tmp_path), 3, {})]
    run(2, for_each, rows, other_rank_body)


def ungrouped_body(folder: str, kind: str) -> None:
    """Steps pass by a parameter that left its group; a later write of it reaches the next forward all the same."""
    found = []
    for is_offloaded in (False, True):
        offload = fsdp.Offload(params="cpu", optimizer=kind, path=folder if kind == "nvme" else None)
        model = build(Net, precision="bf16", offload=offload if is_offloaded else None)
        head = list(model.head.parameters())
        groups = [{"params": [p for p in model.parameters() if all(p is not h for h in head)]}, {"params": head}]
        cls = torch.optim.AdamW
        optimizer = fsdp.offloaded(cls, model, groups, lr=0.1) if is_offloaded else cls(groups, lr=0.1)
        seen = train(model, optimizer, range(2))
        del optimizer.param_groups[1]
        seen += train(model, optimizer, range(2, 4))
        with torch.no_grad():
            head[0].mul_(1.5)
        model.zero_grad()
        seen += train(model, optimizer, range(4, 6))
        found.append((seen, whole(model)))
    assert found[1][0] == found[0][0]
    assert_same_bits(found[1][1], found[0][1])
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_left_its_group(tmp_path: Any, world_size: int) -> None:
    run(world_size, for_each, [(str(tmp_path), kind) for kind in ("cpu", "nvme")], ungrouped_body)


# ------------------------------------------------------------------ moving in


def creation_body(folder: str) -> None:
    """The disk fails while masters are written: they are where they were, and no file is left."""
    model = build(Net, precision="bf16", offload=both(folder))
    before = whole(model)
    with fails("write", 3, rank=0):
        expect_loud(lambda: fsdp.offloaded(torch.optim.AdamW, model, lr=0.1), "errno 5" if here.rank == 0 else "rank 0")
    assert all(in_memory(model)) and files(folder) == []
    assert_same_bits(whole(model), before)


def test_a_disk_that_fails_while_masters_move_in(tmp_path: Any) -> None:
    run(2, creation_body, str(tmp_path))


def wider_body(folder: str) -> None:
    """A setting asks for more state, and the new file cannot be filled: the old one goes on."""
    root, state = os.path.join(folder, "checkpoints"), os.path.join(folder, "state")
    os.makedirs(state, exist_ok=True)
    expected = build(Net, precision="bf16")
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    losses = train(expected, reference, range(2))
    reference.param_groups[0]["momentum"] = 0.9
    losses += train(expected, reference, range(2, 5))
    model, optimizer = made(state, torch.optim.SGD)
    count = len(files(state))
    seen = train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    before = whole(model)
    optimizer.param_groups[0]["momentum"] = 0.9
    with fails("write", 2, rank=0):
        expect_loud(lambda: train(model, optimizer, range(2, 3)), "errno 5" if here.rank == 0 else "rank 0")
    assert len(files(state)) == count
    if here.world_size == 1:  # where the disk works, the step went on
        assert_same_bits(whole(model), before)
    optimizer.zero_grad()
    fsdp.load_checkpoint(root, model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    seen += train(model, optimizer, range(2, 5))
    assert seen == losses
    assert_same_bits(whole(model), whole(expected))
    assert len(files(state)) == count
    optimizer.close()
    assert files(state) == []
    assert_same_bits(whole(model), whole(expected))


@pytest.mark.parametrize("world_size", [1, 2])
def test_more_state_that_finds_no_disk(tmp_path: Any, world_size: int) -> None:
    run(world_size, wider_body, str(tmp_path))


def inference_body(folder: str) -> None:
    """Made, replaced, loaded and closed under inference_mode: steps outside go on."""
    root, state = os.path.join(folder, "checkpoints"), os.path.join(folder, "state")
    os.makedirs(state, exist_ok=True)
    losses, expected = plain(5)
    with torch.inference_mode():
        model, optimizer = made(state)
    seen = train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    for name in files(state):
        os.unlink(os.path.join(state, name))
    with torch.inference_mode():
        fsdp.load_checkpoint(root, model, optimizer)
    seen += train(model, optimizer, range(2, 4))
    with torch.no_grad():
        model.head.weight.mul_(1)
    seen += train(model, optimizer, range(4, 5))
    with torch.inference_mode():
        optimizer.close()
    assert seen == losses
    assert_same_bits(whole(model), expected)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))


@pytest.mark.filterwarnings("ignore:the model was wrapped with Offload")
def test_inference_mode_around_what_makes_tensors(tmp_path: Any) -> None:
    run(2, inference_body, str(tmp_path))


# ------------------------------------------------------------------ moving out


def interrupted_body(folder: str) -> None:
    """Control-C in the middle of close(): each master is in the file or in memory, and close() may be called again."""
    model, optimizer = made(folder)
    train(model, optimizer, range(2))
    before = whole(model)
    real, calls = StateFile.read, []

    def interrupted(file: StateFile, offset: int, into: torch.Tensor) -> None:
        calls.append(offset)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(file, offset, into)

    StateFile.read = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer.close()
    finally:
        StateFile.read = real
    assert_same_bits(whole(model), before)
    optimizer.close()
    optimizer.close()
    assert files(folder) == [] and all(in_memory(model))
    assert_same_bits(whole(model), before)


def no_memory_body(folder: str) -> None:
    """Host memory has no room for the masters: close() says so, and training goes on from the file."""
    losses, expected = plain(3)
    model, optimizer = made(folder)
    seen = train(model, optimizer, range(2))
    real, calls = OnHost.zeros, []

    def full(resting: OnHost, *arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(resting, *arguments)

    OnHost.zeros = full
    try:
        expect_loud(optimizer.close, "cannot come back to host memory", "save a checkpoint")
    finally:
        OnHost.zeros = real
    assert seen + train(model, optimizer, range(2, 3)) == losses
    assert_same_bits(whole(model), expected)
    optimizer.close()
    assert files(folder) == []
    assert_same_bits(whole(model), expected)


def unreadable_body(folder: str) -> None:
    """The disk fails while close() reads: every use of what is lost says so, until a checkpoint is loaded."""
    root, state = os.path.join(folder, "checkpoints"), os.path.join(folder, "state")
    os.makedirs(state, exist_ok=True)
    model, optimizer = made(state)
    train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    before = whole(model)
    with fails("read", 1):
        optimizer.close()
    lost = model.layers[0].up.weight
    for use in (
        lambda: model(torch.ones(1, 6)),
        lambda: fsdp.full_state_dict(model),
        lambda: fsdp.full_params(model).__enter__(),
        lambda: lost.data,
        lost.detach,
        lost.clone,
    ):
        expect_loud(use, "lost with the file", "load_checkpoint")
    with pytest.raises(FSDPError):
        fsdp.save_checkpoint(root, model, step=3)
    fsdp.load_checkpoint(root, model)
    assert_same_bits(whole(model), before)
    assert lost.detach().shape == lost.data.shape


def reading_body(folder: str) -> None:
    """A disk that fails while a gather needs the masters is an error with a name, not a signal."""
    model, optimizer = made(folder)
    train(model, optimizer, range(2))
    fsdp.mark_updated(model)
    with fails("read", 1):
        expect_loud(lambda: model(torch.ones(1, 6)), "errno 5", "fsdplite-state-")
    losses, expected = plain(3)
    assert train(model, optimizer, range(2, 3)) == losses[2:]
    assert_same_bits(whole(model), expected)
    optimizer.close()


@pytest.mark.parametrize("body", [interrupted_body, no_memory_body, unreadable_body, reading_body])
def test_moving_out(tmp_path: Any, body: Callable[[str], None]) -> None:
    run(1, body, str(tmp_path))


def forked_body(folder: str) -> None:
    """A forked process has the file of its parent: it is refused, and changes nothing there."""
    losses, _ = plain(3)
    model, optimizer = made(folder)
    seen = train(model, optimizer, range(2))
    before = whole(model)
    state = next(iter(optimizer.state.values()))

    def uses() -> list[Callable[[], Any]]:
        with torch.no_grad():
            return [
                lambda: model.head.weight.mul_(3.0),
                lambda: model.head.weight.data.fill_(3.0),
                lambda: state["exp_avg"].fill_(7.0),
            ]

    for number, use in enumerate([*uses(), optimizer.close]):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with torch.no_grad():
                    use()
                code = 2
            except OffloadError as problem:
                code = 3 if "forked process" in str(problem) else 4
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (3 if number < 3 else 2), number
        fsdp.mark_updated(model)
        assert_same_bits(whole(model), before)
    assert seen + train(model, optimizer, range(2, 3)) == losses
    optimizer.close()


def test_a_forked_process(tmp_path: Any) -> None:
    run(1, forked_body, str(tmp_path))


def averages_body(folder: str, harm: str) -> None:
    """A parameter that another tensor is updated with is read, too: an error where its file is cut, never a signal."""
    model, optimizer = made(folder)
    train(model, optimizer, range(2))
    weight = model.layers[0].up.weight
    average = torch.zeros(weight.shape)
    if harm == "cut":
        for name in files(folder):
            os.truncate(os.path.join(folder, name), BLOCK_BYTES)
        needles = ("holds less than was written",)
    else:
        with fails("read", 1):
            optimizer.close()
        needles = ("lost with the file",)
    with torch.no_grad():
        for use in (
            lambda: average.mul_(0.9).add_(weight, alpha=0.1),
            lambda: average.lerp_(weight, 0.1),
            lambda: torch._foreach_add_([average], [weight]),
        ):
            expect_loud(use, *needles)
    assert not average.any()


@pytest.mark.parametrize("harm", ["cut", "unreadable"])
def test_averages_of_what_is_lost(tmp_path: Any, harm: str) -> None:
    run(1, averages_body, str(tmp_path), harm)


# ------------------------------------------------------------------ addresses and descriptors


def addresses_body(folder: str) -> None:
    """What stays mapped is as long as the masters, not as the file."""

    def mapped_bytes() -> int:
        total = 0
        with open("/proc/self/maps", encoding="ascii") as lines:
            for line in lines:
                if folder in line:
                    start, stop = line.split()[0].split("-")
                    total += int(stop, 16) - int(start, 16)
        return total

    model, optimizer = made(folder)
    train(model, optimizer, range(1))
    sizes = [os.stat(os.path.join(folder, name)).st_size for name in files(folder)]
    assert 0 < mapped_bytes() <= sum(sizes) // 3 + len(sizes) * 2 * BLOCK_BYTES
    kept = mapped_bytes()
    held = optimizer.state_dict()
    assert mapped_bytes() > kept
    del held
    gc.collect()
    assert mapped_bytes() == kept
    optimizer.close()
    assert mapped_bytes() == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc/self/maps")
def test_addresses(tmp_path: Any) -> None:
    run(1, addresses_body, str(tmp_path))
