"""Rebuilding full tensors from the ranks' slices, without the library's own gather.

The slices of a parameter, concatenated in the order of the ranks of a shard group, are the flat parameter; padding
is never in a slice. How many replicas there are follows from the sizes: the slices of all ranks hold the parameter R
times.
"""

from __future__ import annotations

import io
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


def all_gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order (torch's own version needs numpy)."""
    if here.world_size == 1:
        return [value]
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(here.world_size)]
    _all_gather(sizes, torch.tensor([payload.numel()]), group=here.harness_group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    parts = [torch.empty_like(padded) for _ in sizes]
    _all_gather(parts, padded, group=here.harness_group)
    return [
        pickle.load(io.BytesIO(bytes(part[: int(size)].tolist()))) for part, size in zip(parts, sizes, strict=True)
    ]


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The original shape; a parameter the library leaves alone has its own."""
    return torch.Size(getattr(parameter, "full_shape", parameter.shape))


def gather_slices(model: nn.Module, slice_of: Callable[[str, nn.Parameter], Tensor | None]) -> dict[str, Any]:
    """Full tensors from one local tensor per parameter (or None), by name.

    Asserts that replicas hold equal bits, and that None is None on every rank that owns elements.
    """
    local = {}
    shapes = {}
    for name, parameter in model.named_parameters():
        value = slice_of(name, parameter)
        local[name] = None if value is None else plain(value).cpu()
        shapes[name] = full_shape(parameter)
    by_rank = all_gather_objects(local)
    assert all(list(part) == list(local) for part in by_rank), "ranks name other parameters"
    owned = all_gather_objects({name: p.numel() for name, p in model.named_parameters()})
    return {
        name: _assemble(name, [part[name] for part in by_rank], [part[name] for part in owned], shapes[name])
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
