"""Live tensor bytes and collectives, counted at every operator, in a pass of its own.

Profilers miss what the threads of the communication library free, and allocators do not tell bytes in use from bytes
cached. A dispatch mode sees every operator, on whichever storage: the bytes alive are those of all storages that any
operator has touched and that still exist, each at its present size (engines resize storages in place).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operator name -> (kind, position of the argument whose elements count: the unsharded side).
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
}
_INTEGERS = (torch.uint8, torch.int32, torch.int64, torch.bool)


@dataclass
class StepCount:
    """What one step did on one rank.

    Attributes:
        peak_bytes: Most bytes alive at any operator.
        rest_bytes: Bytes alive after the step.
        calls: Number of collectives by kind; ``control`` are those of integers (checks, not data).
        collective_bytes: Bytes of the unsharded side of all data collectives.
        peak_by_phase: Most bytes alive in each phase.
    """

    peak_bytes: int = 0
    rest_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    collective_bytes: int = 0
    peak_by_phase: Counter[str] = field(default_factory=Counter)


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; everything that shall be counted must be built inside."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.excluded: Callable[[], int] = lambda: 0  # bytes that shall not count
        self.current = StepCount()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with its local tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count_collective(func, args)
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor):
                self._see(value)
        self.sample()
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = Tensor.untyped_storage(tensor)  # called on the base class: slices hide their storage
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def live_bytes(self) -> int:
        """Bytes of all storages seen that still exist."""
        total = 0
        gone = []
        for key, reference in self._storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                gone.append(key)
            else:
                total += storage.nbytes()
        for key in gone:
            del self._storages[key]
        return total

    def sample(self) -> None:
        """Compare the bytes alive now with the peaks."""
        live = self.live_bytes() - self.excluded()
        self.current.peak_bytes = max(self.current.peak_bytes, live)
        self.current.peak_by_phase[self.phase] = max(self.current.peak_by_phase[self.phase], live)

    def _count_collective(self, func: Any, args: Any) -> None:
        kind, position = _COLLECTIVES.get(func.__name__.partition(".")[0], (None, 0))
        if kind is None:
            return
        tensors = [value for value in tree_leaves(args[position]) if isinstance(value, Tensor)]
        if all(tensor.dtype in _INTEGERS for tensor in tensors):
            self.current.calls["control"] += 1
            return
        self.current.calls[kind] += 1
        self.current.collective_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @contextmanager
    def step(self) -> Iterator[StepCount]:
        """Count one step. What earlier ones left in reference cycles is not there any more."""
        gc.collect()
        self.current = count = StepCount()
        self.sample()
        yield count
        count.rest_bytes = self.live_bytes()
        self.current = StepCount()
