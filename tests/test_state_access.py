"""Reading and writing a wrapped model's weights and gradients as a whole, or as this rank's slices."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import (
    Stack,
    Vec,
    adamw,
    assert_all,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    here,
    joined,
    mse,
    plain,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

WORLD_SIZES = [1, 2, 3, 4]


def stages(world_size: int) -> list[int]:
    return [3, 0, 1, 2] if world_size == 2 else [3]


class Tied(nn.Module):
    """A tied weight, a frozen one, a buffer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, dtype=torch.float64)
        self.mid = nn.Linear(3, 3, dtype=torch.float64)
        self.mid.bias.requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("shift", torch.tensor(0.25, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(ids)) * self.scale + self.shift)


def own_values(stage: int, policy: Any) -> None:
    """state_dict() holds slices under the old keys; what it holds can be loaded again."""
    model, reference = seeded(Tied), seeded(Tied)
    fsdp.fsdp_wrap(model, policy, stage=stage)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    saved = {key: plain(value) for key, value in state.items()}
    names = dict(model.named_parameters(remove_duplicate=False))
    for key, value in state.items():
        if key in names:
            assert value.shape == names[key].shape
    nn.init.constant_(model.scale, 9.0)
    nn.init.constant_(model.mid.weight, 9.0)
    assert not torch.equal(gather(model)["mid.weight"], reference.mid.weight)
    result = model.load_state_dict(saved)
    assert not result.missing_keys and not result.unexpected_keys
    assert_parity(model, reference, grads=False)
    model.load_state_dict(model.state_dict())
    assert_parity(model, reference, grads=False)
    assert model.head.weight is model.embed.weight
    assert_rested(model)


def full_values(stage: int, policy: Any) -> None:
    """A full state dict, as any other program writes it, is cut into slices while loading."""
    model, other = seeded(Tied), seeded(Tied, seed=3)
    with torch.no_grad():
        other.shift.fill_(7.0)
    fsdp.fsdp_wrap(model, policy, stage=stage)
    optimizer = sgd(model)
    model.load_state_dict(other.state_dict())
    assert_parity(model, other, grads=False)
    assert model.shift.item() == 7.0
    ids = torch.arange(5).roll(here.rank)
    with torch.no_grad():
        assert_close(model(ids), other(ids))
    part = {"mid.weight": torch.full((3, 3), 2.0, dtype=torch.float64)}
    result = model.load_state_dict(part, strict=False)
    assert "scale" in result.missing_keys
    assert_all({"mid.weight": gather(model)["mid.weight"]}, 2.0)
    for wrong in (torch.zeros(4, 3), torch.zeros(3, 3, 1), torch.zeros(10)):
        with pytest.raises(RuntimeError, match="mid.weight"):
            model.load_state_dict({"mid.weight": wrong}, strict=False)
    with pytest.raises(RuntimeError, match="nonsense"):
        model.load_state_dict({**other.state_dict(), "nonsense": torch.zeros(1)})
    # The loaded weights train.
    model.load_state_dict(other.state_dict())
    reference_optimizer = sgd(other)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        losses = [other(torch.arange(5).roll(rank)).square().mean() for rank in range(here.world_size)]
        (sum(losses) / here.world_size).backward()
        reference_optimizer.step()
    assert_parity(model, other)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_load_state_dict_takes_own_values_and_full_tensors(world_size: int) -> None:
    policies = (None, fsdp.by_class(nn.Embedding, nn.Linear))
    combinations = [(stage, policy) for stage in stages(world_size) for policy in policies]
    run(world_size, for_each, combinations, own_values)
    run(world_size, for_each, combinations, full_values)


class Renamed(nn.Linear):
    """Reads files that call its weight by an old name, as modules that were renamed once do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(state_dict: dict, prefix: str, *_: Any) -> None:
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Sequential(Renamed(5, 2), nn.LayerNorm(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def values_of_a_part(stage: int, policy: Any) -> None:
    """A whole state dict may enter at a module that is no unit, and under names that a load hook translates."""
    model, other = seeded(Nested), seeded(Nested, seed=5)
    fsdp.fsdp_wrap(model, policy, stage=stage)
    twin = copy.deepcopy(model)
    model.body[1].load_state_dict(other.body[1].state_dict())
    model.body[0].load_state_dict({"weight": other.body[0].weight, "bias": other.body[0].bias})
    assert_parity(model, other, grads=False)
    old = {key.replace("1.0.weight", "1.0.kernel"): value for key, value in other.state_dict().items()}
    assert "body.1.0.kernel" in old
    result = twin.load_state_dict(old)
    assert not result.missing_keys and not result.unexpected_keys
    assert_parity(twin, other, grads=False)
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        model.body[0].load_state_dict({"weight": other.body[0].weight, "bias": torch.zeros(6)})
    x = torch.arange(3.0)
    with torch.no_grad():
        assert_close(model(x), other(x))
        assert_close(twin(x), other(x))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_load_state_dict_of_a_part_and_under_old_names(world_size: int) -> None:
    policies = (None, fsdp.by_class(nn.LayerNorm))
    run(world_size, for_each, [(s, policy) for s in stages(world_size) for policy in policies], values_of_a_part)


def files_of_slices(stage: int) -> None:
    """Whatever would write a slice as if it were the whole is refused; whole tensors are not."""
    from safetensors.torch import save_file

    model = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block"), stage=stage)
    expect_loud(lambda: torch.save(model.state_dict(), io.BytesIO()), "save_checkpoint", "full_state_dict")
    expect_loud(lambda: torch.save({"model": model.state_dict(), "n": 1}, io.BytesIO()), "save_checkpoint")
    expect_loud(lambda: torch.save(model.head.weight.data, io.BytesIO()), "head.weight", "save_checkpoint")
    expect_loud(lambda: save_file(model.state_dict(), "/nonexistent/folder/model.safetensors"), "full_state_dict")
    with fsdp.full_params(model):
        whole = model.state_dict()
        buffer = io.BytesIO()
        torch.save(whole, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    for name, value in seeded(Stack, 2).state_dict().items():
        assert_close(loaded[name], value, bitwise=True, what=name)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_slices_are_not_written_to_files(world_size: int) -> None:
    run(world_size, for_each, [(stage,) for stage in stages(world_size)], files_of_slices)


def norms_of_slices(stage: int) -> None:
    """Element-wise arithmetic on a slice is right; its norm is a part's, however the slice was come by."""
    model = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block"), stage=stage)
    weight = model.head.weight
    ways = {
        "detach": weight.detach(),
        "data": weight.data,
        "clone": weight.detach().clone(),
        "float": weight.detach().float(),
        "abs": weight.detach().abs(),
        "state_dict": model.state_dict()["head.weight"],
    }
    for way, part in ways.items():
        for norm in (lambda t: t.norm(), torch.linalg.vector_norm, torch.norm, lambda t: torch._foreach_norm([t])):
            expect_loud(lambda: norm(part), "head.weight", "full_params")
        assert torch.equal(plain(part * 2), plain(part) * 2), way
    with fsdp.full_params(model):
        expected = seeded(Stack, 2).head.weight.norm()
        assert_close(model.head.weight.detach().norm(), expected, bitwise=True)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_norms_of_slices_are_refused(world_size: int) -> None:
    run(world_size, for_each, [(stage,) for stage in stages(world_size)], norms_of_slices)


def optimizer_state(stage: int) -> None:
    """Moments are slices too: not to be written to a file, and to be loaded back as they are."""
    reference = seeded(Stack, 2)
    train_ref(reference, adamw(reference), range(4), stack_batch, here.world_size)
    model = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block"), stage=stage)
    optimizer = adamw(model)
    train_rank(model, optimizer, range(2), stack_batch, here.rank)
    saved = optimizer.state_dict()
    expect_loud(lambda: torch.save(saved, io.BytesIO()), "save_checkpoint")
    expect_loud(lambda: torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO()), "save_checkpoint")
    saved = copy.deepcopy(saved)
    train_rank(model, optimizer, range(2, 3), stack_batch, here.rank)
    fresh = adamw(model)  # its first load comes before its first step
    for reader in (optimizer, fresh):
        reader.load_state_dict(saved)
        for values in reader.state.values():
            assert values["step"].item() == 2
    # Back to where the moments belong, and on: the run that never stopped.
    model.load_state_dict(seeded(Stack, 2).state_dict())
    again = adamw(model)
    train_rank(model, again, range(2), stack_batch, here.rank)
    fresh.load_state_dict(again.state_dict())
    train_rank(model, fresh, range(2, 4), stack_batch, here.rank)
    assert all(type(v) is Tensor for values in fresh.state.values() for v in values.values())
    assert_parity(model, reference)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_optimizer_state_is_not_written_to_files(world_size: int) -> None:
    run(world_size, for_each, [(stage,) for stage in stages(world_size)], optimizer_state)


def whole_state(stage: int, policy: Any, dtype: torch.dtype | None) -> None:
    model, reference = seeded(Tied), seeded(Tied)
    fsdp.fsdp_wrap(model, policy, stage=stage)
    expected = reference.state_dict()
    for rank0_only in (True, False):
        state = fsdp.full_state_dict(model, rank0_only=rank0_only, dtype=dtype)
        if rank0_only and here.rank > 0:
            assert not state
            continue
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert type(state[key]) is Tensor and not state[key].requires_grad, key
            assert_close(state[key], value if dtype is None else value.to(dtype), bitwise=True, what=key)
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()  # still one tensor
        state["scale"].fill_(99.0)  # a copy: the model does not notice
    assert_parity(model, reference, grads=False)
    assert_rested(model)


def whole_gradient(stage: int, policy: Any) -> None:
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, policy, stage=stage)
    assert fsdp.full_grad(model, "head.weight") is None
    mse(model, stack_batch(0, here.rank)).backward()
    mse(reference, joined(stack_batch, 0, here.world_size)).backward()
    for name, parameter in reference.named_parameters():
        found = fsdp.full_grad(model, name)
        assert type(found) is Tensor
        assert_close(found, parameter.grad, what=name)
        found.zero_()
        assert_close(fsdp.full_grad(model, name), parameter.grad, what=name)
    expect_loud(lambda: fsdp.full_grad(model, "head.weigth"), "head.weigth", "head.weight")
    model.zero_grad()
    assert fsdp.full_grad(model, "blocks.0.linear.bias") is None
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_full_state_dict_and_full_grad(world_size: int) -> None:
    policies = (None, fsdp.by_class(nn.Embedding, nn.Linear))
    combinations = [(stage, policy, None) for stage in stages(world_size) for policy in policies]
    combinations += [(3, None, torch.bfloat16)]
    run(world_size, for_each, combinations, whole_state)
    blocks = (None, fsdp.by_class("Block"))
    run(world_size, for_each, [(stage, policy) for stage in stages(world_size) for policy in blocks], whole_gradient)


def divide_factor(n: int, stage: int, factor: float | None) -> None:
    model = nn.Sequential(Vec(n, 1.0))
    fsdp.fsdp_wrap(model, fsdp.by_class(Vec), stage=stage)
    model.set_gradient_divide_factor(factor)
    model(here.rank + 1.0).backward()
    total = here.world_size * (here.world_size + 1) / 2
    expected = total / (here.world_size if factor is None else factor)
    assert_all({"w": fsdp.full_grad(model, "0.w")}, expected)
    model.set_gradient_divide_factor(None)
    model.zero_grad()
    model(here.rank + 1.0).backward()
    assert_all({"w": fsdp.full_grad(model, "0.w")}, total / here.world_size)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_gradient_divisor_can_be_set(world_size: int) -> None:
    factors = (1, 2.0, 4, None)
    combinations = [(n, stage, factor) for n in (1, 5) for stage in stages(world_size) for factor in factors]
    run(world_size, for_each, combinations, divide_factor)


def gradients_by_hand(stage: int) -> None:
    """`.grad` is this rank's slice: it can be scaled, zeroed in place, and set."""
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), stage=stage)
    optimizer, reference_optimizer = adamw(model), adamw(reference)
    for step in range(2):
        for m, o, batch in (
            (model, optimizer, stack_batch(step, here.rank)),
            (reference, reference_optimizer, joined(stack_batch, step, here.world_size)),
        ):
            m.zero_grad(set_to_none=False)
            mse(m, batch).backward()
            for parameter in m.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            nn.utils.clip_grad_value_(m.parameters(), 0.05)
            o.step()
    assert_parity(model, reference)
    assert_rested(model)


def data_by_hand(stage: int) -> None:
    """A write through `.data` is announced by `mark_updated`."""
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), stage=stage)
    train_rank(model, sgd(model), [0], stack_batch, here.rank)
    train_ref(reference, sgd(reference), [0], stack_batch, here.world_size)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    fsdp.mark_updated(model)
    for parameter in reference.parameters():
        parameter.data.mul_(0.5)
    train_rank(model, sgd(model), [1], stack_batch, here.rank)
    train_ref(reference, sgd(reference), [1], stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_slices_changed_by_hand(world_size: int) -> None:
    run(world_size, for_each, [(stage,) for stage in stages(world_size)], gradients_by_hand)
    run(world_size, for_each, [(stage,) for stage in stages(world_size)], data_by_hand)
