"""What is timed: each writes the same bytes of this rank into a directory and returns when they are durable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fsdplite as fsdp
from fsdplite.checkpoint import writer
from fsdplite.checkpoint.safetensors_file import CHUNK_BYTES
from fsdplite.checkpoint.tensor_bytes import bytes_of
from fsdplite.checkpoint.writer import Part

from .state import State


class Writers:
    """Contenders over one state. Each takes an empty directory that all ranks share, and returns its seconds.

    Args:
        ours: Sharded by fsdplite.
        theirs: The same layers, sharded by fully_shard.
        parts: What this rank writes of ``ours``.
    """

    def __init__(self, ours: State, theirs: State, parts: list[Part]) -> None:
        self._ours = ours
        self._parts = parts
        self._copies = [torch.zeros_like(part.data) for part in parts]  # touched: no page is new when it is timed
        self._their_state = {
            "model": get_model_state_dict(theirs.model),
            "optimizer": get_optimizer_state_dict(theirs.model, theirs.optimizer),
        }

    def raw(self, folder: Path) -> dict[str, float]:
        """Whole tensors by pwrite, then fsync of the file and its directory."""
        with _timed() as seconds:
            file = os.open(folder / f"rank-{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            offset = 0
            for part in self._parts:
                view = bytes_of(part.data)
                while view:
                    count = os.pwrite(file, view, offset)
                    view, offset = view[count:], offset + count
            os.fsync(file)
            os.close(file)
            directory = os.open(folder, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        return {"raw": seconds[0]}

    def save(self, folder: Path) -> dict[str, float]:
        with _timed() as seconds:
            fsdp.save_checkpoint(folder, self._ours.model, self._ours.optimizer, step=1)
        return {"save": seconds[0]}

    def unchecked(self, folder: Path) -> dict[str, float]:
        """The same save with a function in the place of the checksums' that looks at nothing."""
        with mock.patch.object(writer, "chunk_checksums", lambda view: [0] * -(-len(view) // CHUNK_BYTES)):
            with _timed() as seconds:
                fsdp.save_checkpoint(folder, self._ours.model, self._ours.optimizer, step=1)
        return {"unchecked": seconds[0]}

    def dcp(self, folder: Path) -> dict[str, float]:
        """torch.distributed.checkpoint, one file per rank, fsynced; its state dict is made before the clock starts."""
        with _timed() as seconds, _objects_without_numpy(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
            dcp.save(self._their_state, storage_writer=target)
        return {"dcp": seconds[0]}

    def background(self, folder: Path) -> dict[str, float]:
        """How long a background save holds training up, and right before it how long a copy of the slices takes."""
        with _timed() as copy, torch.no_grad():
            for part, place in zip(self._parts, self._copies):
                place.copy_(part.data)
        dist.barrier()
        with _timed() as stall:
            handle = fsdp.save_checkpoint(folder, self._ours.model, self._ours.optimizer, step=1, background=True)
        handle.wait()
        return {"copy": copy[0], "stall": stall[0]}

    @property
    def all(self) -> list[Any]:
        return [self.raw, self.save, self.unchecked, self.dcp, self.background]


@contextlib.contextmanager
def _timed() -> Iterator[list[float]]:
    seconds = [0.0]
    start = time.perf_counter()
    yield seconds
    seconds[0] = time.perf_counter() - start


@contextlib.contextmanager
def _objects_without_numpy() -> Iterator[None]:
    """torch's own exchange of objects, which torch.distributed.checkpoint uses, reads tensors through numpy."""

    def to_object(tensor: torch.Tensor, size: int, group: Any) -> Any:
        return torch.distributed.distributed_c10d.pickle.loads(ctypes.string_at(tensor.data_ptr(), int(size)))

    with mock.patch.object(torch.distributed.distributed_c10d, "_tensor_to_object", to_object):
        yield
