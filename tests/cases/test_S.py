"""S. Odd sizes: 0-d and empty parameters, fewer elements than ranks, remainders, padding."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite import inspect
from tests.cases.matrix import MESHES, mesh_of
from tests.harness import (
    Vec,
    adamw,
    all_gather_objects,
    assert_all,
    assert_close,
    assert_parity,
    assert_rested,
    for_each,
    full_shape,
    gather,
    gather_state,
    here,
    local_batch,
    run,
    seeded,
    sgd,
)

WORLD_SIZES = [1, 2, 3, 4]


def stages(world_size: int) -> list[int]:
    """Stage 3 at every world size; the other stages where bits can be compared."""
    return [3, 0, 1, 2] if world_size == 2 else [3]


class Scalar(nn.Module):
    """A 0-d parameter, alone or beside other parameters of its unit."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.beside = nn.Linear(5, 3, dtype=torch.float64) if beside else None

    def forward(self, c: float) -> Tensor:
        loss = c * self.s
        if self.beside is not None:
            loss = loss + 0.0 * self.beside(torch.ones(2, 5, dtype=torch.float64)).sum()
        return loss


class Nested(nn.Module):
    """`inner` at some depth below a root that has parameters of its own, or none."""

    def __init__(self, inner: nn.Module, root_numel: int = 0) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.inner = inner
        self.own = nn.Parameter(torch.ones(root_numel, dtype=torch.float64)) if root_numel else None

    def forward(self, c: float | Tensor) -> Tensor:
        loss = self.body.inner(c)
        return loss if self.own is None else loss + (self.own * c).sum()


def scalar_step(beside: bool, nested: bool, stage: int) -> None:
    model = seeded(Scalar, beside)
    if nested:
        model = Nested(model)
        fsdp.fsdp_wrap(model, fsdp.by_class(Scalar), stage=stage)
    else:
        fsdp.fsdp_wrap(model, stage=stage)
    s = model.body.inner.s if nested else model.s
    assert s.ndim == 0 and s.dim() == 0 and s.full_shape == torch.Size(())
    optimizer = sgd(model)
    assert model(here.rank + 1).shape == ()
    model(here.rank + 1).backward()
    optimizer.step()
    found = next(value for name, value in gather(model).items() if name.endswith("s"))
    assert found.shape == ()
    assert abs(found.item() - (2 - 0.1 * (here.world_size + 1) / 2)) < 1e-12
    with fsdp.full_params(model):
        seen = next(p for name, p in model.named_parameters() if name.endswith("s"))
        assert seen.shape == () and torch.equal(seen.detach(), found)
    assert full_shape(s) == ()
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_S1_zero_dimensional_parameters(world_size: int) -> None:
    combinations = [
        (beside, nested, stage) for beside in (False, True) for nested in (False, True) for stage in stages(world_size)
    ]
    run(world_size, for_each, combinations, scalar_step)


def few_elements(n: int, root_numel: int, stage: int, prefetch: int, shape: tuple[int, int] | None) -> None:
    model = Nested(Vec(n, 1.0), root_numel)
    mesh = None if shape is None else mesh_of(shape)
    fsdp.fsdp_wrap(model, fsdp.by_class("Vec"), stage=stage, prefetch=prefetch, mesh=mesh)
    optimizer = sgd(model)
    model(here.rank + 1).backward()
    optimizer.step()
    assert_all(gather(model), 1 - 0.1 * (here.world_size + 1) / 2, tolerance=1e-12)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_S2_fewer_elements_than_ranks(world_size: int) -> None:
    combinations = [
        (n, root_numel, stage, prefetch, None)
        for n, root_numel, prefetch in ((1, 0, 1), (1, 1, 0), (2, 3, 2), (3, 0, 1))
        for stage in (0, 1, 2, 3)
    ]
    for shape in MESHES.get(world_size, ()):
        combinations += [(n, 1, stage, 1, shape) for n in (1, 3) for stage in (3, 2)]
    run(world_size, for_each, combinations, few_elements)


class EmptyBeside(nn.Module):
    """A parameter of no elements among others; all of them reach the loss."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(n, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.tail = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, c: float) -> Tensor:
        return (self.w * c).sum() + (self.nothing * c).sum() + (self.tail * c).sum()


def empty_parameter(n: int) -> None:
    model, reference = fsdp.fsdp_wrap(EmptyBeside(n)), EmptyBeside(n)
    optimizer, reference_optimizer = adamw(model), adamw(reference)
    for step in range(2):
        optimizer.zero_grad()
        model(here.rank + step).backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        reference((here.world_size - 1) / 2 + step).backward()
        reference_optimizer.step()
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_S2_parameters_without_elements(world_size: int) -> None:
    run(world_size, for_each, [(1,), (3,), (5,)], empty_parameter)


class Three(nn.Module):
    """One unit with parameters of 7, 13 and 1 elements (or other sizes), all in the loss with their own weights."""

    def __init__(self, sizes: tuple[int, ...] = (7, 13, 1)) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(n, dtype=torch.float64) for n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        feature = x.mean()
        return sum(((part * (i + 1) + feature) ** 2).mean() for i, part in enumerate(self.parts))


def remainders(sizes: tuple[int, ...], stage: int) -> None:
    model = fsdp.fsdp_wrap(seeded(Three, sizes), stage=stage)
    reference = seeded(Three, sizes)
    optimizer, reference_optimizer = adamw(model), adamw(reference)
    for step in range(3):
        optimizer.zero_grad()
        model(local_batch(step, here.rank)[0]).backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        losses = [reference(local_batch(step, rank)[0]) for rank in range(here.world_size)]
        (sum(losses) / here.world_size).backward()
        reference_optimizer.step()
    assert_parity(model, reference)
    for key in ("exp_avg", "exp_avg_sq"):
        moments = gather_state(model, optimizer, key)
        for name, parameter in reference.named_parameters():
            assert_close(moments[name], reference_optimizer.state[parameter][key], what=f"{key} of {name}")
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_S3_sizes_the_ranks_do_not_divide(world_size: int) -> None:
    sizes = [(7, 13, 1), (1, 1, 1, 2), (11, 3), (5,)]
    run(world_size, for_each, [(part, stage) for part in sizes for stage in stages(world_size)], remainders)


@contextlib.contextmanager
def garbage_in_new_memory():
    """New tensors and storages that grow hold NaN, as memory nobody wrote may."""
    resize = torch.UntypedStorage.resize_

    def resize_and_fill(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        before = storage.nbytes()
        result = resize(storage, nbytes)
        if nbytes > before:
            # All bits set is NaN in every floating-point dtype.
            torch.empty(0, dtype=torch.uint8).set_(storage, before, (nbytes - before,), (1,)).fill_(255)
        return result

    torch.use_deterministic_algorithms(True)
    torch.UntypedStorage.resize_ = resize_and_fill
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize
        torch.use_deterministic_algorithms(False)


def storage_values(tensor: Tensor) -> Tensor:
    """Every element of the memory behind a tensor, owned or padding."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()


def assert_padding_is_zero(tensor: Tensor, owned: tuple[int, ...], what: str) -> None:
    """The memory behind a slice of non-zero numbers holds as many of them as it should, and zeros beside them."""
    values = storage_values(tensor)
    assert not values.isnan().any(), f"{what}: {values}"
    assert values.count_nonzero().item() in owned, f"{what}: {owned} elements, memory {values}"


def padding(n: int, dtype: torch.dtype, stage: int, garbage: bool) -> None:
    with garbage_in_new_memory() if garbage else contextlib.nullcontext():
        model = fsdp.fsdp_wrap(Vec(n, 1.0, dtype), stage=stage)
        assert sum(flat.numel for unit in inspect.units(model) for flat in unit.flats) == n
        local = model.w.numel()
        if stage == 3:
            assert sum(all_gather_objects(local)) == n
        optimizer = adamw(model)
        expected = 1.0
        for _ in range(3):
            optimizer.zero_grad()
            model(1.0).backward()
            norm = model.clip_grad_norm_(100)
            assert abs(float(norm) - n**0.5) < 1e-6, norm
            optimizer.step()
            expected = expected * 0.99 - 0.1
            assert_all(gather(model), expected, tolerance=1e-6)
            if local:
                # Below stage 3 a slice may lie in the memory of the whole.
                owned = (local,) if stage == 3 else (local, n)
                assert_padding_is_zero(model.w, owned, "parameter")
                assert_padding_is_zero(model.w.grad, owned, "gradient")
                for key in ("exp_avg", "exp_avg_sq"):
                    assert_padding_is_zero(optimizer.state[model.w][key], (local,), key)
        if n == 7:
            assert abs(expected - 0.673289) < 1e-9
        assert_rested(model)


@pytest.mark.parametrize("garbage", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_S4_padding_is_never_visible(world_size: int, garbage: bool) -> None:
    combinations = [
        (n, dtype, stage, garbage)
        for n, dtype in ((7, torch.float64), (7, torch.float32), (1, torch.float64), (11, torch.float32))
        for stage in stages(world_size)
    ]
    run(world_size, for_each, combinations, padding)


def padding_between(precision: str) -> None:
    """Gaps for alignment between parameters of one unit, with garbage in new memory, in low precision too."""
    with garbage_in_new_memory():
        model = seeded(nn.Sequential, nn.Linear(3, 1), nn.Linear(1, 1), nn.Linear(1, 5))
        model = fsdp.fsdp_wrap(model, fsdp.by_class("Linear"), precision=precision)
        optimizer = adamw(model)
        for step in range(2):
            optimizer.zero_grad()
            x = local_batch(step, here.rank, 3)[0].float()
            model(x).float().square().mean().backward()
            norm = float(model.clip_grad_norm_(100))
            assert norm == norm
            optimizer.step()
        for name, value in gather(model).items():
            assert not value.isnan().any(), name
        assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_S4_garbage_between_parameters(world_size: int) -> None:
    run(world_size, for_each, [("fp32",), ("bf16",)], padding_between)
