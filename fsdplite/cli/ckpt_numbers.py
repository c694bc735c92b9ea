"""Floating numbers out of bytes, and how far apart two blocks of them are. No torch, no numpy."""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from ..checkpoint.dtypes import ITEMSIZE

__all__ = ["Distance", "floats"]

_CHUNK_BYTES = 32 * 1024
_COMPONENTS = {"C64": 2}


def floats(dtype: str, raw: bytes) -> Sequence[float] | None:
    """The numbers in ``raw``; complex ones as pairs. None for a dtype that has no fractions."""
    if dtype in ("F64", "F32", "C64"):
        return _native("d" if dtype == "F64" else "f", raw)
    if dtype == "F16":
        return struct.unpack(f"<{len(raw) // 2}e", raw)
    if dtype == "BF16":  # the upper half of a float of 32 bits
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
        return _native("f", wide)
    if dtype in _TABLES:
        return [_TABLES[dtype][byte] for byte in raw]
    return None


def _native(code: str, raw: bytes | bytearray) -> array:
    values = array(code, bytes(raw))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_TABLES = {
    "F8_E4M3": [_e4m3(byte) for byte in range(256)],
    "F8_E5M2": [struct.unpack("<e", bytes([0, byte]))[0] for byte in range(256)],  # the upper half of an F16
    "F8_E8M0": [2.0 ** (byte - 127) for byte in range(255)] + [math.nan],
}


@dataclass
class Distance:
    """How far apart two tensors of one dtype are.

    Attributes:
        dtype: Of both.
        differing: Number of elements whose bits differ.
        first: The lowest of them.
        largest: Absolute difference of two finite numbers; None if the dtype has no fractions.
        not_finite: Number of differing numbers of which one is infinite or not a number.
    """

    dtype: str
    differing: int = 0
    first: int | None = None
    largest: float | None = None
    not_finite: int = 0

    def add(self, one: bytearray, other: bytearray, start: int) -> None:
        """Compare two blocks of bytes whose first element is number ``start``."""
        for low in range(0, len(one), _CHUNK_BYTES):
            a, b = bytes(one[low : low + _CHUNK_BYTES]), bytes(other[low : low + _CHUNK_BYTES])
            if a != b:
                self._add_chunk(a, b, start + low // ITEMSIZE[self.dtype])

    def _add_chunk(self, a: bytes, b: bytes, start: int) -> None:
        itemsize = ITEMSIZE[self.dtype]
        marks = _differing_elements(a, b, itemsize)
        self.differing += len(marks) - marks.count(0)
        if self.first is None:
            self.first = start + len(marks) - len(marks.lstrip(b"\0"))
        x, y = floats(self.dtype, a), floats(self.dtype, b)
        if x is None or y is None:
            return
        differences = list(map(abs, map(sub, x, y)))
        if not math.isfinite(sum(differences)):  # equal infinities differ by nan, and are equal
            size = itemsize // _COMPONENTS.get(self.dtype, 1)
            unequal = _differing_elements(a, b, size)
            differences = [d for d, mark in zip(differences, unequal) if mark]
            finite = [d for d in differences if math.isfinite(d)]
            self.not_finite += len(differences) - len(finite)
            differences = finite
        self.largest = max(self.largest or 0.0, max(differences, default=0.0))


def _differing_elements(a: bytes, b: bytes, itemsize: int) -> bytes:
    """One byte for each element, zero where its bits are equal. Long numbers, since loops over elements are slow."""
    bits = (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")
    folded = 0
    for place in range(itemsize):
        folded |= int.from_bytes(bits[place::itemsize], "little")
    return folded.to_bytes(len(a) // itemsize, "little")
