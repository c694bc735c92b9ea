"""CRC-32 of chunks of memory: by libdeflate where the system has it, else by zlib. The values are the same.

zlib takes about as long as a copy into the page cache, and where ranks have one core each a save pays for both.
libdeflate uses the processor's carry-less multiplication and takes about a third of that.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

__all__ = ["crc32_of_chunks"]

_NAMES = ("libdeflate.so.0", "libdeflate.so", "libdeflate.0.dylib")
_PROBE = bytes(range(256)) * 97  # longer than a chunk, and of no round size for the last piece


def crc32_of_chunks(view: memoryview, chunk_bytes: int) -> list[int]:
    """CRC-32 of each ``chunk_bytes`` of ``view``; the last chunk may be shorter."""
    if _fast is None or view.readonly or not len(view):
        return _by_zlib(view, chunk_bytes)
    return _by_libdeflate(_fast, view, chunk_bytes)


def _by_zlib(view: memoryview, chunk_bytes: int) -> list[int]:
    return [zlib.crc32(view[start : start + chunk_bytes]) for start in range(0, len(view), chunk_bytes)]


def _by_libdeflate(crc32: Any, view: memoryview, chunk_bytes: int) -> list[int]:
    count = len(view)
    memory = ctypes.c_char.from_buffer(view)  # holds the memory while it is looked at
    address = ctypes.addressof(memory)
    return [crc32(0, address + start, min(chunk_bytes, count - start)) for start in range(0, count, chunk_bytes)]


def _find() -> Any:
    """libdeflate's function, if it is here and agrees with zlib."""
    for name in _NAMES:
        try:
            function = ctypes.CDLL(name).libdeflate_crc32
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_uint32
        function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
        probe = memoryview(bytearray(_PROBE))
        if _by_libdeflate(function, probe, 24 * 1024) == _by_zlib(probe, 24 * 1024):
            return function
    return None


_fast = _find()
