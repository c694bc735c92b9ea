"""Checkpoints of offloaded state: the same files as of any optimizer's, written and read without a copy in memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fsdplite as fsdp
from tests.checkpoint.parts import save_and_read
from tests.checkpoint.reader import read
from tests.harness import expect_loud, here, run
from tests.memory.parts import Net, assert_same_bits, build, whole

KEYS = ("exp_avg", "exp_avg_sq")
SETTINGS = {"lr": 0.1, "weight_decay": 0.1}


def made(folder: str, kind: str | None, **options: Any) -> tuple[Any, Any]:
    path = {"path": folder} if kind == "nvme" else {}
    offload = None if kind is None else fsdp.Offload(optimizer=kind, buffer_bytes=16384, **path)
    model = build(lambda: Net(2, width=12, inner=700), offload=offload, **options)
    if kind is None:
        return model, torch.optim.AdamW(model.parameters(), **SETTINGS)
    return model, fsdp.offloaded(torch.optim.AdamW, model, **SETTINGS)


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    for step in numbers:
        torch.manual_seed(step)
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1000 * step + here.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_body(folder: str, root: str, kind: str) -> None:
    plain = made(folder, None)
    steps(*plain, range(2))
    model, optimizer = made(folder, kind)
    steps(model, optimizer, range(2))
    save_and_read(root, model, optimizer, step=2)
    fsdp.save_checkpoint(root + "-plain", *plain, step=2)
    fsdp.save_checkpoint(root + "-background", model, optimizer, step=2, background=True).wait()
    if here.rank == 0:
        names = [f"{root}{suffix}/step-2" for suffix in ("", "-plain", "-background")]
        first, *others = (read(name) for name in names)
        for other in others:
            assert_same_bits(dict(sorted(first.items())), dict(sorted(other.items())))
    if kind == "nvme":
        optimizer.close()


@pytest.mark.parametrize("kind", ["nvme", "cpu"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_files_are_those_of_a_plain_optimizer(tmp_path: Any, kind: str, world_size: int) -> None:
    run(world_size, save_body, str(tmp_path), str(tmp_path / "root"), kind)


def first_part(folder: str, root: str, kind: str | None, stage: int) -> None:
    model, optimizer = made(folder, kind, stage=stage)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    steps(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)


def second_part(folder: str, root: str, kind: str | None, stage: int) -> dict:
    model, optimizer = made(folder, kind, stage=stage)
    steps(model, optimizer, range(5, 6))  # what it holds is replaced
    report = fsdp.load_checkpoint(root, model, optimizer)
    assert report.step == 2 and optimizer.param_groups[0]["lr"] == 0.05
    loaded = whole(model, optimizer, KEYS)
    expected, plain = made(folder, None, stage=stage)
    fsdp.load_checkpoint(root, expected, plain)
    assert_same_bits(loaded, whole(expected, plain, KEYS))
    for one in ((model, optimizer), (expected, plain)):
        steps(*one, range(2, 4))
    assert_same_bits(whole(model, optimizer, KEYS), whole(expected, plain, KEYS))


@pytest.mark.parametrize(
    "saved, loaded", [(("nvme", 1, 3), ("cpu", 2, 2)), (("cpu", 2, 1), ("nvme", 3, 3)), ((None, 3, 3), ("nvme", 1, 1))]
)
def test_any_place_loads_any_other(tmp_path: Any, saved: tuple, loaded: tuple) -> None:
    root = str(tmp_path / "root")
    run(saved[1], first_part, str(tmp_path), root, saved[0], saved[2])
    run(loaded[1], second_part, str(tmp_path), root, loaded[0], loaded[2])


def refused_body(folder: str, root: str) -> None:
    """A load that is refused changes nothing; one that finds damage leaves an optimizer that says so."""
    model, optimizer = made(folder, "nvme")
    steps(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    before = whole(model, optimizer, KEYS)
    other, other_optimizer = build(lambda: Net(3, width=12, inner=700), offload=fsdp.Offload(optimizer="cpu")), None
    other_optimizer = fsdp.offloaded(torch.optim.AdamW, other, **SETTINGS)
    with pytest.raises(fsdp.CheckpointError):
        fsdp.load_checkpoint(root, other, other_optimizer)
    steps(other, other_optimizer, range(1))
    path = os.path.join(root, "step-2", "rank-0-of-1.safetensors")
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.seek(size - 100)
        byte = file.read(1)
        file.seek(size - 100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(fsdp.CheckpointError, match="damaged"):
        fsdp.load_checkpoint(root, model, optimizer)
    with pytest.raises(fsdp.FSDPError):
        steps(model, optimizer, range(1))
    with open(path, "r+b") as file:
        file.seek(size - 100)
        file.write(byte)
    optimizer.zero_grad()
    fsdp.load_checkpoint(root, model, optimizer)
    assert_same_bits(whole(model, optimizer, KEYS), before)
    steps(model, optimizer, range(2, 3))


def test_a_load_that_fails(tmp_path: Any) -> None:
    run(1, refused_body, str(tmp_path), str(tmp_path / "root"))


def state_dict_body(folder: str) -> None:
    for kind in ("nvme", "cpu"):
        model, optimizer = made(folder, kind)
        steps(model, optimizer, range(2))
        saved = optimizer.state_dict()
        assert list(saved["state"]) == [name for name, _ in model.named_parameters()]
        assert saved["param_groups"][0]["params"] == list(saved["state"]) and saved["param_groups"][0]["lr"] == 0.1
        expect_loud(lambda: torch.save(saved, os.path.join(folder, f"rank-{here.rank}.pt")), "save_checkpoint")
        kept = {n: {k: v.clone() for k, v in s.items()} for n, s in saved["state"].items()}
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        steps(model, optimizer, range(2, 4))
        expected = whole(model, optimizer, KEYS)
        optimizer.load_state_dict({"state": kept, "param_groups": saved["param_groups"]})
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        steps(model, optimizer, range(2, 4))
        assert_same_bits(whole(model, optimizer, KEYS), expected)


def test_state_dict_by_names(tmp_path: Any) -> None:
    run(2, state_dict_body, str(tmp_path))


def anonymous_bytes() -> int:
    """Of this process: memory that no file stands behind."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def no_copy_body(folder: str, root: str) -> None:
    """Saving and loading 64 MB of state adds far less anonymous memory than that."""
    import threading
    import time

    offload = fsdp.Offload(optimizer="nvme", path=folder, buffer_bytes=2**20)
    model = torch.nn.Linear(4096, 2048, bias=False)
    fsdp.fsdp_wrap(model, offload=offload)
    optimizer = fsdp.offloaded(torch.optim.AdamW, model)
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    most = [0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            most[0] = max(most[0], anonymous_bytes())
            time.sleep(0.002)

    for call in (
        lambda: fsdp.save_checkpoint(root, model, optimizer, step=1),
        lambda: fsdp.load_checkpoint(root, model, optimizer),
    ):
        before = most[0] = anonymous_bytes()
        stop.clear()
        thread = threading.Thread(target=watch)
        thread.start()
        call()
        stop.set()
        thread.join()
        assert most[0] - before < 24 * 2**20, f"{(most[0] - before) / 2**20:.1f} MB more"


def test_no_copy_in_memory(tmp_path: Any) -> None:
    run(1, no_copy_body, str(tmp_path), str(tmp_path / "root"))
