"""FS: the file-system layer with counted operations and one planned fault."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplite.checkpoint.storage import File, FileSystem

OPERATIONS = (
    "make_directory", "create", "open", "write_at", "read_at", "flush", "close", "flush_directory", "rename",
    "exchange", "remove", "remove_directory", "list", "size",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """At operation `at` (from 1; 0: never): `kind` is fail, crash_before, crash_after, short, lie, slow or power_cut.

    `detail` is an errno, a fraction of the bytes, seconds, or (power_cut) the seed of what survives. A crash ends the
    process; a `mock` one raises `Crash` there and at every later operation, which leaves the same on the disk.
    """

    kind: str
    at: int = 0
    detail: Any = None
    mock: bool = False


class Crash(BaseException):
    """Stands for the end of the process."""


class FaultyFileSystem(FileSystem):
    """Counts operations, keeps a log, and does what its fault says at one of them."""

    def __init__(self, fault: Fault = Fault("count"), *, only: Callable[[str, str], bool] | None = None) -> None:
        self.fault = fault
        self.log: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.bytes_written = 0
        self.bytes_read: dict[str, int] = {}
        self.open_files = 0
        self.most_open = 0
        self._only = only
        self._dead = False
        self._disk = Disk() if fault.kind == "power_cut" else None

    @property
    def count(self) -> int:
        return len(self.log)

    def opened(self) -> set[str]:
        return {os.path.basename(path) for name, path in self.log if name == "open"}

    def _run(self, name: str, path: str, call: Callable[..., Any], *args: Any) -> Any:
        if self._only is not None and not self._only(name, path):
            return call(*args)
        if self._dead:
            raise Crash
        self.log.append((name, path))
        self.threads.add(threading.get_ident())
        fault = self.fault
        if len(self.log) != fault.at:
            result = call(*args)
            self._note(name, args, result)
            return result
        if fault.kind == "fail":
            raise OSError(fault.detail, os.strerror(fault.detail), path)
        if fault.kind == "crash_before":
            self._die(41)
        if fault.kind == "slow":
            time.sleep(fault.detail)
        if fault.kind in ("short", "lie") and name == "write_at":
            file, offset, data = args
            stored = max(1, int(len(data) * fault.detail)) if fault.kind == "short" else int(len(data) * fault.detail)
            call(file, offset, data[:stored])
            self._note(name, (file, offset, data[:stored]), stored)
            return stored if fault.kind == "short" else len(data)
        try:
            result = call(*args)
            self._note(name, args, result)
        finally:  # also where the operation itself was refused
            if fault.kind == "crash_after":
                self._die(42)
            if fault.kind == "power_cut":
                self._disk.cut(fault.detail)
                self._die(43)
        return result

    def _die(self, code: int) -> None:
        if not self.fault.mock:
            os._exit(code)
        self._dead = True
        raise Crash

    def _note(self, name: str, args: tuple, result: Any) -> None:
        if name in ("create", "open"):
            self.open_files += 1
            self.most_open = max(self.most_open, self.open_files)
        elif name == "close":
            self.open_files -= 1
        elif name == "write_at":
            self.bytes_written += result
        elif name == "read_at":
            base = os.path.basename(args[0].path)
            self.bytes_read[base] = self.bytes_read.get(base, 0) + result
        if self._disk is not None:
            self._disk.note(name, args)


def _path_of(first: Any) -> str:
    return first.path if isinstance(first, File) else first


def _method(name: str) -> Callable[..., Any]:
    original = getattr(FileSystem, name)

    def method(self: FaultyFileSystem, *args: Any) -> Any:
        return self._run(name, _path_of(args[0]), lambda *a: original(self, *a), *args)

    return method


for _name in OPERATIONS:
    setattr(FaultyFileSystem, _name, _method(_name))


class Disk:
    """What a power cut may take: bytes written since a file's last flush, names changed since their directory's."""

    def __init__(self) -> None:
        self._safe_bytes: dict[str, int] = {}  # of files that were never flushed
        self._written: dict[str, list[tuple[int, int]]] = {}  # since the last flush
        self._names: list[list[str]] = []  # operations on names that are not flushed, in order, with today's paths

    def note(self, name: str, args: tuple) -> None:
        if name == "create":
            self._safe_bytes[args[0]] = 0
            self._names.append([name, args[0]])
        elif name == "write_at":
            self._written.setdefault(args[0].path, []).append((args[1], len(args[2])))
        elif name == "flush":
            self._safe_bytes.pop(args[0].path, None)
            self._written.pop(args[0].path, None)
        elif name in ("rename", "exchange"):
            moves = {args[0]: args[1]} if name == "rename" else {args[0]: args[1], args[1]: args[0]}
            for table in (self._safe_bytes, self._written):
                moved = {_moved(path, moves): value for path, value in table.items()}
                table.clear()
                table.update(moved)
            for entry in self._names:
                entry[1:] = [_moved(path, moves) for path in entry[1:]]
            self._names.append([name, *args])
        elif name == "make_directory":
            self._names.append([name, args[0]])
        elif name == "flush_directory":
            self._names = [entry for entry in self._names if os.path.dirname(entry[1]) != args[0]]

    def cut(self, seed: int) -> None:
        """Take back what was not flushed: all of it (seed 0), the bytes alone (1), or by chance.

        In each directory the changes of names since its flush are undone from the last one back to some point.
        """
        chance = random.Random(seed)
        for path, places in self._written.items():
            if not os.path.exists(path):
                continue
            data = bytearray(Path(path).read_bytes())
            if path in self._safe_bytes and chance.random() < 0.5:
                data = data[: self._safe_bytes[path]]
            else:
                for offset, count in places:
                    data[offset : offset + count] = bytes(len(data[offset : offset + count]))
            Path(path).write_bytes(data)
        folders = dict.fromkeys(os.path.dirname(entry[1]) for entry in self._names)
        undone = []
        for folder in folders:
            entries = [entry for entry in self._names if os.path.dirname(entry[1]) == folder]
            count = len(entries) if seed == 0 else 0 if seed == 1 else chance.randint(0, len(entries))
            undone += entries[len(entries) - count :]
        undone.sort(key=lambda entry: (entry[0] == "create", self._names.index(entry)))
        for entry in reversed(undone):  # files first: their paths are those of today
            self._undo(*entry)

    def _undo(self, name: str, path: str, other: str = "") -> None:
        fs = FileSystem()
        try:
            if name == "create":
                fs.remove(path)
            elif name == "make_directory":
                for child in fs.list(path):
                    fs.remove(os.path.join(path, child))
                fs.remove_directory(path)
            elif name == "rename":
                fs.rename(other, path)
            elif name == "exchange":
                fs.exchange(path, other)
        except OSError as problem:
            if problem.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EISDIR, errno.EPERM):
                raise


def _moved(path: str, moves: dict[str, str]) -> str:
    for old, new in moves.items():
        if path.startswith(old + "/"):
            return new + path[len(old) :]
    return path
