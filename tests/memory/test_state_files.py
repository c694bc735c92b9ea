"""Files of optimizer state: what storage does wrong is said, on every rank, and nothing is trained on it. Case D1."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.errors import OffloadError
from fsdplite.offload.files import BLOCK_BYTES, StateFile, aligned_bytes, leftovers
from tests.harness import Vec, expect_loud, here, run
from tests.memory.parts import Net, assert_same_bits, build, train, whole

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def offload(folder: str, **options: Any) -> fsdp.Offload:
    return fsdp.Offload(optimizer="nvme", path=folder, buffer_bytes=16384, **options)


def files(folder: Any) -> list[str]:
    return sorted(os.listdir(folder))


class Three(nn.Module):
    """Tensors of 4092, 4096 and 4100 bytes, a unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Vec(n, 1.0, torch.float32) for n in (1023, 1024, 1025))

    def forward(self, c: float) -> Tensor:
        return sum((part(c * (i + 1)) for i, part in enumerate(self.parts)), start=torch.zeros(()))


def three(folder: str | None, steps: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Three()
    fsdp.fsdp_wrap(model, fsdp.by_class(Vec), offload=offload(folder) if folder else None)
    cls = torch.optim.AdamW
    optimizer = fsdp.offloaded(cls, model, lr=0.1) if folder else cls(model.parameters(), lr=0.1)
    steps_of(model, optimizer, steps)
    return model, optimizer


def steps_of(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(0.5 + step).backward()
        optimizer.step()


def moments(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": optimizer.state[p][key].clone()
        for name, p in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }


def slices(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().as_subclass(Tensor).clone() for name, p in model.named_parameters()}


class Faulty:
    """The storage layer, patched: ``at(kind, file, offset, view, call)`` may do something else than ``call()``."""

    def __init__(self, at: Any) -> None:
        self._at = at
        self._originals = StateFile.read_at, StateFile.write_at

    def __enter__(self) -> None:
        read, write = self._originals
        at = self._at
        StateFile.read_at = lambda f, offset, view: at("read", f, offset, view, read)
        StateFile.write_at = lambda f, offset, view: at("write", f, offset, view, write)

    def __exit__(self, *exc: object) -> None:
        StateFile.read_at, StateFile.write_at = self._originals


def round_trip_body(folder: str) -> None:
    expected = moments(*three(None))
    found = moments(*three(folder))
    assert_same_bits(found, expected)


def short_write_body(folder: str) -> None:
    """(a) 60% of a request is written once, and it says so: the rest is written by further calls.

    Once for each place in each file: each of the three sizes, both moments in one request.
    """
    shortened: dict[tuple[str, int], int] = {}

    def at(kind: str, file: StateFile, offset: int, view: memoryview, call: Any) -> int:
        if kind == "write" and offset >= BLOCK_BYTES and (file.path, offset) not in shortened and len(view) >= BLOCK_BYTES:
            shortened[file.path, offset] = len(view)
            file._leave_direct() if file.is_direct else None  # a kernel cuts direct writes at whole blocks only
            return call(file, offset, view[: int(0.6 * len(view))])
        return call(file, offset, view)

    expected = moments(*three(None))
    with Faulty(at):
        found = moments(*three(folder))
    # 4092, 4096 and 4100 bytes are one, one and two blocks, for each moment. Of two, four and then two blocks 60% are one
    # whole block and two and one, and the rest is written by a request of its own, that is shortened too. Of two ranks
    # each has a part, which is one block for each moment.
    blocks = sorted([2, 1, 2, 1, 4, 2, 1] if here.world_size == 1 else [2, 1] * 3)
    own = [size // BLOCK_BYTES for (path, _), size in shortened.items() if f"rank{here.rank}" in path]
    assert sorted(own) == blocks
    assert_same_bits(found, expected)


def kept_less_body(folder: str) -> None:
    """(b) 60% of each request is kept and success reported: loud on every rank, before any such value is used.

    So after the failure a parameter has the bits of a plain run before that step, or after it. Requests are whole
    blocks: of two ranks each fills half a block with each moment, so that 80% of both is all there is, and nothing is
    lost.
    """
    kept = 0.6 if here.world_size == 1 else 0.8
    plain, plain_optimizer = three(None, steps=2)
    older = slices(plain)
    steps_of(plain, plain_optimizer, 1)
    newer = slices(plain)

    def at(kind: str, file: StateFile, offset: int, view: memoryview, call: Any) -> int:
        if kind == "write":
            file._leave_direct() if file.is_direct else None
            call(file, offset, view[: int(kept * len(view))])
            return len(view)
        return call(file, offset, view)

    model, optimizer = three(folder, steps=2)
    assert_same_bits(slices(model), older)
    if here.world_size == 2:
        with Faulty(at):
            steps_of(model, optimizer, 1)
        assert_same_bits(slices(model), newer)
        assert_same_bits(moments(model, optimizer), moments(plain, plain_optimizer))
        model, optimizer = three(folder, steps=2)
        kept = 0.6
    needles = ("holds less than was written", folder, "expected", "found", "errno 5")
    with Faulty(at):
        expect_loud(lambda: steps_of(model, optimizer, 1), *needles)
    for name, value in slices(model).items():
        assert torch.equal(value, older[name]) or torch.equal(value, newer[name]), name
    expect_loud(lambda: steps_of(model, optimizer, 1), "not whole", "load a checkpoint")


def full_disk_body(folder: str) -> None:
    """(c) no space, when it is reserved and in the middle of training, on one rank: loud on all, with path and errno."""

    def full(kind: str, file: StateFile, offset: int, view: memoryview, call: Any) -> int:
        if kind == "write" and here.rank == here.world_size - 1 and offset >= BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(file, offset, view)

    model, optimizer = three(folder, steps=1)
    with Faulty(full):
        text = expect_loud(lambda: steps_of(model, optimizer, 1), "errno 28", folder)
    assert here.world_size == 1 or here.rank == here.world_size - 1 or f"rank {here.world_size - 1}" in text
    optimizer.close()
    original = os.posix_fallocate

    def no_room(descriptor: int, offset: int, length: int) -> None:
        if here.rank == here.world_size - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor, offset, length)

    os.posix_fallocate = no_room
    try:
        expect_loud(lambda: three(folder), "errno 28", "bytes free", folder)
    finally:
        os.posix_fallocate = original


def no_folder_body(folder: str) -> None:
    """(d) no such folder."""
    expect_loud(lambda: three(os.path.join(folder, "absent")), "absent", "errno 2", "existing directory")
    assert not os.path.exists(os.path.join(folder, "absent"))


@pytest.mark.parametrize(
    "body, world_size",
    [
        *((body, 1) for body in (round_trip_body, short_write_body, kept_less_body, full_disk_body, no_folder_body)),
        *((body, 2) for body in (round_trip_body, short_write_body, kept_less_body, full_disk_body, no_folder_body)),
    ],
)
def test_D1_storage_that_keeps_less(tmp_path: Any, body: Any, world_size: int) -> None:
    run(world_size, body, str(tmp_path))
    gc.collect()


def test_a_file_alone_says_how_much_it_keeps(tmp_path: Any) -> None:
    """The last tensor alone: 4100 bytes of which 2460 are kept, in a file whose data end there.

    A step's requests are whole blocks, 8192 bytes for this tensor: 60% of one is 4915 bytes and holds all of it.
    """
    file = StateFile(str(tmp_path), 4100, 0, "a test")
    data = aligned_bytes(4100)
    data.copy_(torch.arange(data.numel()) % 251)

    def at(kind: str, f: StateFile, offset: int, view: memoryview, call: Any) -> int:
        if kind == "write":
            f._leave_direct() if f.is_direct else None
            call(f, offset, view[:2460])
            return len(view)
        return call(f, offset, view)

    with Faulty(at), pytest.raises(OffloadError) as caught:
        file.write(BLOCK_BYTES, data)
    assert f"found: {BLOCK_BYTES + 2460} bytes" in str(caught.value) and caught.value.path == file.path
    file.close()
    assert files(tmp_path) == []


def test_buffers_of_several_huge_pages(tmp_path: Any) -> None:
    count = 5 * 2**20 + 1
    file, data, back = StateFile(str(tmp_path), count, 0, "a test"), aligned_bytes(count), aligned_bytes(count)
    assert data.numel() == 5 * 2**20 + BLOCK_BYTES and data.data_ptr() % BLOCK_BYTES == 0 and not data.any()
    data.copy_(torch.arange(data.numel()) % 251)
    file.write(BLOCK_BYTES, data)
    file.read(BLOCK_BYTES, back)
    assert torch.equal(back, data) and int(back[-1]) == (data.numel() - 1) % 251
    file.close()


def cut_and_replaced_body(folder: str) -> None:
    for harm in ("cut", "replace", "remove"):
        model, optimizer = three(folder, steps=2)
        path = os.path.join(folder, files(folder)[0])
        if harm == "cut":
            os.truncate(path, 5000)
        elif harm == "remove":
            os.unlink(path)
        else:
            data = Path(path).read_bytes()
            os.unlink(path)
            Path(path).write_bytes(data)
        word = {"cut": "5000", "remove": "errno 2", "replace": "replaced"}[harm]
        expect_loud(lambda: steps_of(model, optimizer, 1), word, path)
        optimizer.close()
        if harm == "replace":
            assert os.path.exists(path), "another's file is not ours to remove"
            os.unlink(path)
    assert files(folder) == []


def test_files_that_are_cut_or_replaced(tmp_path: Any) -> None:
    run(1, cut_and_replaced_body, str(tmp_path))


def lost_disk_body(folder: str) -> None:
    """Reads fail on one rank in the middle of a step; a checkpoint brings everything back."""
    root = os.path.join(folder, "checkpoints")
    state = os.path.join(folder, "state")
    if here.rank == 0:
        os.mkdir(state)
    torch.distributed.barrier()
    expected_model = build(Net)
    plain = torch.optim.AdamW(expected_model.parameters(), lr=0.1)
    train(expected_model, plain, range(4))
    model = build(Net, offload=offload(state))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    train(model, optimizer, range(2))
    fsdp.save_checkpoint(root, model, optimizer, step=2)

    def lost(kind: str, file: StateFile, offset: int, view: memoryview, call: Any) -> int:
        if kind == "read" and here.rank == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(file, offset, view)

    with Faulty(lost):
        expect_loud(lambda: train(model, optimizer, range(2, 3)), "errno 5", "rank 1")
    expect_loud(lambda: train(model, optimizer, range(2, 3)), "load a checkpoint")
    optimizer.zero_grad()
    fsdp.load_checkpoint(root, model, optimizer)
    train(model, optimizer, range(2, 4))
    assert_same_bits(whole(model), whole(expected_model))
    optimizer.close()


def test_a_lost_disk_and_the_way_back(tmp_path: Any) -> None:
    run(2, lost_disk_body, str(tmp_path))


def test_without_direct_access(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems that refuse O_DIRECT when opening, or later, are used through the page cache."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    file = StateFile(str(tmp_path), 8192, 0, "a test")
    monkeypatch.undo()
    later = StateFile(str(tmp_path), 8192, 0, "a test")
    assert not file.is_direct
    refused = []

    def at(kind: str, f: StateFile, offset: int, view: memoryview, call: Any) -> int:
        if f.is_direct:
            refused.append(kind)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(f, offset, view)

    data, back = aligned_bytes(8192), aligned_bytes(8192)
    data.copy_(torch.arange(8192) % 251)
    with Faulty(at):
        for f in (file, later):
            f.write(BLOCK_BYTES, data)
            f.read(BLOCK_BYTES, back.zero_())
            assert torch.equal(back, data)
            f.close()
    assert len(refused) <= 1 and not later.is_direct


# ---- life


def life_body(folder: str) -> None:
    model, optimizer = three(folder)
    assert len(files(folder)) == 3
    foreign = os.path.join(folder, "fsdplite-state-of-somebody-else.bin")
    Path(foreign).write_bytes(b"not ours")
    optimizer.close()
    assert files(folder) == [os.path.basename(foreign)]
    expect_loud(lambda: steps_of(model, optimizer, 1), "closed")
    gc.collect()
    gc.disable()
    try:
        model, optimizer = three(folder)
        assert len(files(folder)) == 4
        state = optimizer.state
        del optimizer
        assert files(folder) == [os.path.basename(foreign)], "at once, not when garbage is collected"
        expect_loud(lambda: state[next(model.parameters())], "gone")
    finally:
        gc.enable()
    os.unlink(foreign)


def test_files_go_with_the_optimizer(tmp_path: Any) -> None:
    run(1, life_body, str(tmp_path))


PROGRAM = """
import os, sys, torch
import fsdplite as fsdp
model = torch.nn.Linear(64, 64)
fsdp.fsdp_wrap(model, offload=fsdp.Offload(optimizer="nvme", path=sys.argv[1]))
optimizer = fsdp.offloaded(torch.optim.AdamW, model)
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
assert len(os.listdir(sys.argv[1])) == 1
if sys.argv[2] == "die":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


def program(folder: Any, way: str) -> int:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), way], env=environment, timeout=120)
    return done.returncode


@pytest.mark.slow
def test_files_go_at_exit_and_are_found_after_a_crash(tmp_path: Any) -> None:
    assert program(tmp_path, "raise") == 3 and files(tmp_path) == []
    assert program(tmp_path, "die") == -9
    (left,) = leftovers(str(tmp_path))
    assert left.size_bytes == BLOCK_BYTES + 2 * -(-4160 * 4 // BLOCK_BYTES) * BLOCK_BYTES
    model = torch.nn.Linear(8, 8)
    fsdp.fsdp_wrap(model, offload=offload(str(tmp_path)))
    with pytest.warns(UserWarning, match="ended without removing"):
        optimizer = fsdp.offloaded(torch.optim.AdamW, model)
    assert len(files(tmp_path)) == 2, "reported, and left for a person to remove"
    optimizer.close()
    assert files(tmp_path) == [os.path.basename(left.path)]
