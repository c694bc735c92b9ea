"""Saves that go on while training does: a copy in host memory, a thread that writes it, and a handle."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, Callable

import torch

from ..errors import CheckpointError
from .agree import Agreement
from .dtypes import ITEMSIZE
from .tensor_bytes import host_empty, torch_dtype
from .writer import Part

__all__ = ["SaveHandle", "Staging", "drain", "settle", "stage", "start"]


class SaveHandle:
    """A save, perhaps in flight.

    Attributes:
        path: The directory of the checkpoint, which exists once it is published.
        done: Whether the save is over, well or not.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_told = False
        self._is_over = False
        self._process = os.getpid()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not.

        Raises:
            CheckpointError: In a forked process, of a save that was in flight.
        """
        self._refuse_elsewhere("done")
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is durable; raise what went wrong, on every rank the same.

        Raises:
            CheckpointError: What went wrong; or in a forked process, of a save that was in flight.
        """
        self._refuse_elsewhere("wait")
        if self._thread is not None:
            self._thread.join()
        self._is_told = True
        if self._error is not None:
            raise self._error

    @property
    def _is_elsewhere(self) -> bool:
        """A fork has no copy of the thread, and cannot know what becomes of it."""
        return self._thread is not None and not self._is_over and self._process != os.getpid()

    def _refuse_elsewhere(self, what: str) -> None:
        if self._is_elsewhere:
            raise CheckpointError(
                f"SaveHandle.{what} in a forked process: the save runs in the process that started it",
                expected=f"process {self._process}",
                found=f"process {os.getpid()}",
                path=self.path,
                cure="ask there, or look for the step with fsdplite.list_checkpoints(root)",
            )

    def __repr__(self) -> str:
        state = "in another process" if self._is_elsewhere else "done" if self.done else "in flight"
        return f"SaveHandle({self.path!r}, {state})"


_untold: list[SaveHandle] = []  # oldest first; more than one where threads of the program save at the same time


def start(path: str, agreement: Agreement, run: Callable[[], None]) -> SaveHandle:
    """Run the rest of a save in a thread. The interpreter waits for it when it exits."""
    handle = SaveHandle(path)

    def body() -> None:
        try:
            with agreement.open():
                run()
        except BaseException as problem:
            handle._error = problem
        finally:
            handle._is_over = True

    handle._thread = threading.Thread(target=body, name="fsdplite-checkpoint", daemon=False)
    handle._thread.start()
    _untold[:] = [other for other in _untold if not other._is_told]
    _untold.append(handle)
    return handle


def drain() -> None:
    """Wait for the saves in flight. Raise the error of the oldest that nobody has been told of yet."""
    for handle in list(_untold):
        if not handle._is_told and not handle._is_elsewhere:
            handle.wait()


def settle() -> None:
    """Wait for the saves in flight; their errors stay for ``wait()``, the next save, or the exit."""
    for handle in list(_untold):
        if not handle._is_elsewhere and handle._thread is not None:
            handle._thread.join()


@atexit.register
def _at_exit() -> None:
    while True:
        try:
            return drain()
        except BaseException as problem:
            print(f"fsdplite: a background save failed: {problem}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- the copy

_kept: list[torch.Tensor] = []


class Staging:
    """Host memory that holds a save's bytes; given back, it serves the next save."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer: torch.Tensor | None = buffer

    def give_back(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            _kept[:] = [buffer]


def stage(parts: list[Part]) -> tuple[list[Part], Staging]:
    """Copy what the parts show into host memory. Memory: their bytes, once."""
    parts = sorted(parts, key=lambda part: -ITEMSIZE[part.dtype])  # then each is aligned without padding
    total = sum(part.data.numel() * ITEMSIZE[part.dtype] for part in parts)
    try:
        buffer: Any = _kept.pop()
    except IndexError:
        buffer = None
    if buffer is None or not total <= buffer.numel() <= 2 * total:
        buffer = None  # free the old one before the new one is there
        buffer = host_empty(total, torch.uint8, pinned=any(part.data.is_cuda for part in parts))
    copies = []
    end = 0
    with torch.no_grad():
        for part in parts:
            begin, end = end, end + part.data.numel() * ITEMSIZE[part.dtype]
            place = buffer[begin:end].view(torch_dtype(part.dtype))
            place.copy_(part.data)
            copies.append(Part(part.name, part.dtype, place))
    return copies, Staging(buffer)
