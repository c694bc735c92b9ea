"""Checkpoints at an fsspec URL: ``s3://bucket/run``, ``gs://...``, ``memory://...``, whatever the user has installed.

Object stores have neither directories nor renames, so nothing can be published by one. There the manifest is the
commit: it is put last, as one object, and a step without it is not published. For the same reason a published step
cannot be exchanged for another, and saving it again is refused.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from ..errors import ConfigError
from .storage import File, FileSystem, current, is_url

__all__ = ["RemoteFile", "RemoteFileSystem", "file_system"]


def file_system(path: str) -> FileSystem:
    """What reaches a path: a directory, or an fsspec URL."""
    return RemoteFileSystem(path) if is_url(path) else current()


class RemoteFile(File):
    """An open remote file. Written from its start to its end; it appears when it is closed."""

    def __init__(self, path: str, handle: Any = None) -> None:
        super().__init__(path, -1)
        self.handle = handle
        self.position = 0


class RemoteFileSystem(FileSystem):
    """The operations of :class:`FileSystem` on an fsspec file system."""

    is_remote = True

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            self._fs = fsspec.filesystem(url.partition("://")[0])
        except (ImportError, ValueError) as problem:
            raise ConfigError(
                "this checkpoint root cannot be reached", found=f"{url}: {problem}",
                cure="install the fsspec package for this protocol, or use a directory",
            ) from None  # fmt: skip

    def make_directory(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def create(self, path: str) -> File:
        if self._fs.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return RemoteFile(path, self._fs.open(path, "wb"))

    def open(self, path: str) -> File:
        if not self._fs.isfile(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return RemoteFile(path)

    def write_at(self, file: Any, offset: int, data: Any) -> int:
        if offset != file.position:
            raise OSError(errno.ESPIPE, "a remote file is written from its start to its end", file.path)
        count = file.handle.write(bytes(data))
        file.position += count
        return count

    def read_at(self, file: Any, offset: int, into: memoryview) -> int:
        data = self._fs.cat_file(file.path, start=offset, end=offset + len(into))
        into[: len(data)] = data
        return len(data)

    def flush(self, file: Any) -> None:
        """Nothing: closing it makes the object durable."""

    def close(self, file: Any) -> None:
        if file.handle is not None:
            file.handle.close()

    def flush_directory(self, path: str) -> None:
        """Nothing: there are no directories."""

    def rename(self, old: str, new: str) -> None:
        raise OSError(errno.ENOSYS, "remote files cannot be renamed", old)

    def exchange(self, one: str, other: str) -> None:
        raise OSError(errno.ENOSYS, "remote files cannot be exchanged", one)

    def remove(self, path: str) -> None:
        self._fs.rm_file(path)

    def remove_directory(self, path: str) -> None:
        try:
            self._fs.rmdir(path)
        except OSError:
            pass  # where there are no directories it is gone with its last file

    def list(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        found = self._fs.ls(path, detail=True)
        if len(found) == 1 and found[0]["type"] == "file" and found[0]["name"] == self._fs._strip_protocol(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in found]
        return sorted(name for name in names if name)

    def size(self, path: str) -> int:
        self._fs.invalidate_cache()
        return self._fs.size(path)

    def is_link(self, path: str) -> bool:
        return False

    def modified_s(self, path: str) -> float:
        try:
            return self._fs.modified(path).timestamp()
        except NotImplementedError:
            raise OSError(errno.ENOSYS, "this file system does not say when files have changed", path) from None
