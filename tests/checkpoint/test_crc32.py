"""Checksums of chunks are zlib's, by whichever library computes them."""

from __future__ import annotations

import random
import zlib

import pytest

from fsdplite.checkpoint import crc32


@pytest.mark.parametrize("library", ["the system's fastest", "zlib"])
def test_chunks_have_the_checksums_of_zlib(library, monkeypatch):
    if library == "zlib":
        monkeypatch.setattr(crc32, "_fast", None)
    data = random.Random(0).randbytes(5000)
    for start in (0, 1, 7):
        for count in (0, 1, 15, 16, 63, 64, 65, 999, 1000, 1001, 4096, 4993):
            piece = data[start : start + count]
            expected = [zlib.crc32(piece[i : i + 1000]) for i in range(0, len(piece), 1000)]
            whole = memoryview(bytearray(data))
            assert crc32.crc32_of_chunks(whole[start : start + count], 1000) == expected  # at any address
            assert crc32.crc32_of_chunks(memoryview(piece), 1000) == expected  # read-only memory


def test_a_library_that_disagrees_is_not_used(monkeypatch):
    class Library:
        def __init__(self, name):
            self.libdeflate_crc32 = lambda crc, address, count: 1

    monkeypatch.setattr(crc32.ctypes, "CDLL", Library)
    assert crc32._find() is None


def test_a_system_without_the_library_uses_zlib(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(crc32.ctypes, "CDLL", absent)
    assert crc32._find() is None
