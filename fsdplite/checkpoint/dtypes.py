"""Element types by their safetensors names. No torch."""

from __future__ import annotations

__all__ = ["ITEMSIZE", "is_float", "widens"]

ITEMSIZE = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

_FLOATS = {  # bits of exponent and mantissa
    "F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7), "F8_E4M3": (4, 3), "F8_E5M2": (5, 2),
    "F8_E8M0": (8, 0),
}  # fmt: skip
_INTEGERS = {  # whether signed, bits of magnitude
    "I64": (True, 63), "U64": (False, 64), "I32": (True, 31), "U32": (False, 32), "I16": (True, 15),
    "U16": (False, 16), "I8": (True, 7), "U8": (False, 8),
}  # fmt: skip


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS


def widens(stored: str, wanted: str) -> bool | None:
    """How ``stored`` values fit ``wanted``: True exactly, False by rounding, None not at all.

    Only floats become other floats and only integers become wider integers.
    """
    if stored == wanted:
        return True
    if stored in _FLOATS and wanted in _FLOATS:
        return all(w >= s for s, w in zip(_FLOATS[stored], _FLOATS[wanted]))
    if stored in _INTEGERS and wanted in _INTEGERS:
        (stored_signed, stored_bits), (signed, bits) = _INTEGERS[stored], _INTEGERS[wanted]
        return True if bits >= stored_bits and (signed or not stored_signed) else None
    return None
