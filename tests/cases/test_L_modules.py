"""L, second half: compiled blocks, the user's own types and names, wrapping twice."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite import inspect
from tests.harness import (
    Block,
    Stack,
    adamw,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    here,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

# ---- L11


class CountingBackend:
    """A compile backend that counts how often it is asked to compile."""

    def __init__(self, name: str) -> None:
        self.compile = torch._dynamo.lookup_backend(name)
        self.calls = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.calls += 1
        return self.compile(graph, example_inputs)


def compile_blocks(model: nn.Module, how: str, backend: CountingBackend) -> None:
    for i, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend)
        else:
            model.blocks[i] = torch.compile(block, backend=backend)


def without_wrapper(name: str) -> str:
    return name.replace("_orig_mod.", "")


def compiled(how: str, when: str, backend_name: str, reshard: bool | None) -> None:
    torch._dynamo.reset()
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    backend = CountingBackend(backend_name)
    if when == "before":
        compile_blocks(model, how, backend)
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), reshard_after_forward=reshard)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    units = [unit for unit in inspect.units(model) if unit.flats]
    assert len(units) == 3 and all("_orig_mod" not in unit.name for unit in units), units
    if when == "after":
        compile_blocks(model, how, backend)
    if how == "in place":
        assert not any("_orig_mod" in name for name, _ in model.named_parameters())
    optimizer = sgd(model)
    train_rank(model, optimizer, range(2), stack_batch, here.rank)
    calls = backend.calls
    assert calls >= 1
    train_rank(model, optimizer, range(2, 4), stack_batch, here.rank)
    assert backend.calls == calls, f"{backend.calls - calls} compilations after step 2"
    train_ref(reference, sgd(reference), range(4), stack_batch, here.world_size)
    if how == "wrapper":  # the user's own object shows its name; the reference is renamed alike
        compile_blocks(reference, how, backend)
    assert_parity(model, reference)
    assert_rested(model)
    torch._dynamo.reset()


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_L11_compiled_blocks(world_size: int, backend: str) -> None:
    ways = [(how, when) for how in ("in place", "wrapper") for when in ("before", "after")]
    if backend == "aot_eager":  # the slower one: each way once
        ways = ways[world_size - 1 :: 2]
    combinations = [(how, when, backend, None) for how, when in ways] + [("in place", "before", backend, True)]
    run(world_size, for_each, combinations, compiled, timeout_s=60)


def compiled_whole() -> None:
    """The whole wrapped model compiled: its units are seams in the graph."""
    torch._dynamo.reset()
    model, reference = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block")), seeded(Stack, 2)
    backend = CountingBackend("eager")
    whole = torch.compile(model, backend=backend)
    optimizer = sgd(model)
    calls = []
    for step in range(4):
        optimizer.zero_grad()
        x, target = stack_batch(step, here.rank)
        (whole(x) - target).square().mean().backward()
        optimizer.step()
        calls.append(backend.calls)
    assert calls[-1] == calls[1], calls
    train_ref(reference, sgd(reference), range(4), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("world_size", [1, 2])
def test_L11_the_whole_model_compiled(world_size: int) -> None:
    run(world_size, compiled_whole)


# ---- L12


class Config:
    """What a model library hangs on a model."""

    layers = 2


class MyNet(nn.Module):
    """A user's model: attributes, a method, a property, buffers, a nested block, a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.embed = nn.Linear(5, 5, dtype=torch.float64)
        self.trunk = nn.Module()
        self.trunk.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))

    @property
    def width(self) -> int:
        return self.config.layers * 5

    @property
    def broken(self) -> int:
        return self.no_such_thing

    def describe(self, prefix: str) -> str:
        return f"{prefix}{self.width}"

    def __len__(self) -> int:
        return len(self.trunk.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.trunk.blocks:
            x = block(x)
        return self.head(x) * self.scale * self.extra


class Slotted(nn.Module):
    """A class with its own `__getattr__` and an attribute a subclass cannot see in `__dict__`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def __getattr__(self, name: str) -> Any:
        return 7 if name == "seven" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "types": [type(module).__name__ for module in model.modules()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "keys": list(model.state_dict()),
        "children": [name for name, _ in model.named_children()],
        "repr": repr(model),
    }


def still_the_users(recompute: Any, policy: Any, stage: int) -> None:
    model, reference = seeded(MyNet), seeded(MyNet)
    config, before = model.config, snapshot(model)
    assert fsdp.fsdp_wrap(model, policy, recompute=recompute, stage=stage) is model
    assert isinstance(model, MyNet) and isinstance(model, fsdp.FSDPUnit)
    assert type(model).__name__ == "MyNet" and type(model).__qualname__ == MyNet.__qualname__
    assert type(model).__module__ == MyNet.__module__
    for block in model.trunk.blocks:
        assert isinstance(block, Block)
        assert isinstance(block, fsdp.FSDPUnit) == (policy is not None)
    assert not isinstance(seeded(MyNet), fsdp.FSDPUnit)

    def same() -> None:
        after = snapshot(model)
        for key, value in before.items():
            assert after[key] == value, f"{key}: {after[key]}, expected {value}"

    same()
    assert model.config is config and model.width == 10 and model.describe("w") == "w10" and len(model) == 2
    readable = {name for name in dir(model) if hasattr(model, name)}  # debuggers and exporters walk like this
    assert {name for name in dir(reference) if hasattr(reference, name)} <= readable
    model.note = "mine"
    assert model.note == "mine"
    del model.note
    for name in ("no_such_thing", "broken"):
        with pytest.raises(AttributeError) as expected:
            getattr(reference, name)
        with pytest.raises(AttributeError) as found:
            getattr(model, name)
        assert name in str(found.value) and str(found.value) == str(expected.value)
    train_rank(model, adamw(model), range(2), stack_batch, here.rank)
    same()
    train_ref(reference, adamw(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


def own_getattr() -> None:
    model = seeded(Slotted)
    fsdp.fsdp_wrap(model)
    assert model.seven == 7
    with pytest.raises(AttributeError, match="eight"):
        model.eight
    train_rank(model, sgd(model), [0], stack_batch, here.rank)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_L12_the_wrapped_model_is_still_the_users_model(world_size: int) -> None:
    blocks = fsdp.by_class("Block")
    combinations = [(None, blocks, 3), (blocks, blocks, 3), (None, None, 3), (fsdp.by_class("Linear"), blocks, 3)]
    if world_size == 2:
        combinations += [(None, blocks, stage) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, still_the_users)
    run(world_size, own_getattr)


# ---- L14


def blocks_first(policy: Any, recompute: Any) -> None:
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    for block, reshard in zip(model.blocks, (True, False), strict=True):
        fsdp.fsdp_wrap(block, reshard_after_forward=reshard)
    slices = [parameter.untyped_storage().data_ptr() for parameter in model.blocks.parameters()]
    fsdp.fsdp_wrap(model, policy, recompute=recompute)
    units = {unit.name: unit for unit in inspect.units(model)}
    assert set(units) == {"", "blocks.0", "blocks.1"}, list(units)
    names = [flat.names for unit in units.values() for flat in unit.flats]
    owned = [name for group in names for name in group]
    assert len(owned) == len(set(owned)) == 6, names
    assert [parameter.untyped_storage().data_ptr() for parameter in model.blocks.parameters()] == slices
    loss = (model(stack_batch(0, here.rank)[0]) - stack_batch(0, here.rank)[1]).square().mean()
    if here.world_size > 1:
        # Their own options: the first block was resharded, the second waits for its backward.
        unsharded = inspect.rest_report(model)["unsharded_units"]
        assert "blocks.1" in unsharded and "blocks.0" not in unsharded, unsharded
    loss.backward()
    optimizer = sgd(model)
    optimizer.step()
    train_rank(model, optimizer, [1], stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


def wrapped_twice() -> None:
    model = seeded(Stack, 2)
    fsdp.fsdp_wrap(model.blocks[0])
    expect_loud(lambda: fsdp.fsdp_wrap(model.blocks[0]), "Block")
    fsdp.fsdp_wrap(model)
    expect_loud(lambda: fsdp.fsdp_wrap(model), "Stack")
    expect_loud(lambda: fsdp.fsdp_wrap(model, fsdp.by_class("Linear")), "Stack")
    expect_loud(lambda: fsdp.fsdp_wrap(model.blocks[0]), "Block")
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    reference = seeded(Stack, 2)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


def sequential_of_units() -> None:
    """A list of wrapped layers inside a container that is wrapped last, without a policy."""
    layers = [("first", nn.Linear(5, 5)), ("act", nn.Tanh()), ("last", nn.Linear(5, 3))]
    model = nn.Sequential(collections.OrderedDict(layers)).double()
    fsdp.fsdp_wrap(model.first, stage=3)
    fsdp.fsdp_wrap(model, fsdp.by_name("first", "last"))
    assert [unit.name for unit in inspect.units(model) if unit.flats] == ["first", "last"]
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_L14_wrapping_twice(world_size: int) -> None:
    blocks = fsdp.by_class("Block")
    run(world_size, for_each, [(blocks, None), (None, None), (blocks, blocks)], blocks_first)
    run(world_size, wrapped_twice)
    run(world_size, sequential_of_units)
