"""READER: an oracle that knows only `json` and `safetensors`, and shares no code with the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def manifest_of(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "manifest.json").read_text())


def read(folder: Path | str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole. Its ranges must tile it once, and no file may hold anything else."""
    folder, manifest = Path(folder), manifest_of(folder)
    files = [safe_open(str(folder / record["name"]), "pt") for record in manifest["files"]]
    unread = [set(file.keys()) for file in files]
    tensors = {}
    for name, record in manifest["tensors"].items():
        parts, end = [], 0
        for file, first, count in sorted(record["ranges"], key=lambda part: part[1]):
            assert first == end and count > 0, f"{name}: {record['ranges']}"
            part = files[file].get_tensor(name)
            unread[file].remove(name)
            assert part.shape == (count,) and part.dtype == DTYPES[record["dtype"]], f"{name} in file {file}"
            parts.append(part)
            end += count
        assert end == record["numel"], f"{name}: {end} of {record['numel']} elements"
        whole = torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[record["dtype"]])
        tensors[name] = whole.reshape(record["shape"])
    assert not any(unread), f"tensors in files that the manifest does not list: {unread}"
    return tensors


def stored_bytes(folder: Path | str, prefix: str = "") -> int:
    """Bytes of tensor data over all files, of names that begin with `prefix`."""
    total = 0
    for path in Path(folder).glob("rank-*.safetensors"):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        total += sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__" and name.startswith(prefix)
        )
    return total
