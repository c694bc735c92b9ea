"""One file of state: created for itself alone, reserved before use, written and read in whole blocks.

Reads and writes bypass the page cache (O_DIRECT) where the file system takes that, because state is read once a step
and would only push other pages out. Every write is looked at again before it counts: its last block is read back, so
storage that keeps less than it says is found at once and not a step later.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OffloadError
from ..events import format_bytes
from ..liveness import process_state
from ..user_warning import warn_user

__all__ = ["BLOCK_BYTES", "Leftover", "StateFile", "aligned_bytes", "leftovers", "padded", "warn_of_leftovers"]

BLOCK_BYTES = 4096  # alignment of memory, offsets and lengths that O_DIRECT asks for
_HUGE_BYTES = 2**21
_PREFIX, _SUFFIX = "fsdplite-state-", ".bin"
_MAGIC = "fsdplite optimizer state"
_DIRECT = getattr(os, "O_DIRECT", 0)
_USABLE_FOLDER = (
    "Offload(path=...) must be an existing directory on a local disk with room for the state, writable by every rank"
)
_MORE_FILES = "let the process open more files (ulimit -n): up to three for each unit, and those of your own"


def padded(count: int) -> int:
    """``count`` bytes rounded up to whole blocks."""
    return -(-count // BLOCK_BYTES) * BLOCK_BYTES


def aligned_bytes(count: int) -> torch.Tensor:
    """Host memory whose address is a multiple of a block: pages of its own.

    Huge pages where there are any: a direct read or write names every page of its memory to the disk, and with pages of
    4 KiB that took a third of its time.
    """
    size = max(padded(count), BLOCK_BYTES)
    spare = _HUGE_BYTES if size >= _HUGE_BYTES else 0  # never touched, so it takes no memory
    pages = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not spare:
        return torch.frombuffer(pages, dtype=torch.uint8)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE_BYTES * _HUGE_BYTES)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=start)


def view_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a one-dimensional tensor's bytes. The caller keeps the tensor alive."""
    import ctypes

    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


@dataclass(frozen=True)
class Leftover:
    """A file of a process that has ended without removing it."""

    path: str
    size_bytes: int
    process: str


def leftovers(folder: str) -> list[Leftover]:
    """Files of state in ``folder`` whose process is gone: a crash left them."""
    found = []
    for name in sorted(os.listdir(folder)):
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError, ValueError, KeyError):
            with open(path, "rb") as file:
                header = json.loads(file.read(BLOCK_BYTES).rstrip(b"\0"))
            if header["magic"] == _MAGIC and header["host"] == socket.gethostname() and not _is_alive(header):
                found.append(Leftover(path, os.stat(path).st_size, f"process {header['pid']} (rank {header['rank']})"))
    return found


def warn_of_leftovers(folder: str) -> None:
    """Warn if there are :func:`leftovers`, with their size."""
    try:
        found = leftovers(folder)
    except OSError:
        return  # making files there says what is wrong
    if found:
        total = sum(leftover.size_bytes for leftover in found)
        warn_user(
            f"{len(found)} files of optimizer state ({format_bytes(total)}) in {folder} belong to processes "
            f"that ended without removing them; they are of no use and can be removed: "
            + ", ".join(f"{leftover.path} of {leftover.process}" for leftover in found[:8])
        )


def _is_alive(header: dict[str, Any]) -> bool:
    try:
        os.kill(header["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _started(header["pid"]) in (header["started"], None)


def _started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None where that cannot be known."""
    try:
        return int(process_state(pid)[1])
    except (OSError, ValueError, IndexError):
        return None


class StateFile:
    """A file of this process. The first block says whose it is; data start at :data:`BLOCK_BYTES`.

    Args:
        folder: An existing directory.
        data_bytes: How much is reserved; a multiple of a block.
        rank: For the name and for messages.
        contents: What it holds, in words, for whoever finds it.

    Raises:
        OffloadError: No such folder, no permission, no space: with path and errno. Nothing is left behind.
    """

    def __init__(self, folder: str, data_bytes: int, rank: int, contents: str) -> None:
        self.path = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(6)}-rank{rank}{_SUFFIX}")
        self.size_bytes = BLOCK_BYTES + padded(data_bytes)
        self.rank = rank
        self._contents = contents
        self._pid = os.getpid()
        self._descriptor = -1
        # A mapping holds a descriptor, of which a process has few: one of each length for all tensors that are in use.
        self._mappings: dict[int, Callable[[], mmap.mmap | None]] = {}
        self._scratch = threading.local()
        self.is_direct = False
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        with self._named("create"):
            try:
                self._descriptor = os.open(self.path, flags | _DIRECT, 0o600)
                self.is_direct = bool(_DIRECT)
            except OSError as problem:
                if problem.errno != errno.EINVAL:
                    raise
                self._descriptor = os.open(self.path, flags, 0o600)
        try:
            with self._named("reserve space in"):
                self._reserve()
            self._write_header()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, self.size_bytes)
            return
        room = os.fstatvfs(self._descriptor)
        if room.f_bavail * room.f_frsize < self.size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._descriptor, self.size_bytes)

    def _write_header(self) -> None:
        header = {
            "magic": _MAGIC,
            "host": socket.gethostname(),
            "pid": self._pid,
            "started": _started(self._pid),
            "rank": self.rank,
            "contents": self._contents,
        }
        block = aligned_bytes(BLOCK_BYTES)
        text = json.dumps(header).encode()[:BLOCK_BYTES]
        view_of(block)[: len(text)] = text
        self.write(0, block)

    # ------------------------------------------------------------------ data

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Store whole blocks at a block's offset and see that they are there. Releases the interpreter's lock."""
        view = view_of(data)
        done = 0
        with self._named("write to"):
            while done < len(view):
                count = self._retried(self.write_at, offset + done, view[done:])
                if count <= 0:
                    raise OSError(errno.EIO, "a write stored nothing")
                # A short write goes on at a block's start.
                done += count if done + count == len(view) else count // BLOCK_BYTES * BLOCK_BYTES or count
            self._check_end(offset, view)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into``, whole blocks, from a block's offset. Releases the interpreter's lock."""
        view = view_of(into)
        with self._named("read from"):
            self._fill(offset, view)

    def _fill(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._retried(self.read_at, offset + done, view[done:])
            if count <= 0:
                raise self._shorter(offset + len(view), offset + done)
            done += count if done + count == len(view) else count // BLOCK_BYTES * BLOCK_BYTES or count

    def write_at(self, offset: int, view: memoryview) -> int:
        """Write some or all of it; how many bytes."""
        return os.pwritev(self._descriptor, [view], offset)

    def read_at(self, offset: int, view: memoryview) -> int:
        """Read at most so much; how many bytes."""
        return os.preadv(self._descriptor, [view], offset)

    def _retried(self, call: Any, offset: int, view: memoryview) -> int:
        try:
            return call(offset, view)
        except OSError as problem:
            if problem.errno != errno.EINVAL or not self.is_direct:
                raise
            self._leave_direct()
            return call(offset, view)

    def _leave_direct(self) -> None:
        """This file system opens files for direct access and then refuses it."""
        import fcntl

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self.is_direct = False

    def _check_end(self, offset: int, view: memoryview) -> None:
        if not hasattr(self._scratch, "block"):
            self._scratch.block = aligned_bytes(BLOCK_BYTES)
        last = view_of(self._scratch.block)
        self._fill(offset + len(view) - BLOCK_BYTES, last)
        if last != view[-BLOCK_BYTES:]:
            raise self._shorter(offset + len(view), offset + self._kept(offset, view))

    def _kept(self, offset: int, view: memoryview) -> int:
        """How many of the first bytes of a write are there."""
        block = view_of(self._scratch.block)
        for start in range(0, len(view), BLOCK_BYTES):
            self._fill(offset + start, block)
            if block != view[start : start + BLOCK_BYTES]:
                return start + next(i for i in range(BLOCK_BYTES) if block[i] != view[start + i])
        return len(view)

    def _shorter(self, expected: int, found: int) -> OffloadError:
        return OffloadError(
            "a file of optimizer state holds less than was written to it",
            expected=f"{expected} bytes up to the end of this part",
            found=f"{found} bytes",
            path=self.path,
            errno=errno.EIO,
            rank=self.rank,
            cure="check the disk and its mount; load the last checkpoint to go on",
        )

    # ------------------------------------------------------------------ life

    def check(self) -> None:
        """Raise if the name no longer leads to this file, if it was cut, or if it is another process's."""
        if os.getpid() != self._pid:
            raise OffloadError(
                "a forked process uses what its parent has in a file, and would write into it",
                expected=f"process {self._pid}",
                found=f"process {os.getpid()}",
                path=self.path,
                rank=self.rank,
                cure="use parameters and optimizer state in the process that made the optimizer",
            )
        with self._named("find"):
            named, own = os.stat(self.path), os.fstat(self._descriptor)
        if (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            raise OffloadError(
                "a file of optimizer state was replaced by another one",
                path=self.path,
                rank=self.rank,
                cure="give each run a directory of its own: Offload(path=...)",
            )
        if own.st_size != self.size_bytes:
            raise self._shorter(self.size_bytes, own.st_size)

    @torch.inference_mode(False)
    def mapped(self, offset: int, numel: int, dtype: torch.dtype, most_bytes: int | None = None) -> torch.Tensor:
        """A part of the file as a tensor that is not in memory: pages come when they are looked at, and may go.

        What is written to it is written to the file. It takes addresses for ``most_bytes`` from the start of the file,
        for all of it by default.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        self.check()
        length = self.size_bytes if most_bytes is None else most_bytes
        pages = self._mappings.get(length, lambda: None)()
        if pages is None:
            with self._named("map"):
                pages = mmap.mmap(self._descriptor, length)
            self._mappings[length] = weakref.ref(pages)
        return torch.frombuffer(pages, dtype=dtype, count=numel, offset=offset)

    def close(self) -> None:
        """Close and remove it. Only the process that made it does."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0 or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                os.unlink(self.path)
        os.close(descriptor)

    @contextlib.contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            room = ""
            if problem.errno == errno.ENOSPC:
                with contextlib.suppress(OSError):
                    found = os.statvfs(os.path.dirname(self.path))
                    room = f"{found.f_bavail * found.f_frsize} bytes free"
            raise OffloadError(
                f"cannot {doing} a file of optimizer state: {problem.strerror or problem}",
                expected=f"{self.size_bytes} bytes in {os.path.dirname(self.path)}",
                found=room or None,
                path=self.path,
                errno=problem.errno,
                rank=self.rank,
                cure=_MORE_FILES if problem.errno == errno.EMFILE else _USABLE_FOLDER,
            ) from problem
