"""Live tensor bytes of a real step, counted at every operator. Shares no code with the planner's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Measured(TorchDispatchMode):
    """The bytes of all storages that any operator has touched and that still exist, each at its present size."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and value.layout is torch.strided:  # others lie in tensors that operators touch
                storage = Tensor.untyped_storage(value)
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, reference in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.storages[key]
            else:
                total += storage.nbytes()
        return total


def peak_of(step: Callable[[], None], warm_up: int = 3) -> int:
    """Most bytes alive at any operator of a step, after some that are like it."""
    with Measured() as measured:
        for _ in range(warm_up):
            step()
        measured.peak = 0
        step()
    return measured.peak
