"""Files of optimizer state that are lost, and those of an optimizer that could not be made."""

from __future__ import annotations

import errno
import os
import shutil
from typing import Any

import pytest
import torch

import fsdplite as fsdp
from fsdplite.errors import OffloadError
from tests.harness import Vec, expect_loud, here, run
from tests.memory.parts import Net, assert_same_bits, build, train, whole
from tests.memory.test_state_files import Three, files, offload


def failed_body(folder: str) -> None:
    """An optimizer that could not be made leaves nothing, while its error is still held."""
    torch.manual_seed(0)
    model = Three()
    fsdp.fsdp_wrap(model, fsdp.by_class(Vec), offload=offload(folder))
    kept = []
    original = os.posix_fallocate
    calls = []

    def no_room(descriptor: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor, offset, length)

    os.posix_fallocate = no_room
    try:
        fsdp.offloaded(torch.optim.AdamW, model)
    except OffloadError as problem:
        kept.append(problem)
    finally:
        os.posix_fallocate = original
    assert len(calls) == 2 and kept and files(folder) == []
    first = fsdp.offloaded(torch.optim.AdamW, model, in_backward=True)
    there = files(folder)
    try:
        fsdp.offloaded(torch.optim.AdamW, model, in_backward=True)
    except fsdp.FSDPError as problem:
        kept.append(problem)
    assert len(kept) == 2 and files(folder) == there
    first.close()


def test_an_optimizer_that_could_not_be_made(tmp_path: Any) -> None:
    run(1, failed_body, str(tmp_path))


def vanished_body(folder: str) -> None:
    """The directory goes, on one rank; when it is there again a checkpoint brings everything back, in new files."""
    root = os.path.join(folder, "checkpoints")
    state = os.path.join(folder, f"state-{here.rank}")
    os.mkdir(state)
    expected_model = build(Net)
    train(expected_model, torch.optim.AdamW(expected_model.parameters(), lr=0.1), range(4))
    model = build(Net, offload=offload(state))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    is_lost = here.rank == here.world_size - 1
    for steps_first in (True, False):
        if is_lost:
            shutil.rmtree(state)
        if steps_first:
            expect_loud(lambda: train(model, optimizer, range(2, 3)), "errno 2")
            optimizer.zero_grad()
        needles = ["new ones cannot be made", *(("make a new optimizer", "errno 2") if is_lost else ())]
        expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer), *needles)
        if is_lost:
            os.mkdir(state)
        fsdp.load_checkpoint(root, model, optimizer)
        assert len(files(state)) == 6
    train(model, optimizer, range(2, 4))
    assert_same_bits(whole(model), whole(expected_model))
    if is_lost:
        os.truncate(os.path.join(state, files(state)[0]), 5000)
    expect_loud(lambda: fsdp.load_checkpoint(root + "-absent", model, optimizer), "absent")
    fsdp.load_checkpoint(root, model, optimizer)
    train(model, optimizer, range(2, 4))
    assert_same_bits(whole(model), whole(expected_model))
    optimizer.close()
    assert files(state) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lost_directory_and_the_way_back(tmp_path: Any, world_size: int) -> None:
    run(world_size, vanished_body, str(tmp_path))
