"""X. Mixed precision: buffers, statistics, kept modules, masters, mixed dtypes, the sum over ranks, the scaler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite import inspect
from tests.cases.matrix import MESHES, mesh_of
from tests.harness import (
    MLP,
    Counts,
    LowPrecisionReference,
    Vec,
    adamw,
    assert_all,
    assert_close,
    assert_parity,
    assert_rested,
    for_each,
    gather,
    gather_grads,
    here,
    joined,
    local_batch,
    mse,
    plain,
    run,
    seeded,
    sgd,
    train_rank,
)

BF16 = torch.bfloat16


def fp32_batch(step: int, rank: int) -> tuple[Tensor, ...]:
    return local_batch(step, rank, dtype=torch.float32)


def equal_to_reference(model: nn.Module, reference: nn.Module) -> None:
    """REF-LP: the same bits at one and two ranks, 1e-6 above."""
    assert_parity(model, reference, bitwise=here.world_size <= 2)


# ---- X1


class Tables(nn.Module):
    """A float, an integer and a bool buffer; forward notes what it sees."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        owner = nn.Module() if deep else self
        if deep:
            self.deep = owner
        owner.register_buffer("third", torch.full((2,), 1 / 3))
        owner.register_buffer("count", torch.tensor(257), persistent=False)
        owner.register_buffer("flag", torch.tensor([True, False]))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        owner = self.deep if hasattr(self, "deep") else self
        self.seen = {name: value.clone() for name, value in owner.named_buffers(recurse=False)}
        return self.linear(x) * owner.third[0].to(x.dtype)


def tables(deep: bool, buffer_dtype: torch.dtype | None, stage: int) -> None:
    precision: Any = "bf16" if buffer_dtype is None else fsdp.Precision(param_dtype=BF16, buffer_dtype=buffer_dtype)
    model = seeded(Tables, deep)
    expected = {name.rpartition(".")[2]: value.clone() for name, value in model.named_buffers()}
    fsdp.fsdp_wrap(model, precision=precision, stage=stage)
    optimizer = sgd(model)
    for step in range(3):
        train_rank(model, optimizer, [step], fp32_batch, here.rank)
        outside = {name.rpartition(".")[2]: value for name, value in model.named_buffers()}
        for name, value in expected.items():
            assert_close(outside[name], value, bitwise=True, what=name)
            inside = value.to(buffer_dtype) if buffer_dtype and value.is_floating_point() else value
            assert_close(model.seen[name], inside, bitwise=True, what=f"{name} inside")
    model.seen.clear()
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_X1_buffers_keep_their_dtype_and_bits(world_size: int) -> None:
    combinations = [(deep, dtype, 3) for deep in (False, True) for dtype in (None, BF16, torch.float16)]
    if world_size == 2:
        combinations += [(False, dtype, stage) for dtype in (None, BF16) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, tables)


# ---- X2


def running_statistics(nested: bool, own_batches: bool, affine: bool) -> None:
    norm = nn.BatchNorm1d(1, affine=affine)
    model = nn.Sequential(nn.Linear(1, 1), norm) if nested else norm
    if nested:
        nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.BatchNorm1d) if nested and affine else None, precision="bf16")
    scale = here.rank + 1 if own_batches else 1
    mean, variance = 0.0, 1.0
    for _ in range(3):
        model(torch.tensor([[0.0], [2.0 * scale]])).sum().backward()
        mean, variance = 0.9 * mean + 0.1 * scale, 0.9 * variance + 0.1 * 2 * scale**2
        assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
        assert abs(norm.running_mean.item() - mean) < 1e-6 and abs(norm.running_var.item() - variance) < 1e-6
    if not own_batches:
        assert abs(norm.running_mean.item() - 0.271) < 1e-6 and abs(norm.running_var.item() - 1.271) < 1e-6
    assert norm.num_batches_tracked.item() == 3 and norm.num_batches_tracked.dtype == torch.int64
    if affine:
        assert norm.weight.dtype == torch.float32
    assert_rested(model)


class Kept(nn.Module):
    """How REF-LP runs a module that stays fp32: its input is widened, its output narrowed again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()).to(x.dtype)


def norm_between(norm: str) -> nn.Module:
    middle = nn.BatchNorm1d(5) if norm == "batch" else nn.LayerNorm(5)
    return nn.Sequential(nn.Linear(7, 5), middle, nn.Linear(5, 3))


def low_precision_parity(norm: str, policy: Any, keep: tuple, stage: int = 3) -> None:
    """Against REF-LP with the norm in fp32, whose running statistics are those of this rank."""
    model, masters = seeded(norm_between, norm), seeded(norm_between, norm)
    fsdp.fsdp_wrap(model, policy, precision=fsdp.Precision(param_dtype=BF16, keep=keep), stage=stage)
    inner = type(masters[1])
    masters[1] = Kept(masters[1])
    oracle = LowPrecisionReference(masters, BF16, keep=(inner,))
    train_rank(model, adamw(model), range(3), fp32_batch, here.rank)
    oracle.train(adamw(masters), range(3), fp32_batch, here.world_size)
    masters[1] = masters[1].inner  # the names of the wrapped model again
    equal_to_reference(model, masters)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_X2_running_statistics_under_low_precision(world_size: int) -> None:
    # Without weights of its own a norm is no unit; it is part of one.
    kinds = ((False, True), (True, True), (True, False))
    combinations = [(nested, own, affine) for nested, affine in kinds for own in (False, True)]
    run(world_size, for_each, combinations, running_statistics)
    leaves = fsdp.by_class(nn.Linear, nn.BatchNorm1d)
    run(world_size, for_each, [("batch", None, ()), ("batch", leaves, ())], low_precision_parity)


# ---- X3

FINE = 1 + 2.0**-10  # fp32 holds it, bf16 shows 1.0


class Parts(nn.Module):
    """Linear, LayerNorm with a fine weight, Linear; under any names."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.order = names
        for name, module in zip(names, (nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)), strict=True):
            self.add_module(name, module)
        nn.init.constant_(self.norm.weight, FINE)

    @property
    def norm(self) -> nn.LayerNorm:
        return getattr(self, self.order[1])

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def kept_parts(names: tuple[str, str, str], keep: Any, nested: bool) -> None:
    model = seeded(Parts, names)
    root = nn.Sequential(model) if nested else model
    policy = fsdp.by_class(Parts) if nested else None
    fsdp.fsdp_wrap(root, policy, precision=fsdp.Precision(param_dtype=BF16, keep=keep))
    assert len([unit for unit in inspect.units(root) if unit.flats]) == 1
    seen: dict[str, list[Any]] = {name: [] for name in names}
    norm_output: list[torch.dtype] = []

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        name = next(n for n, m in model.named_modules() if m is module)
        seen[name].append((module.weight.dtype, plain(module.weight), args[0].dtype))

    for name in names:
        getattr(model, name).register_forward_pre_hook(look)
    model.norm.register_forward_hook(lambda module, args, out: norm_output.append(out.dtype))
    x = fp32_batch(0, here.rank)[0]
    with Counts() as counts:
        out = root(x)
    assert out.dtype == BF16
    if here.world_size > 1:
        assert len(counts.gathers) <= 2, counts.calls
        assert {call.dtype for call in counts.of("all_gather")} == {BF16, torch.float32}
    first, middle, last = names
    assert seen[first][0][0] == seen[last][0][0] == BF16
    dtype, weight, _ = seen[middle][0]
    assert dtype == torch.float32 and torch.equal(weight, torch.full((5,), 1.0009765625))
    assert norm_output == [BF16] and seen[last][0][2] == BF16
    for notes in seen.values():
        notes.clear()
    with Counts() as counts:
        out.float().sum().backward()
    if here.world_size > 1:
        assert len(counts.gathers) <= 2 and len(counts.of("reduce_scatter")) <= 2, counts.calls
    for name, grad in gather_grads(root).items():
        assert grad.dtype == torch.float32, name
    assert_rested(root)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_X3_parts_of_a_unit_kept_in_fp32(world_size: int) -> None:
    combinations = [
        (("0", "1", "2"), ("LayerNorm",), False),
        (("first", "norm_a", "last"), (nn.LayerNorm,), False),
        (("first", "norm_a", "last"), ("norm_*",), False),
        (("first", "norm_a", "last"), ("*.norm_?",), True),
    ]
    run(world_size, for_each, combinations, kept_parts)
    parity = [("layer", None, ("LayerNorm",)), ("layer", fsdp.by_class(nn.Linear), ("1",))]
    run(world_size, for_each, parity, low_precision_parity)


# ---- X7


def small_updates(n: int, stage: int) -> None:
    model = fsdp.fsdp_wrap(Vec(n, 1.0, BF16), precision="bf16", stage=stage)
    assert model.w.dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        model(1.0).backward()
        assert model.w.grad is None or model.w.grad.dtype == torch.float32
        optimizer.step()
    assert_all(gather(model), 0.99, tolerance=1e-6)
    assert torch.equal(model(1.0), torch.full((n,), 0.98828125, dtype=BF16).sum())
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(1.0).backward()
    adam.step()
    assert adam.state[model.w]["exp_avg"].dtype == torch.float32
    assert_rested(model)


def without_a_policy(n: int, nested: bool) -> None:
    inner = Vec(n, 1.0, BF16)
    model = nn.Sequential(inner) if nested else inner
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp.fsdp_wrap(model, fsdp.by_class(Vec) if nested else None)
    said = [str(w.message) for w in caught if 'precision="bf16"' in str(w.message)]
    assert len(said) == (1 if here.rank == 0 else 0), [str(w.message) for w in caught]
    if here.rank == 0:
        assert ("'0'" if nested else "(root)") in said[0], said
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        model(1.0).backward()
        optimizer.step()
    assert inner.w.dtype == BF16
    assert_all(gather(model), 1.0)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_X7_small_updates_survive_a_low_precision_model(world_size: int) -> None:
    run(world_size, for_each, [(n, stage) for n in (1, 3) for stage in (3, 0, 1, 2)], small_updates)
    run(world_size, for_each, [(1, False), (5, True)], without_a_policy)


# ---- X8


class ManyDtypes(nn.Module):
    """bf16 frozen, fp32 trainable, int8 looked up: three dtypes in one unit."""

    def __init__(self, width: int = 4, low_rank: int = 2, rows: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=BF16).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(low_rank, width))
        self.B = nn.Parameter(torch.randn(width, low_rank))
        table = torch.arange(rows * width).remainder(17).to(torch.int8).view(rows, width)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.table[x.argmax(1) % len(self.table)].float()
        return self.base(x.to(BF16)).float() + (x @ self.A.T) @ self.B.T + looked_up


def many_dtypes(sizes: tuple[int, int, int], stage: int, nested: bool) -> None:
    model, reference = seeded(ManyDtypes, *sizes), seeded(ManyDtypes, *sizes)
    inner = model
    if nested:
        model, reference = nn.Sequential(model), nn.Sequential(reference)
    fsdp.fsdp_wrap(model, fsdp.by_class(ManyDtypes) if nested else None, stage=stage)
    dtypes = {name: p.dtype for name, p in inner.named_parameters()}
    assert dtypes == {name: p.dtype for name, p in seeded(ManyDtypes, *sizes).named_parameters()}
    batch = lambda step, rank: local_batch(step, rank, sizes[0], sizes[0], dtype=torch.float32)  # noqa: E731
    optimizer, reference_optimizer = adamw(model), adamw(reference)
    for step in range(3):
        optimizer.zero_grad()
        with Counts() as forward:
            loss = mse(model, batch(step, here.rank))
        with Counts() as backward:
            loss.backward()
        optimizer.step()
        if here.world_size > 1 and stage == 3:
            assert len(forward.gathers) <= 3 and len(backward.gathers) <= 3, (forward.calls, backward.calls)
            assert len(backward.reductions) == 1, backward.calls
        reference_optimizer.zero_grad()
        mse(reference, joined(batch, step, here.world_size)).backward()
        reference_optimizer.step()
    found = gather(model)
    for name, parameter in reference.named_parameters():
        frozen = not parameter.requires_grad
        assert_close(found[name], parameter.detach(), bitwise=frozen, what=name)
    for name, grad in gather_grads(model).items():
        expected = dict(reference.named_parameters())[name].grad
        assert (grad is None) == (expected is None) and (grad is None or grad.dtype == expected.dtype), name
        if grad is not None:
            assert_close(grad, expected, what=f"gradient of {name}")
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_X8_several_dtypes_in_one_unit(world_size: int) -> None:
    combinations = [((4, 2, 8), 3, False), ((5, 1, 3), 3, True)]
    if world_size == 2:
        combinations += [((4, 2, 8), stage, False) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, many_dtypes)


# ---- X9


def fp32_sum(n: int, stage: int, big_rank: int, shape: tuple[int, int] | None) -> None:
    mesh = None if shape is None else mesh_of(shape)
    model = fsdp.fsdp_wrap(Vec(n, 1.0, torch.float32), precision="bf16", stage=stage, mesh=mesh)
    model(256.0 if here.rank == big_rank else 1.0).backward()
    grad = gather_grads(model)["w"]
    assert grad.dtype == torch.float32
    assert_all({"w": grad}, (256 + here.world_size - 1) / here.world_size)
    if here.world_size == 4:
        assert grad[0].item() == 64.75
    assert_rested(model)


@pytest.mark.parametrize("world_size", [4, 2])
def test_X9_reduction_in_fp32(world_size: int) -> None:
    combinations = [(n, stage, big, None) for n, big in ((1, 0), (3, world_size - 1)) for stage in (3, 0, 1, 2)]
    combinations += [(3, stage, 1, shape) for stage in (3, 2) for shape in MESHES[world_size]]
    run(world_size, for_each, combinations, fp32_sum)


# ---- X11


def one_decision(n: int, optimizer_name: str, stage: int, precision: str | None, bad_rank: int) -> None:
    model = fsdp.fsdp_wrap(Vec(n, 1.0, torch.float32), stage=stage, precision=precision)
    build = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer_name]
    optimizer = build(model.parameters(), lr=0.1)
    scaler = fsdp.LossScaler(init_scale=1024.0, backoff_factor=0.5)
    for step, c in enumerate((float("inf") if here.rank == bad_rank else 1.0, 1.0)):
        optimizer.zero_grad()
        scaler.scale(model(c)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512.0
        if step == 0:
            assert_all(gather(model), 1.0)
            assert not any("step" in state for state in optimizer.state.values())
    assert_all(gather(model), 0.9, tolerance=1e-6)
    if optimizer_name == "adam":
        assert all(float(optimizer.state[p]["step"]) == 1 for p in model.parameters())
    assert_rested(model)


def unscaled_once(stage: int) -> None:
    """`unscale_` before a clip: the norm is that of the true gradient, and `step` does not divide again."""
    model = fsdp.fsdp_wrap(seeded(MLP, dtype=torch.float32), stage=stage)
    reference = seeded(MLP, dtype=torch.float32)
    optimizer, scaler = sgd(model), fsdp.LossScaler(init_scale=1024.0)
    scaler.scale(mse(model, fp32_batch(0, here.rank))).backward()
    scaler.unscale_(optimizer)
    norm = float(model.clip_grad_norm_(0.1))
    scaler.step(optimizer)
    scaler.update()
    mse(reference, joined(fp32_batch, 0, here.world_size)).backward()
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    sgd(reference).step()
    assert abs(norm - expected) < 1e-6
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [4, 2, 1])
def test_X11_the_loss_scaler_is_one_decision_for_all_ranks(world_size: int) -> None:
    last = world_size - 1
    combinations = [(2, name, 3, None, bad) for name in ("sgd", "adam") for bad in (0, last)]
    combinations += [(1, "adam", 3, "fp16", 0), (3, "sgd", 3, "fp16", last)]
    combinations += [(2, "adam", stage, None, 0) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, one_decision)
    run(world_size, for_each, [(stage,) for stage in (3, 0, 1, 2)], unscaled_once)
