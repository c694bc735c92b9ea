"""What the checkpoint tests share: small models trained to a known state, and a look at what they hold."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import gather, gather_state, here, plain

from .reader import read

GLOBAL_ROWS = 12


@pytest.fixture
def in_memory(tmp_path):
    """A folder in memory, where that is a file system like any other: a sweep flushes thousands of times."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="fsdplite-sweep-")
    yield Path(folder)
    shutil.rmtree(folder)



def global_batch(step: int, features: int = 7, out: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step)
    x = torch.randn(GLOBAL_ROWS, features, dtype=torch.float64, generator=generator)
    return x, torch.randn(GLOBAL_ROWS, out, dtype=torch.float64, generator=generator)


def share(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's rows."""
    rows = GLOBAL_ROWS // here.world_size
    return tuple(part[here.rank * rows : (here.rank + 1) * rows] for part in batch)


def take_steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = share(global_batch(step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def fully(
    model: nn.Module, optimizer: Any = None, keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
) -> dict[str, Tensor]:
    """Whole parameters, and moments under the names that a checkpoint gives them; every rank must call it."""
    found = dict(gather(model))
    for key in keys if optimizer is not None else ():
        for name, value in gather_state(model, optimizer, key).items():
            if value is not None:
                found[f"optimizer/{name}/{key}"] = value
    return found


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert found[name].reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist(), (
            f"{name}: {found[name]} is not {value}"
        )


def save_and_read(
    root: str, model: nn.Module, optimizer: Any = None, *, step: int, **options: Any
) -> dict[str, Tensor]:
    """Save, let READER rebuild the checkpoint, and compare with the gathered live state."""
    live = fully(model, optimizer)
    handle = fsdp.save_checkpoint(root, model, optimizer, step=step, **options)
    handle.wait()
    stored = read(handle.path)
    buffers = {name for name, _ in model.named_buffers()}
    same_bits({n: t for n, t in stored.items() if not n.startswith(("extra/", "per_rank/")) and n not in buffers}, live)
    assert fsdp.verify_checkpoint(handle.path).ok
    return live


def filled(value: float, n: int = 8, dtype: torch.dtype = torch.float32, wrap: bool = True) -> tuple[nn.Module, Any]:
    """A model of one parameter and an Adam whose moments, all are `value`."""
    from tests.harness import Vec

    model: Any = Vec(n, value, dtype)
    if wrap:
        model = fsdp.fsdp_wrap(model)
    optimizer = torch.optim.Adam(model.parameters())
    with torch._C.DisableTorchFunctionSubclass():
        for p in model.parameters():
            like = plain(p)
            optimizer.state[p] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.full_like(like, value),
                "exp_avg_sq": torch.full_like(like, value),
            }
    return model, optimizer


def values_in(folder: str | Path) -> set[float]:
    """The distinct values of all elements of a checkpoint."""
    return {float(x) for t in read(folder).values() for x in t.double().reshape(-1).tolist()}


def wrapped(build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp.fsdp_wrap(build(), **options)
