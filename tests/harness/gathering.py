"""Rebuilding full tensors from the ranks' slices, without the library's own gather.

The slices of a parameter, concatenated in the order of the ranks of a shard group, are the flat parameter; padding
is never in a slice. How many replicas there are follows from the sizes: the slices of all ranks hold the parameter R
times.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.worker import here

# Bound at import: `Counts` patches the attributes of torch.distributed and must not see the harness.
_all_gather = dist.all_gather


def plain(tensor: Tensor) -> Tensor:
    """A copy of the local values as an ordinary tensor, whatever class the library gave the original."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().as_subclass(torch.Tensor).clone()


_FRAME_BYTES = 8192  # most messages fit into one exchange of this size


def all_gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order (torch's own version needs numpy)."""
    return [pickle.loads(message) for message in _all_gather_bytes(pickle.dumps(value))]


def _all_gather_bytes(message: bytes) -> list[bytes]:
    if here.world_size == 1:
        return [message]
    frames = _exchange(len(message).to_bytes(8, "little") + message[: _FRAME_BYTES - 8], _FRAME_BYTES)
    sizes = [int.from_bytes(frame[:8], "little") for frame in frames]
    if max(sizes) > _FRAME_BYTES - 8:  # known to all ranks alike
        return [whole[:size] for whole, size in zip(_exchange(message, max(sizes)), sizes, strict=True)]
    return [frame[8 : 8 + size] for frame, size in zip(frames, sizes, strict=True)]


def _exchange(message: bytes, size: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    parts = [torch.empty(size, dtype=torch.uint8) for _ in range(here.world_size)]
    _all_gather(parts, mine, group=here.harness_group)
    return [ctypes.string_at(part.data_ptr(), size) for part in parts]


def _all_gather_tensors(tensors: dict[str, Tensor | None], notes: Any) -> list[tuple[dict[str, Tensor | None], Any]]:
    """Every rank's tensors (as one vector of bytes: pickling many small ones is slow) and notes, in rank order."""
    header = [(name, None) if t is None else (name, (t.dtype, t.shape)) for name, t in tensors.items()]
    vectors = [t.reshape(-1).view(torch.uint8) for t in tensors.values() if t is not None]
    data = torch.cat(vectors) if vectors else torch.empty(0, dtype=torch.uint8)
    raw = ctypes.string_at(data.data_ptr(), data.numel()) if data.numel() else b""
    gathered = []
    for their_header, their_notes, their_raw in all_gather_objects((header, notes, raw)):
        found: dict[str, Tensor | None] = {}
        start = 0
        for name, form in their_header:
            if form is None:
                found[name] = None
                continue
            dtype, shape = form
            stop = start + shape.numel() * dtype.itemsize
            flat = torch.frombuffer(bytearray(their_raw[start:stop]), dtype=dtype) if stop > start else None
            found[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.reshape(shape)
            start = stop
        gathered.append((found, their_notes))
    return gathered


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The original shape; a parameter the library leaves alone has its own."""
    return torch.Size(getattr(parameter, "full_shape", parameter.shape))


def gather_slices(model: nn.Module, slice_of: Callable[[str, nn.Parameter], Tensor | None]) -> dict[str, Any]:
    """Full tensors from one local tensor per parameter (or None), by name.

    Asserts that replicas hold equal bits, and that None is None on every rank that owns elements.
    """
    parameters = dict(model.named_parameters())
    local = {}
    for name, parameter in parameters.items():
        value = slice_of(name, parameter)
        local[name] = None if value is None else plain(value).cpu()
    by_rank = _all_gather_tensors(local, {name: p.numel() for name, p in parameters.items()})
    assert all(list(part) == list(local) for part, _ in by_rank), "ranks name other parameters"
    return {
        name: _assemble(
            name,
            [part[name] for part, _ in by_rank],
            [owned[name] for _, owned in by_rank],
            full_shape(parameters[name]),
        )
        for name in local
    }


def _assemble(name: str, parts: list[Tensor | None], owned: list[int], shape: torch.Size) -> Tensor | None:
    present = [part is not None for part, numel in zip(parts, owned, strict=True) if numel]
    if not any(part is not None for part in parts):
        return None
    assert all(present), f"{name}: None on some ranks only: {[part is None for part in parts]}"
    known = next(part for part in parts if part is not None)
    numel = shape.numel()
    if numel == 0:
        return known.new_empty(shape)
    tensors = [known.new_empty(0) if part is None else part.reshape(-1) for part in parts]
    total = sum(tensor.numel() for tensor in tensors)
    assert [t.numel() for t in tensors] == owned, f"{name}: sizes differ from the parameter's slices: {owned}"
    assert total % numel == 0 and total, f"{name}: slices hold {total} elements in all, the parameter has {numel}"
    replicas = total // numel
    assert len(parts) % replicas == 0, f"{name}: {replicas} replicas over {len(parts)} ranks"
    shards = len(parts) // replicas
    copies = [torch.cat(tensors[start : start + shards]) for start in range(0, len(parts), shards)]
    for copy in copies:
        assert copy.numel() == numel, f"{name}: a replica holds {copy.numel()} elements, the parameter has {numel}"
        assert _same_bits(copy, copies[0]), f"{name}: replicas differ"
    return copies[0].reshape(shape)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def gather(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters by original name. Every rank must call it."""
    return gather_slices(model, lambda _, parameter: parameter)


def gather_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Full gradients by original name, None where there is none. Every rank must call it."""
    return gather_slices(model, lambda _, parameter: parameter.grad)


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, Tensor | None]:
    """One entry of the optimizer's state (`"exp_avg"`), full, by parameter name; None where there is no entry."""
    return gather_slices(model, lambda _, parameter: optimizer.state.get(parameter, {}).get(key))
