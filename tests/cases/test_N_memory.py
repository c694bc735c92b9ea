"""N and L2: how many bytes are alive while a model starts up, and while it runs."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsdplite as fsdp
from fsdplite import inspect
from tests.cases.test_N import Attentive, policy_of
from tests.harness import assert_close, assert_rested, for_each, here, plain, run, seeded, sgd

# ---- N1 and N4


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made under it that were alive at the end of an operation.

    Small integer tensors are messages between ranks; the transport's threads may hold one for a moment longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                if not tensor.is_floating_point() and tensor.numel() <= 4096:
                    continue
                storage = tensor.untyped_storage()
                self.refs.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, ref in list(self.refs.items()):
            if ref.expired():
                del self.refs[key]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            total += 0 if storage is None else storage.nbytes()
        return total


    def settled(self, expected: int) -> int:
        """What is alive when the transport's threads have let go of the last message."""
        deadline = time.monotonic() + 2
        while self.now() > expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.now()


class Tower(nn.Module):
    """Linear layers of one size, without bias; some of them may share their weight."""

    def __init__(self, n: int, width: int, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))
        if tied:
            self.layers[n - 1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def one_copy(n: int, width: int, tied: bool) -> None:
    oracle = seeded(Tower, n, width, tied)
    if here.rank == 0:
        model = copy.deepcopy(oracle)
    else:
        with torch.device("meta"):
            model = Tower(n, width, tied)
    unit_bytes = 4 * width * width
    shard_bytes = unit_bytes * (n - tied) // here.world_size
    with LiveBytes() as live:
        fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    if here.rank > 0:
        assert live.peak <= shard_bytes + unit_bytes, (live.peak, shard_bytes, unit_bytes)
        assert live.settled(shard_bytes) <= shard_bytes, (live.now(), shard_bytes)
    found = dict(model.named_parameters())
    for name, value in oracle.named_parameters():
        # One parameter a unit, of a size the ranks divide: rank r holds the r-th part.
        mine = value.detach().flatten().chunk(here.world_size)[here.rank]
        assert_close(plain(found[name]), mine, bitwise=True, what=name)
    assert (model.layers[n - 1].weight is model.layers[0].weight) == tied
    assert_rested(model)


def test_N4_one_copy_of_the_weights_at_start() -> None:
    run(2, for_each, [(4, 256, False), (4, 256, True), (6, 128, False)], one_copy)


def one_unit_at_a_time(sizes: tuple[int, ...], policy: str) -> None:
    """Built on meta: beside the shards at most one unit is full at any moment."""
    with torch.device("meta"):
        model = Attentive(*sizes)
    torch.manual_seed(0)
    with LiveBytes() as live:
        fsdp.fsdp_wrap(model, policy_of(policy))
    shards = full = 0
    for unit in inspect.units(model):
        shards += sum(4 * flat.padded_numel // here.world_size for flat in unit.flats)
        full = max(full, sum(4 * flat.padded_numel for flat in unit.flats))
    # What an initialiser draws before it writes is no unit: one more tensor of the largest size.
    largest = max(4 * parameter.full_shape.numel() for parameter in model.parameters())
    assert live.peak <= shards + full + largest, (live.peak, shards, full, largest)
    assert live.settled(shards) <= shards, (live.now(), shards)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_N1_at_most_one_unit_is_full_at_a_time(world_size: int) -> None:
    sizes = (70, 40, 110, 30)
    run(world_size, for_each, [(sizes, policy) for policy in ("blocks", "leaves", "every leaf")], one_unit_at_a_time)


# ---- L2


class FullBytes:
    """The largest sum of bytes of the buffers that all-gathers fill, at any moment under it."""

    def __init__(self) -> None:
        self.buffers: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __enter__(self) -> FullBytes:
        self._resize = torch.UntypedStorage.resize_
        self._name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        self._gather = getattr(dist, self._name)

        def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result = self._resize(storage, nbytes)
            self._look()
            return result

        def gather(full: Tensor, *args: Any, **kwargs: Any) -> Any:
            storage = full.untyped_storage()
            self.buffers.setdefault(storage._cdata, StorageWeakRef(storage))
            self._look()
            return self._gather(full, *args, **kwargs)

        torch.UntypedStorage.resize_ = resize
        setattr(dist, self._name, gather)
        return self

    def __exit__(self, *_: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        setattr(dist, self._name, self._gather)

    def _look(self) -> None:
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.buffers.values()]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in storages if storage is not None))


class Rooted(Tower):
    """A tower whose root owns a parameter of its own, used last."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__(n, width, False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def wrap_and_catch(model: nn.Module, policy: Any, prefetch: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp.fsdp_wrap(model, policy, prefetch=prefetch)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def bytes_in_a_step(n: int, width: int, by_block: bool, prefetch: int, rooted: bool) -> None:
    model = seeded(Rooted, n, width) if rooted else seeded(Tower, n, width, False)
    said = wrap_and_catch(model, fsdp.by_class(nn.Linear) if by_block else None, prefetch)
    unit_bytes, root_bytes = 4 * width * width, 4 * width if rooted else 0
    if by_block:
        expected = unit_bytes * min(n, 1 + prefetch) + root_bytes
        assert not said, said
    else:
        expected = unit_bytes * n + root_bytes
        assert len(said) == (1 if here.rank == 0 else 0), said
        assert here.rank or ("peak" in said[0] and "Linear" in said[0]), said
    optimizer = sgd(model)
    with FullBytes() as full:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, width)).sum().backward()
            optimizer.step()
    assert full.peak == expected, (full.peak, expected)
    with torch._C.DisableTorchFunctionSubclass():
        at_rest = sum(4 * parameter.numel() for parameter in model.parameters())
    assert at_rest == (unit_bytes * n + root_bytes) // here.world_size, at_rest
    assert_rested(model)


def test_L2_memory_that_is_not_saved_is_said_out_loud() -> None:
    combinations = [(4, 64, False, 1, False), (4, 64, True, 1, False), (4, 64, True, 0, False)]
    combinations += [(5, 32, True, 2, False), (6, 16, True, 1, True), (3, 32, False, 0, True)]
    run(2, for_each, combinations, bytes_in_a_step)
