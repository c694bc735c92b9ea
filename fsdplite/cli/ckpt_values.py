"""Values that a checkpoint keeps as JSON, in words, and those of one rank. No torch; tensors in them stay unread."""

from __future__ import annotations

import json
import os
from typing import Any

from ..checkpoint.manifest import Manifest
from ..checkpoint.reading import BUFFER_BYTES, RankFile, Request, refuse_damage
from ..checkpoint.safetensors_file import MAX_HEADER_BYTES, parse_header
from ..checkpoint.storage import FileSystem
from ..errors import CheckpointError
from .ckpt_numbers import floats
from .ckpt_output import shape_text

__all__ = ["per_rank_value", "readable", "scalar_text"]


def readable(value: Any, tensors: dict[str, str]) -> str:
    """A value as Python would write it; tensors in it by their descriptions."""
    if isinstance(value, list):
        return f"[{', '.join(readable(v, tensors) for v in value)}]"
    if not isinstance(value, dict):
        return repr(value)
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == "__tensor__" and isinstance(content, str):
            return tensors.get(content, "a tensor that is not there")
        if mark == "__float__" and isinstance(content, str):
            return content
        if mark == "__tuple__" and isinstance(content, list):
            inside = ", ".join(readable(v, tensors) for v in content)
            return f"({inside},)" if len(content) == 1 else f"({inside})"
        if mark == "__dict__" and isinstance(content, list) and all(_is_pair(pair) for pair in content):
            return f"{{{', '.join(f'{readable(k, tensors)}: {readable(v, tensors)}' for k, v in content)}}}"
    return f"{{{', '.join(f'{key!r}: {readable(v, tensors)}' for key, v in value.items())}}}"


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def scalar_text(entry: Any) -> str:
    """A scalar of an optimizer, or a tensor in its settings: ``{"value": ...}``, ``{"tensor": {...}}``."""
    if isinstance(entry, dict) and "value" in entry:
        return readable(entry["value"], {})
    tensor = entry.get("tensor", entry) if isinstance(entry, dict) else entry
    try:
        raw, dtype, shape = bytes.fromhex(tensor["bits"]), tensor["dtype"], tensor["shape"]
        values = floats(dtype, raw)
        if values is None:
            return f"{int.from_bytes(raw, 'little', signed=dtype.startswith('I'))}"
        return f"{values[0]:g}" if len(values) == 1 else f"tensor of {dtype}, {shape_text(shape)}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"not readable: {str(entry)[:60]}"


def per_rank_value(fs: FileSystem, folder: str, manifest: Manifest, name: str) -> dict[str, Any]:
    """What one rank saved for itself: its JSON, and dtype and shape of the tensors in it, which are not read."""
    record = manifest.tensors[name]
    if record.dtype != "U8" or len(record.ranges) != 1:
        raise CheckpointError(f"'{name}' is not the bytes of one rank's values", found=f"{record.dtype}")
    part = record.ranges[0]
    file = RankFile(fs, os.path.join(folder, manifest.files[part.file].name), manifest.files[part.file])
    try:
        file.expect(name, record.dtype, part.count)
        text = _sized(file, name, 0, part.count)
        value = json.loads(text[8:])
        header = parse_header(_sized(file, name, len(text), part.count), part.count - len(text), file.path)
    except ValueError as problem:
        raise CheckpointError(f"'{name}' is not readable", found=str(problem), phase="read", path=file.path) from None
    finally:
        file.close()
    tensors = {spec.name: {"dtype": spec.dtype, "shape": list(spec.shape)} for spec in header.tensors.values()}
    return {"value": value, "tensors": tensors}


def _sized(file: RankFile, name: str, low: int, end: int) -> bytes:
    """The 8 bytes at ``low``, and as many bytes after them as they say."""
    length = _bytes(file, name, low, 8, end)
    count = int.from_bytes(length, "little")
    if count > MAX_HEADER_BYTES:
        raise ValueError(f"{count} bytes of text")
    return length + _bytes(file, name, low + 8, count, end)


def _bytes(file: RankFile, name: str, low: int, count: int, end: int) -> bytes:
    if low + count > end:
        raise ValueError(f"bytes {low} to {low + count} of {end}")
    taken = bytearray(count)

    def take(offset: int, view: memoryview) -> None:
        taken[offset : offset + len(view)] = view

    file.read([Request(name, low, low + count, take)], memoryview(bytearray(BUFFER_BYTES)), refuse_damage)
    return bytes(taken)
