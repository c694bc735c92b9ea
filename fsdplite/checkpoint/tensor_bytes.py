"""The bytes of tensors without copies, and torch's dtypes by their safetensors names."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from ..errors import CheckpointError
from ..local_slice import engine_access

__all__ = ["bytes_of", "dtype_name", "flat_view", "host_blocks", "host_empty", "odd_kind", "torch_dtype"]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):
    _NAMES[torch.float8_e8m0fnu] = "F8_E8M0"
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """The safetensors name of a dtype; ``tensor_name`` is for the error."""
    if dtype not in _NAMES:
        raise CheckpointError(
            f"'{tensor_name}' has a dtype that safetensors files cannot hold", found=dtype, parameter=tensor_name
        )
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise CheckpointError(f"this torch has no dtype for {name}")
    return _DTYPES[name]


def odd_kind(tensor: torch.Tensor) -> str | None:
    """What a tensor is instead of values side by side that anybody can read; None for an ordinary one."""
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter without a shape yet"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, which keeps its values in a way of its own"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a nested tensor" if tensor.is_nested else f"a {tensor.layout} tensor"
    return None


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of any tensor, of ours or the user's, in one plain dimension and side by side in memory.

    Copied only if not contiguous, or if its memory holds other values than it has (views by ``conj()``).
    """
    with engine_access(), torch.no_grad():
        return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().reshape(-1).contiguous()


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """One dimension in host memory, whatever ``torch.set_default_device`` says."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous host tensor's memory. The caller keeps the tensor alive."""
    if not tensor.is_cpu:
        raise TypeError(f"bytes of a tensor on {tensor.device}")  # reading them would end the process
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def host_blocks(tensor: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
    """A one-dimensional tensor's bytes, block by block. From a device they pass through one block of host memory."""
    if tensor.device.type == "cpu":
        view = bytes_of(tensor)
        for start in range(0, len(view), block_bytes):
            yield view[start : start + block_bytes]
        return
    numel = block_bytes // tensor.element_size()
    staging = host_empty(min(numel, tensor.numel()), tensor.dtype)
    for start in range(0, tensor.numel(), numel):
        part = tensor[start : start + numel]
        block = staging[: part.numel()]
        block.copy_(part)
        yield bytes_of(block)
