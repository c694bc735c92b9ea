"""Operators on fake tensors that were seen before: what they return is made again from what is known of it.

The blocks of a model run the same operators on tensors of the same shapes. What an operator of ATen returns on fake
tensors depends on the metadata of its arguments and on nothing else, so the second time neither a kernel is asked nor a
formula. ``FakeTensorMode`` has such a cache too; it serves many more cases, and its keys cost most of a plan's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..structure import tensors_in
from .live_bytes import LiveBytes

__all__ = ["RepeatedWork"]

_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
# What they do is not in the metadata of what they are given.
_NEVER = frozenset((torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_))


@dataclass(frozen=True)
class _Made:
    """A tensor that an operator returns.

    Attributes:
        position: Of the argument that it is, or whose storage it shares; None: a storage of its own.
        is_same: It is that argument.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    position: int | None
    is_same: bool


@dataclass(frozen=True)
class _Work:
    """What an operator returns, alone or in a tuple or list, and what it costs."""

    made: tuple[_Made, ...]
    container: type | None
    flops: int
    traffic: int
    operators: int


class RepeatedWork(LiveBytes):
    """:class:`LiveBytes` for the fake tensors of a mode.

    Answers some questions itself: where a fake tensor lies, which is asked all the time, and whether two states of random
    generators are equal, which are real bytes (let them be).
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._known: dict[Any, _Work | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is torch.ops.aten.equal.default and args[0].dtype == torch.uint8:
            return True
        kwargs = kwargs or {}
        key = _key(func, args, kwargs)
        work = self._known.get(key) if key is not None else None
        if work is None:
            before = self.flops, self.traffic, self.operators
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if key is not None and key not in self._known:
                cost = [now - then for now, then in zip((self.flops, self.traffic, self.operators), before)]
                is_plain = key == _key(func, args, kwargs)  # it has not changed what it was given
                self._known[key] = self._learn(result, args, kwargs, cost) if is_plain else None
            return result
        self.flops += work.flops
        self.traffic += work.traffic
        self.operators += work.operators
        results = [self._make(made, args) for made in work.made]
        for result in results:
            self._see(result)
        self.peak = max(self.peak, self.live)
        return results[0] if work.container is None else work.container(results)

    def _learn(self, result: Any, args: tuple, kwargs: dict, cost: list[int]) -> _Work | None:
        """What is needed to return the like again; None if that would not be the like."""
        container = type(result) if isinstance(result, (tuple, list)) else None
        results = list(result) if container else [result]
        if container not in (None, tuple, list) or not all(_description(value) for value in results):
            return None
        positions = {_storage_of(arg): position for position, arg in enumerate(args) if type(arg) is FakeTensor}
        deeper = {_storage_of(tensor) for tensor in tensors_in((args, kwargs))} - positions.keys()
        own = [storage for value in results if (storage := _storage_of(value)) not in positions]
        if deeper.intersection(own) or len(set(own)) < len(own):
            return None
        found = []
        for value in results:
            same = [position for position, arg in enumerate(args) if arg is value]
            position = same[0] if same else positions.get(_storage_of(value))
            made = _Made(*_description(value), position, bool(same))
            if not same and not _are_alike(self._make(made, args), value):
                return None
            found.append(made)
        return _Work(tuple(found), container, *cost)

    def _make(self, made: _Made, args: tuple) -> Tensor:
        if made.is_same:
            return args[made.position]
        with torch._C._DisableTorchDispatch():
            element = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if made.position is not None:
                element.set_(args[made.position].untyped_storage(), made.offset, made.shape, made.stride)
        return FakeTensor(self._mode, element, made.device)


def _key(func: Any, args: tuple, kwargs: dict) -> Any:
    """All that the results depend on; None if that cannot be told."""
    if func.namespace != "aten" or func._overloadpacket in _NEVER or torch.is_inference_mode_enabled():
        return None
    given = _plain(args)
    named = _plain(tuple(kwargs.items())) if kwargs else ()
    if given is None or named is None:
        return None
    return func, given, named, torch.get_default_dtype()


def _plain(values: Any) -> tuple | None:
    """Descriptions of arguments; None if one has none."""
    found = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            described = _description(value)
        elif kind in _ATOMS:
            described = kind, value  # 1, 1.0 and True are equal
        else:
            described = _plain(value) if kind is list or kind is tuple else None
        if described is None:
            return None
        found.append(described)
    return tuple(found)


def _description(value: Any) -> tuple | None:
    """The metadata of a tensor, where that is all there is to it."""
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
        return None
    if value.is_neg() or value.is_conj():
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _are_alike(made: Tensor, value: Tensor) -> bool:
    """Whether a tensor made from a description is what was described."""
    one, other = (
        (_description(t), t.untyped_storage().nbytes(), t.requires_grad, torch._C._dispatch_key_set(t))
        for t in (made, value)
    )
    return one == other
