"""The only code that touches a checkpoint's files: few, plain operations, each of which a test can fail.

Every operation is a method of :class:`FileSystem`. :func:`current` is what the package uses at the moment, and
:func:`using` puts another object in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["File", "FileSystem", "current", "is_url", "read_all", "read_exactly", "using", "write_all", "write_exactly"]


@dataclass(eq=False)
class File:
    """An open file."""

    path: str
    descriptor: int


class FileSystem:
    """POSIX files. Errors are ``OSError`` with ``errno`` and ``filename`` set.

    Attributes:
        is_remote: Files are written from their start to their end and appear when closed; directories cannot be
            renamed.
    """

    is_remote = False

    def make_directory(self, path: str) -> None:
        """Create one directory; an existing one is an error."""
        os.mkdir(path)

    def create(self, path: str) -> File:
        """Create a file for writing; an existing one is an error, so nothing that is published is ever written to."""
        return File(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666))

    def open(self, path: str) -> File:
        """Open a file for reading. A pipe put in a file's place is not waited for: reading it is an error."""
        return File(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)))

    def write_at(self, file: File, offset: int, data: Any) -> int:
        """Write some or all of ``data``; returns how many bytes."""
        with _named(file.path):
            count = os.pwrite(file.descriptor, data, offset)
        if count >= _EARLY_BYTES:
            _start_writing_back(file.descriptor, offset, count)
        return count

    def read_at(self, file: File, offset: int, into: memoryview) -> int:
        """Read at most ``len(into)`` bytes; returns how many, 0 at the end of the file."""
        with _named(file.path):
            return os.preadv(file.descriptor, [into], offset)

    def flush(self, file: File) -> None:
        """Make a file's bytes durable."""
        with _named(file.path):
            if sys.platform == "darwin":  # fsync there stops at the drive's own cache
                import fcntl

                fcntl.fcntl(file.descriptor, fcntl.F_FULLFSYNC)
            else:
                os.fsync(file.descriptor)

    def close(self, file: File) -> None:
        with _named(file.path):
            os.close(file.descriptor)

    def flush_directory(self, path: str) -> None:
        """Make the names in a directory durable, where the file system knows how to do that."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with _named(path):
                os.fsync(descriptor)
        except OSError as problem:
            if problem.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise  # those are what file systems say that write names through, or leave them to a server
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> None:
        """Swap two names in one step. ``OSError`` with ENOSYS where the system or the file system cannot."""
        _exchange(one, other)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def list(self, path: str) -> list[str]:
        """Names in a directory, in order."""
        return sorted(os.listdir(path))

    def size(self, path: str) -> int:
        """Size of a file in bytes."""
        return os.stat(path).st_size

    def is_link(self, path: str) -> bool:
        """Whether a name is a symbolic link, so that what is in it belongs elsewhere."""
        return os.path.islink(path)

    def is_directory(self, path: str) -> bool:
        """Whether a name is a directory, and not a link to one."""
        return os.path.isdir(path) and not os.path.islink(path)

    @contextlib.contextmanager
    def held(self, path: str) -> Iterator[bool]:
        """Hold a directory while inside; False, and nothing held, while a process that lives holds it.

        The system lets go when the process ends, however it ends. Where it has no such locks every answer is True.
        """
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            yield _lock(descriptor)
        finally:
            os.close(descriptor)

    def modified_s(self, path: str) -> float:
        """When a file, or the names in a directory, last changed: seconds since 1970."""
        return os.stat(path).st_mtime


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Calls on descriptors raise errors without a name."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            problem.filename = path
        raise


def _lock(descriptor: int) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError as problem:
        return problem.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    return True


_EARLY_BYTES = 2**20
_LARGEST_BYTES = 2**30  # read whole: a thousand ranks times a thousand tensors take some tens of MiB
_SYNC_FILE_RANGE_WRITE = 2


def _start_writing_back(descriptor: int, offset: int, count: int) -> None:
    """Let the disk begin with these bytes, so that the flush at the end finds most of its work done. Only a hint."""
    if sys.platform.startswith("linux") and hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(
            descriptor, ctypes.c_int64(offset), ctypes.c_int64(count), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )


_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux
_RENAME_SWAP = 2  # macOS


def _exchange(one: str, other: str) -> None:
    old, new = os.fsencode(one), os.fsencode(other)
    if sys.platform.startswith("linux") and hasattr(_libc, "renameat2"):
        failed = _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE)
    elif sys.platform == "darwin" and hasattr(_libc, "renamex_np"):
        failed = _libc.renamex_np(old, new, _RENAME_SWAP)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), one)
    if failed:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):  # this file system has no exchange
            code = errno.ENOSYS
        raise OSError(code, os.strerror(code), one, None, other)


_current = FileSystem()


def current() -> FileSystem:
    """The object through which checkpoints reach directories at the moment."""
    return _current


def is_url(path: str) -> bool:
    return "://" in path


@contextlib.contextmanager
def using(replacement: FileSystem) -> Iterator[FileSystem]:
    """Use another object for directories inside the block. A background save keeps the one it started with."""
    global _current
    before, _current = _current, replacement
    try:
        yield replacement
    finally:
        _current = before


def write_exactly(fs: FileSystem, file: File, offset: int, data: memoryview) -> None:
    """Write all of ``data``, at the end of a growing file or into room left at its start, through short writes.

    The size is looked at after each piece: a write that stored less than it said would leave a hole of zeros, which
    the next piece would hide.
    """
    done = 0
    while done < len(data):
        count = fs.write_at(file, offset + done, data[done:])
        if count <= 0:
            raise OSError(errno.EIO, "a write stored nothing", file.path)
        done += count
    if len(data) and not fs.is_remote and fs.size(file.path) < offset + len(data):
        raise OSError(errno.EIO, "a write stored less than it said", file.path)


def write_all(fs: FileSystem, path: str, data: bytes) -> None:
    """A whole new small file, durable."""
    file = fs.create(path)
    try:
        write_exactly(fs, file, 0, memoryview(data))
        fs.flush(file)
    finally:
        fs.close(file)


def read_exactly(fs: FileSystem, file: File, offset: int, into: memoryview) -> None:
    """Fill ``into``, through short reads."""
    done = 0
    while done < len(into):
        count = fs.read_at(file, offset + done, into[done:])
        if count <= 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}", file.path)
        done += count


def read_all(fs: FileSystem, path: str) -> bytes:
    """A whole small file. ``OSError`` with EFBIG where it is larger than a manifest or an index ever is."""
    size_bytes = fs.size(path)
    if size_bytes > _LARGEST_BYTES:
        raise OSError(errno.EFBIG, f"a file of {size_bytes} bytes, which is not read whole", path)
    buffer = bytearray(size_bytes)
    file = fs.open(path)
    try:
        read_exactly(fs, file, 0, memoryview(buffer))
    finally:
        fs.close(file)
    return bytes(buffer)
