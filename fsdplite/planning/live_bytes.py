"""Counting what operators make: live bytes at every one of them, and how much work they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["LiveBytes"]

_aten = torch.ops.aten
# torch has a formula for the fused attention of a GPU, and the CPU's takes the same tensors first.
_FORMULAS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators under this mode have made and that are still alive.

    A storage counts from the operator that returns it until it is freed, at the size that it had then. Works for real,
    fake and meta tensors alike, and costs nothing per storage that merely lives.

    Attributes:
        live: Bytes alive now.
        peak: Most bytes alive since :meth:`take`.
        flops: Floating point operations since :meth:`take` (of the operators that torch has a formula for).
        traffic: Bytes read and written by operators since :meth:`take`; views move nothing.
        operators: How many operators, views aside, have run since :meth:`take`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = self.traffic = self.operators = 0
        self._sizes: dict[int, int] = {}
        self._kinds: dict[Any, tuple[Any, bool, list[int]]] = {}

    def exclude(self, tensor: Tensor) -> None:
        """Never count this tensor's storage. The caller keeps it alive."""
        self._sizes[tensor.untyped_storage()._cdata] = 0

    def take(self) -> tuple[int, int, int, int]:
        """Peak, flops, traffic and operators since the last call, which start again from here."""
        taken = self.peak, self.flops, self.traffic, self.operators
        self.peak, self.flops, self.traffic, self.operators = self.live, 0, 0, 0
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result  # questions about a fake tensor
        formula, moves, written = self._kind(func)
        self.operators += moves
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        for tensor in _tensors(result):
            self._see(tensor)
            if moves:
                self.traffic += tensor.numel() * tensor.element_size()
        if moves:
            self.traffic += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args))
            for position in written:
                self.traffic += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args[position]))
        if self.live > self.peak:
            self.peak = self.live
        return result

    def _kind(self, func: Any) -> tuple[Any, bool, list[int]]:
        """An operator's formula for flops, whether it moves data (views do not), and positional arguments that it writes
        and does not return.
        """
        kind = self._kinds.get(func)
        if kind is None:
            aliases = [value.alias_info for value in func._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            given = [] if aliases else [value.alias_info for value in func._schema.arguments if not value.kwarg_only]
            written = [index for index, alias in enumerate(given) if alias is not None and alias.is_write]
            kind = self._kinds[func] = (_FORMULAS.get(func._overloadpacket), not is_view, written)
        return kind

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            size = self._sizes[key] = storage.nbytes()
            self.live += size
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Those with a storage: what a sparse tensor is made of was seen when it was made."""
    if isinstance(values, Tensor):
        if values.layout is torch.strided:
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
