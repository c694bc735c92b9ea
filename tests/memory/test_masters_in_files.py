"""Masters beside the moments: low precision, ``Offload(params="cpu", optimizer="nvme")``."""

from __future__ import annotations

import copy
import gc
import os
import shutil
from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.errors import OffloadError
from fsdplite.fsdp_unit import state_of
from tests.harness import assert_rested, expect_loud, for_each, here, run
from tests.cases.matrix import mesh_of
from tests.memory.parts import Layer, Net, assert_same_bits, build, train, whole
from tests.memory import test_state_files

MOMENTS = ("exp_avg", "exp_avg_sq")


def both(folder: str) -> fsdp.Offload:
    return fsdp.Offload(params="cpu", optimizer="nvme", path=folder, buffer_bytes=16384)


def files(folder: str) -> list[str]:
    """This rank's."""
    return [name for name in test_state_files.files(folder) if f"-rank{here.rank}." in name]


def flats_of(model: nn.Module) -> list[Any]:
    return [flat for module in model.modules() if (unit := state_of(module)) is not None for flat in unit.flats]


def in_memory(model: nn.Module) -> list[bool]:
    """Per flat parameter, whether its masters are views of one shard."""
    return [flat.masters.vector is not None for flat in flats_of(model)]


def wide(depth: int = 2) -> nn.Module:
    """Parameters of several chunks, and one unit whose norms stay in fp32."""
    return Net(depth, width=64, inner=131)


def bits_body(folder: str, stage: int, precision: Any, kind: str, loop: dict, mesh: Any = None) -> None:
    found = []
    shape = None if mesh is None else mesh_of(mesh)
    for offload in (None, both(folder)):
        model = build(Net, stage=stage, precision=precision, offload=offload, mesh=shape)
        cls = getattr(torch.optim, kind)
        settings = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
        optimizer = cls(model.parameters(), **settings) if offload is None else fsdp.offloaded(cls, model, **settings)
        scaler = fsdp.LossScaler(init_scale=1024.0) if precision == "fp16" else None
        seen = train(model, optimizer, range(3), scaler=scaler, **loop)
        keys = MOMENTS if kind == "AdamW" else ()
        found.append((seen, whole(model, optimizer, keys)))
        assert_rested(model)
    holding = [flat for flat in flats_of(model) if flat.shard_numel]
    is_low = [flat.compute_dtype != torch.float32 for flat in holding]
    assert any(is_low) and [flat.masters.vector is None for flat in holding] == is_low
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])
    optimizer.close()
    assert all(in_memory(model)) and files(folder) == []
    assert_same_bits(whole(model), {k: v for k, v in found[0][1].items() if "/" not in k})


def matrix() -> list[tuple]:
    kept = fsdp.Precision(param_dtype=torch.bfloat16, keep=(nn.LayerNorm,))
    loops = ({}, {"accumulate": 2, "clip": 0.5}, {"accumulate": 2, "no_sync": True})
    return [
        (stage, precision, kind, loops[(stage + number) % 3])
        for stage in (1, 2, 3)
        for number, (precision, kind) in enumerate((("bf16", "AdamW"), (kept, "SGD"), ("fp16", "Adagrad"), (kept, "AdamW")))
    ]


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_of_a_run_without(tmp_path: Any, world_size: int) -> None:
    rows = matrix() if world_size < 3 else matrix()[8:]
    run(world_size, for_each, [(str(tmp_path), *row) for row in rows], bits_body)


@pytest.mark.slow
def test_bits_on_a_hybrid_mesh(tmp_path: Any) -> None:
    rows = [(str(tmp_path), 3, "bf16", kind, {"clip": 0.5}, (2, 2)) for kind in ("AdamW", "SGD", "Adagrad")]
    run(4, for_each, rows, bits_body)


def cut_body(folder: str) -> None:
    """Parameters of several chunks, updates in backward: the same bits, and the bytes of three regions."""
    found = []
    for in_backward in (None, False, True):
        model = build(wide, precision="bf16", offload=None if in_backward is None else both(folder))
        if in_backward is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        else:
            optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1, in_backward=in_backward)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if in_backward is not None:
                moved = optimizer.last_step
                # In the first step the moments are new: only masters are read.
                assert moved.written_bytes == (moved.read_bytes if step else 3 * moved.read_bytes)
                # A slice begins at a multiple of 128 elements and a region fills blocks of 4 KiB.
                least = 4 * sum(flat.masters.slices[i].numel() for flat in flats_of(model) for i in range(len(flat.users)))
                assert least * 3 <= moved.written_bytes < (least + len(files(folder)) * 8192) * 3
        found.append(whole(model))
        if in_backward is not None:
            optimizer.close()
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_chunks_and_updates_in_backward(tmp_path: Any, world_size: int) -> None:
    run(world_size, cut_body, str(tmp_path))


def mapped_resident_bytes(folder: str) -> int:
    """What of the mapped files is in this process's memory."""
    total, is_ours = 0, False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                is_ours = folder in line
            elif is_ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def untouched_body(folder: str) -> None:
    """Steps read and write the file; what is mapped for whoever looks at a parameter stays out of memory."""
    model = build(wide, precision="bf16", offload=both(folder))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mapped_resident_bytes(folder) == 0
    assert float(next(iter(model.parameters())).detach().sum()) != 0
    assert mapped_resident_bytes(folder) > 0, "the measurement sees what is read"
    optimizer.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps")
def test_no_step_touches_the_mapping(tmp_path: Any) -> None:
    run(1, untouched_body, str(tmp_path))


def writes_body(folder: str) -> None:
    """Every way to write a weight between steps, then further steps: the same bits as without the lever."""
    found = []
    for offload in (None, both(folder)):
        model = build(Net, precision="bf16", offload=offload)
        cls = torch.optim.AdamW
        optimizer = cls(model.parameters(), lr=0.1) if offload is None else fsdp.offloaded(cls, model, lr=0.1)
        seen = train(model, optimizer, range(1))
        first = dict(model.named_parameters())["layers.1.up.weight"]
        with torch.no_grad():
            first.mul_(1.01)
        seen += train(model, optimizer, range(1, 2))
        first.data.add_(0.01)
        fsdp.mark_updated(model)
        seen += train(model, optimizer, range(2, 3))
        with fsdp.full_params(model, writeback=True), torch.no_grad():
            model.head.weight.copy_(torch.arange(18.0).view(3, 6) / 18)
        seen += train(model, optimizer, range(3, 4))
        average = copy.deepcopy(model)
        assert all(in_memory(average))
        state = fsdp.full_state_dict(model, rank0_only=False)
        seen += train(model, optimizer, range(4, 5))
        seen.append(average(torch.ones(1, 6)).sum().item())
        model.load_state_dict(state)
        seen += train(model, optimizer, range(5, 6))
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        seen += train(model, plain, range(6, 7))
        seen += train(model, optimizer, range(7, 8))
        if offload is not None:
            optimizer.close()
        seen += train(model, plain, range(8, 9))
        found.append((seen, whole(model)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore:the model was wrapped with Offload")
def test_weights_written_between_steps(tmp_path: Any, world_size: int) -> None:
    run(world_size, writes_body, str(tmp_path))


def two_optimizers_body(folder: str) -> None:
    """Two that share units: one file has the masters, and when it goes the other optimizer goes on."""
    found = []
    for offload in (None, both(folder)):
        model = build(Net, precision="bf16", offload=offload)
        makers = [lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
        if offload is not None:
            makers = [
                lambda p: fsdp.offloaded(torch.optim.AdamW, model, p, lr=0.1),
                lambda p: fsdp.offloaded(torch.optim.SGD, model, p, lr=0.1, momentum=0.9),
            ]
        parameters = list(model.parameters())
        one, two = makers[0](parameters[::2]), makers[1](parameters[1::2])
        seen = []
        for step in range(4):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            seen.append(loss.item())
            if step < 2:
                one.step()
            two.step()
            model.zero_grad()
            if step == 1:
                held = one if offload is None else None
                del one, held
                gc.collect()
                assert offload is None or all(in_memory(model))
        found.append((seen, whole(model)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])
    two.close()
    assert files(folder) == []


def test_two_optimizers(tmp_path: Any) -> None:
    run(2, two_optimizers_body, str(tmp_path))


def checkpoint_body(folder: str) -> None:
    """Saved from files, loaded into a plain run and back: the same bits at every turn."""
    root, state = os.path.join(folder, "checkpoints"), os.path.join(folder, "state")
    os.makedirs(state, exist_ok=True)
    expected = build(Net, precision="bf16")
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1)
    train(expected, plain, range(4))
    model = build(Net, precision="bf16", offload=both(state))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    train(model, optimizer, range(1))
    handle = fsdp.save_checkpoint(root, model, optimizer, step=1, background=True)
    train(model, optimizer, range(1, 2))
    handle.wait()
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    other = build(Net, precision="bf16", stage=2)
    others = torch.optim.AdamW(other.parameters(), lr=0.1)
    for step in (1, 2):
        fsdp.load_checkpoint(root, other, others, step=step)
        train(other, others, range(step, 4))
        assert_same_bits(whole(other, others, MOMENTS), whole(expected, plain, MOMENTS))
    fsdp.load_checkpoint(root, model, optimizer, step=1)
    train(model, optimizer, range(1, 4))
    assert_same_bits(whole(model, optimizer, MOMENTS), whole(expected, plain, MOMENTS))
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints(tmp_path: Any, world_size: int) -> None:
    run(world_size, checkpoint_body, str(tmp_path))


def lost_body(folder: str, harm: str) -> None:
    """A file that goes or is cut is a named error at every use, never a signal; a checkpoint brings all back."""
    root, state = os.path.join(folder, "checkpoints"), os.path.join(folder, f"state-{here.rank}")
    os.mkdir(state)
    expected = build(Net, precision="bf16")
    train(expected, torch.optim.AdamW(expected.parameters(), lr=0.1), range(4))
    model = build(Net, precision="bf16", offload=both(state))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    if harm == "cut":
        for name in files(state):
            os.truncate(os.path.join(state, name), 4096)
    else:
        shutil.rmtree(state)
        os.mkdir(state)
    held = [p for p in model.parameters() if p.numel()]
    word = "4096 bytes" if harm == "cut" else "errno 2"
    with pytest.raises(OffloadError, match=word.replace(" ", ".")):
        held[0].detach()
    expect_loud(lambda: held[0].data, word)
    expect_loud(lambda: held[0].data.add_(1), word)
    expect_loud(lambda: copy.deepcopy(model), word)
    expect_loud(lambda: fsdp.save_checkpoint(root, model, step=3), word)
    expect_loud(lambda: fsdp.load_checkpoint(root, model, step=2), word)
    expect_loud(lambda: train(model, optimizer, range(2, 3)), word)
    assert fsdp.latest_step(root) == 2
    optimizer.zero_grad()
    fsdp.load_checkpoint(root, model, optimizer)
    train(model, optimizer, range(2, 4))
    assert_same_bits(whole(model), whole(expected))
    shutil.rmtree(state)
    os.mkdir(state)
    optimizer.close()
    expect_loud(lambda: model(torch.ones(1, 6)), "lost with the file", "load_checkpoint")
    fsdp.load_checkpoint(root, model)
    assert all(in_memory(model))
    assert_rested(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("harm", ["cut", "gone"])
@pytest.mark.filterwarnings("ignore:the model was wrapped with Offload")
def test_a_lost_file_and_the_way_back(tmp_path: Any, world_size: int, harm: str) -> None:
    run(world_size, lost_body, str(tmp_path), harm)


def state_alone_body(folder: str) -> None:
    """State loaded into new files does not bring the masters: the forward says so."""
    model = build(Net, precision="bf16", offload=both(folder))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    train(model, optimizer, range(1))
    saved = copy.deepcopy({k: v for k, v in optimizer.state_dict().items() if k == "param_groups"}) | {"state": {}}
    for name in files(folder):
        os.unlink(os.path.join(folder, name))
    optimizer.load_state_dict(saved)
    expect_loud(lambda: model(torch.ones(1, 6)), "lost with the file", "load_checkpoint")
    optimizer.close()
    expect_loud(lambda: model(torch.ones(1, 6)), "lost with the file", "load_checkpoint")


def test_state_alone_is_not_enough(tmp_path: Any) -> None:
    run(1, state_alone_body, str(tmp_path))


def failed_body(folder: str) -> None:
    """An optimizer that cannot be made leaves the masters where they were."""
    model = build(Net, precision="bf16", offload=both(folder))
    before = whole(model)
    real, calls = os.posix_fallocate, []

    def no_room(descriptor: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 4 and here.rank == 0:
            raise OSError(28, os.strerror(28))
        real(descriptor, offset, length)

    os.posix_fallocate = no_room
    try:
        expect_loud(lambda: fsdp.offloaded(torch.optim.AdamW, model, lr=0.1), "errno 28" if here.rank == 0 else "rank 0")
    finally:
        os.posix_fallocate = real
    assert all(in_memory(model)) and files(folder) == []
    assert_same_bits(whole(model), before)


def test_an_optimizer_that_could_not_be_made(tmp_path: Any) -> None:
    run(2, failed_body, str(tmp_path))
