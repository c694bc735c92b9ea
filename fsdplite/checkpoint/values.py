"""Plain values and tensors as JSON: ``extra``, ``per_rank``, and the settings of parameter groups.

Tuples, dictionaries with keys other than text, numbers that JSON lacks, and tensors come back as what they were.
Subclasses of those (an OrderedDict, a Counter, a named tuple, an IntEnum) come back as what they are made of: a
dictionary, a tuple, a number. Anything else is refused, by the name of its key: nothing in a checkpoint may need code
to be read.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch

from ..errors import CheckpointError
from ..local_slice import LocalSlice, engine_access
from .manifest import MARKS
from .safetensors_file import build_header, lay_out, parse_header
from .tensor_bytes import bytes_of, dtype_name, flat_view, host_empty, odd_kind, torch_dtype

__all__ = ["decode_value", "digest", "encode_value", "pack", "scalar_json", "scalar_tensor", "unpack"]

_DEEPEST = 100  # what is nested deeper can be written in less of Python's stack than it takes to read it


def encode_value(value: Any, where: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """``value`` as JSON. Tensors in it are put into ``tensors`` under new names, which stand in the JSON instead.

    ``depth`` is the number of containers around it.
    """

    def inside(v: Any, place: str) -> Any:
        return encode_value(v, place, tensors, depth + 1)

    if isinstance(value, torch.Tensor):
        _check_tensor(value, where)
        name = str(len(tensors))
        tensors[name] = value
        return {"__tensor__": name}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return _checked_int(int(value), where)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"__float__": repr(float(value))}
    if depth == _DEEPEST and isinstance(value, (tuple, list, dict)):
        raise _refused(f"containers in each other, more than {_DEEPEST}", where)
    if isinstance(value, tuple):
        return {"__tuple__": [inside(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [inside(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in MARKS for key in value):
            return {key: inside(v, f"{where}[{key!r}]") for key, v in value.items()}
        pairs = [[inside(key, f"a key of {where}"), inside(v, f"{where}[{key!r}]")] for key, v in value.items()]
        return {"__dict__": pairs}
    raise _refused(type(value).__name__, where)


def _check_tensor(tensor: torch.Tensor, where: str) -> None:
    if isinstance(tensor, LocalSlice):
        raise CheckpointError(
            f"{where} is one rank's slice, and would be stored as if it were whole",
            found=f"a slice of '{tensor._fsdp_info.name}'",
            cure='save the module it belongs to: save_checkpoint(root, nn.ModuleDict({"model": model, "ema": ema}), ...)',
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(type(tensor).__name__, where)
    if kind := "a meta tensor" if tensor.is_meta else odd_kind(tensor):
        raise _refused(kind, where)
    dtype_name(tensor.dtype, where)


def _checked_int(value: int, where: str) -> int:
    try:
        str(value)  # Python limits how many digits become text, and text numbers
    except ValueError:
        raise _refused(f"an int of {value.bit_length()} bits", where) from None
    return value


def _refused(found: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} cannot be stored",
        expected="JSON values (None, bool, int, float, str, list, tuple, dict) and plain tensors",
        found=found,
        cure="store what it is made of: its state_dict(), numbers, or a list; a checkpoint holds no code",
    )


def decode_value(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Back from JSON. What :func:`encode_value` would not have written is an error that names its place."""
    if isinstance(value, list):
        return [decode_value(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (mark, content), *_ = value.items()
        if mark in MARKS:
            try:
                return _decode_marked(mark, content, tensors, where)
            except (TypeError, ValueError, KeyError):
                raise _malformed(where, f"{mark} of {repr(content)[:80]}") from None
    return {key: decode_value(v, tensors, f"{where}[{key!r}]") for key, v in value.items()}


def _decode_marked(mark: str, content: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if mark == "__tensor__":
        return tensors[content]
    if mark == "__float__":
        return float(content)
    if mark == "__tuple__":
        return tuple(decode_value(v, tensors, f"{where}[{i}]") for i, v in enumerate(content))
    pairs = [(decode_value(key, tensors, f"a key of {where}"), v) for key, v in content]
    return {key: decode_value(v, tensors, f"{where}[{key!r}]") for key, v in pairs}


def _malformed(where: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{where} cannot be read", expected="values as a save writes them", found=found, phase="compare",
        cure="load another step (fsdplite.list_checkpoints names them)",
    )  # fmt: skip


def digest(value: Any, tensors: dict[str, torch.Tensor]) -> str:
    """A hash of an encoded value and the tensors in it."""
    state = hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12)
    for name in sorted(_tensor_names(value)):
        tensor = flat_view(tensors[name]).cpu()
        state.update(f"{name} {tuple(tensors[name].shape)} {tensor.dtype}".encode())
        state.update(bytes_of(tensor))
    return state.hexdigest()


def _tensor_names(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for v in value for name in _tensor_names(v)}
    if isinstance(value, dict):
        if set(value) == {"__tensor__"}:
            return {value["__tensor__"]}
        return {name for v in value.values() for name in _tensor_names(v)}
    return set()


# ---------------------------------------------------------------------- tensors of one element, inside JSON


def scalar_json(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    """A tensor's dtype, shape and bits, for tensors of few elements."""
    with engine_access():
        shape = list(tensor.shape)
    flat = flat_view(tensor).cpu()
    return {"dtype": dtype_name(flat.dtype, where), "shape": shape, "bits": bytes_of(flat).hex()}


@torch.inference_mode(False)  # optimizers update theirs in place
def scalar_tensor(entry: dict[str, Any], where: str) -> torch.Tensor:
    """Back from :func:`scalar_json`. An ordinary tensor, also in inference mode."""
    try:
        data = bytearray.fromhex(entry["bits"])
        dtype = torch_dtype(entry["dtype"])
        flat = host_empty(len(data) // dtype.itemsize, dtype)
        bytes_of(flat)[:] = data
        return flat.reshape(entry["shape"])
    except (TypeError, ValueError, KeyError, RuntimeError):
        raise _malformed(where, repr(entry)[:80]) from None


# ---------------------------------------------------------------------- one rank's values as one block of bytes


def pack(value: Any, where: str) -> bytes:
    """A value as bytes: the length of its JSON, the JSON, and a small safetensors file of the tensors in it."""
    tensors: dict[str, torch.Tensor] = {}
    tree = encode_value(value, where, tensors)
    flats = {name: flat_view(tensor).cpu() for name, tensor in tensors.items()}
    specs = lay_out(
        (name, dtype_name(t.dtype, where), tuple(tensors[name].shape), t.numel()) for name, t in flats.items()
    )
    header = build_header(specs, chunked=False)
    text = json.dumps(tree, allow_nan=False).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, header, *(bytes_of(flats[spec.name]) for spec in specs)])


@torch.inference_mode(False)
def unpack(data: bytes, path: str, where: str) -> Any:
    """The value that :func:`pack` was given. Ordinary tensors, also in inference mode."""
    count = int.from_bytes(data[:8], "little")
    try:
        tree = json.loads(data[8 : 8 + count])
    except ValueError as problem:
        raise _malformed(where, repr(problem)) from None
    rest = data[8 + count :]
    header_bytes = 8 + int.from_bytes(rest[:8], "little")
    header = parse_header(rest[:header_bytes], len(rest), path)
    tensors = {}
    for spec in header.tensors.values():
        flat = host_empty(spec.numel, torch_dtype(spec.dtype))
        bytes_of(flat)[:] = rest[header_bytes + spec.begin : header_bytes + spec.end]
        tensors[spec.name] = flat.reshape(spec.shape)
    return decode_value(tree, tensors, where)
