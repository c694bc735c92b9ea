"""Modules of torch that hold or compute their weights in unusual ways train as they do unwrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import fsdplite as fsdp
from tests.harness import (
    Block,
    Stack,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    here,
    local_batch,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)


class Parametrized(nn.Module):
    """Layers whose weight is computed from other parameters, as units and inside units."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        wrap = {"weight_norm": parametrizations.weight_norm, "spectral_norm": parametrizations.spectral_norm}[kind]
        self.first = wrap(nn.Linear(5, 5, dtype=torch.float64))
        self.block = Block()
        wrap(self.block.linear)
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.first(x)))


def parametrized(kind: str, policy: Any) -> None:
    model = seeded(Parametrized, kind)
    reference = copy.deepcopy(model)
    fsdp.fsdp_wrap(model, policy)
    train_rank(model, sgd(model), range(3), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(3), stack_batch, here.world_size)
    assert_parity(model, reference)
    for name, buffer in reference.named_buffers():
        assert_close(dict(model.named_buffers())[name], buffer, what=name)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parametrizations(world_size: int) -> None:
    policies = (None, fsdp.by_class("Block"), fsdp.by_class("Linear"), fsdp.by_name("first", "block", "head"))
    combinations = [(kind, policy) for kind in ("weight_norm", "spectral_norm") for policy in policies]
    run(world_size, for_each, combinations, parametrized)


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a list of its weights, between two linear ones."""

    def __init__(self, kind: type, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5, dtype=torch.float64)
        self.rnn = kind(5, 3, batch_first=True, dtype=torch.float64, **options)
        self.head = nn.Linear(6 if options.get("bidirectional") else 3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.first(x).unsqueeze(1).expand(-1, 3, -1))
        return self.head(out[:, -1])


def recurrent(kind: type, options: dict[str, Any], policy: Any) -> None:
    model, reference = seeded(Recurrent, kind, **options), seeded(Recurrent, kind, **options)
    fsdp.fsdp_wrap(model, policy)
    train_rank(model, sgd(model), range(2), local_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), local_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_recurrent_layers(world_size: int) -> None:
    deep = {"num_layers": 2, "bidirectional": True}
    units = fsdp.by_class(nn.RNNBase, nn.Linear)
    combinations = [(nn.LSTM, {}, None), (nn.LSTM, deep, units), (nn.GRU, {}, units), (nn.GRU, deep, None)]
    run(world_size, for_each, combinations, recurrent)


def sequence() -> nn.Sequential:
    layers = [nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def slices_of_a_sequential() -> None:
    """A slice is a new container of the same layers: it runs where the layers are units of their own."""
    model, reference = seeded(sequence), seeded(sequence)
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    x, target = local_batch(0, here.rank)
    part = model[:3]
    assert type(part).__name__ == "Sequential" and len(part) == 3
    with torch.no_grad():
        assert_close(part(x), reference[:3](x))
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    (model[3:](model[:3](x)) - target).square().mean().backward()
    optimizer.step()
    train_ref(reference, reference_optimizer, [0], local_batch, here.world_size)
    assert_parity(model, reference)
    train_rank(model, optimizer, [1], local_batch, here.rank)
    train_ref(reference, reference_optimizer, [1], local_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_slices_of_a_sequential(world_size: int) -> None:
    run(world_size, slices_of_a_sequential)


def old_weight_norm(model: nn.Module) -> None:
    nn.utils.weight_norm(model.blocks[0].linear)
    nn.utils.weight_norm(model.head)


def old_spectral_norm(model: nn.Module) -> None:
    nn.utils.spectral_norm(model.blocks[0].linear)
    nn.utils.spectral_norm(model.head)


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.blocks[0].linear, "weight", amount=0.4)
    prune.random_unstructured(model.head, "weight", amount=0.4)


def weight_made_by_a_hook(change: Callable[[nn.Module], None], policy: Any) -> None:
    """The older forms compute the weight in a forward hook and set it as a plain attribute."""
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    for changed in (model, reference):
        torch.manual_seed(1)
        change(changed)
    fsdp.fsdp_wrap(model, policy)
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_made_by_hooks(world_size: int) -> None:
    changes = (old_weight_norm, old_spectral_norm, pruned)
    policies = (None, fsdp.by_class("Block"), fsdp.by_class("Linear"))
    run(world_size, for_each, [(change, policy) for change in changes for policy in policies], weight_made_by_a_hook)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2)


def sequence_batch(step: int, rank: int) -> tuple[Tensor, ...]:
    return tuple(t.unsqueeze(1) for t in local_batch(step, rank, 4, 4))


def torch_transformer(policy: Any) -> None:
    """Attention reads its children's weights itself, and in eval the layer has a fused path that reads all of them."""
    model, reference = seeded(encoder), seeded(encoder)
    fsdp.fsdp_wrap(model, policy)
    train_rank(model, sgd(model), range(2), sequence_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), sequence_batch, here.world_size)
    assert_parity(model, reference)
    model.eval(), reference.eval()
    x = sequence_batch(3, here.rank)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(model(x).clone(), reference(x).clone())
        assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_transformer_layers_of_torch(world_size: int) -> None:
    run(world_size, for_each, [(fsdp.by_class("TransformerEncoderLayer"),), (None,)], torch_transformer)


def initialised_inside_full_params() -> None:
    """`model.apply(init)` draws the numbers that it draws on the plain model."""
    model, reference = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block")), seeded(Stack, 2)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    with fsdp.full_params(model, writeback=True):
        torch.manual_seed(3)
        model.apply(init)
    torch.manual_seed(3)
    reference.apply(init)
    assert_parity(model, reference, bitwise=True)
    assert all(value.abs().sum() == 0 for name, value in gather(model).items() if name.endswith("bias"))
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_initialisation_after_wrapping(world_size: int) -> None:
    run(world_size, initialised_inside_full_params)


# ---- structures that hold themselves, and classes with ways of their own


class Node:
    """A tree whose children know their parent: followed blindly, twenty children are looked at without end."""

    def __init__(self, value: Any, parent: Node | None = None) -> None:
        self.value = value
        self.parent = parent
        self.children: list[Node] = []


class Pairwise(tuple):
    """A tuple that is made of its two items, and not of a list of them."""

    def __new__(cls, left: Any, right: Any) -> Pairwise:
        return super().__new__(cls, (left, right))


class Growing(nn.Module):
    """Takes a tree and gives one back."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=dtype)

    def forward(self, tree: Node) -> Node:
        root = Node(self.linear(tree.value[1]))
        root.children = [Node(None, root) for _ in range(20)]
        for child in root.children:
            child.children = [Node(child.parent, child) for _ in range(3)]
        return root


def tree_of(x: Tensor) -> Node:
    root = Node(Pairwise("x", x))
    root.children = [Node([root], root) for _ in range(20)]
    return root


def trees() -> None:
    model, reference = seeded(Growing), seeded(Growing)
    fsdp.fsdp_wrap(model)
    for step in range(2):
        x, _ = stack_batch(step, here.rank)
        model(tree_of(x)).value.square().mean().backward()
        for rank in range(here.world_size):
            y, _ = stack_batch(step, rank)
            (reference(tree_of(y)).value.square().mean() / here.world_size).backward()
    assert_parity(model, reference)
    assert_rested(model)
    precision = fsdp.Precision(torch.bfloat16, output_dtype=torch.float32)
    low = fsdp.fsdp_wrap(seeded(Growing, torch.float32), precision=precision)
    tree = tree_of(torch.ones(2, 5))
    grown = low(tree)
    assert grown.value.dtype == torch.float32 and len(grown.children) == 20
    assert tree.value[1].dtype == torch.float32  # the caller's own tree is as it was


@pytest.mark.parametrize("world_size", [1, 2])
def test_structures_that_hold_themselves(world_size: int) -> None:
    run(world_size, trees)


class Counted(type):
    """A metaclass that numbers the classes it makes, and needs to be told a name for each."""

    made = 0

    def __new__(mcs, name: str, bases: tuple, namespace: dict, *, tag: str) -> type:
        cls = super().__new__(mcs, name, bases, namespace)
        Counted.made += 1
        cls.tag = tag
        return cls

    def __init__(cls, name: str, bases: tuple, namespace: dict, *, tag: str) -> None:
        super().__init__(name, bases, namespace)


class OwnWays(nn.Module, metaclass=Counted, tag="own"):
    """Methods of nn.Module as older code has them, and a weight that cannot be assigned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 0.5, dtype=torch.float64))
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.seen: list[str] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "scale" and "scale" in self.__dict__.get("_parameters", {}):
            raise AttributeError("scale is read only")
        super().__setattr__(name, value)

    def _apply(self, fn: Callable) -> nn.Module:
        self.seen.append("apply")
        return super()._apply(fn)

    def zero_grad(self) -> None:
        self.seen.append("zero_grad")
        super().zero_grad()

    def load_state_dict(self, state_dict: dict, strict: bool = True) -> Any:
        self.seen.append("load")
        return super().load_state_dict(state_dict, strict)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


def own_ways(policy: Any) -> None:
    model, reference = seeded(OwnWays), seeded(OwnWays)
    made = Counted.made
    fsdp.fsdp_wrap(model, policy)
    assert Counted.made == made and model.tag == "own"
    model.load_state_dict(reference.state_dict())
    assert model.double() is model and model.seen == ["load", "apply"]
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters()) and model.seen[-1] == "zero_grad"
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_classes_with_methods_of_their_own(world_size: int) -> None:
    run(world_size, for_each, [(None,), (fsdp.by_class(nn.Linear),)], own_ways)


def traced_by_fx() -> None:
    model, reference = (torch.fx.symbolic_trace(seeded(Stack, 2)) for _ in range(2))
    fsdp.fsdp_wrap(model)
    average = copy.deepcopy(model)
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    train_rank(average, sgd(average), range(2), stack_batch, here.rank)
    assert_parity(average, reference)
    assert_rested(model, average)


@pytest.mark.parametrize("world_size", [1, 2])
def test_graph_modules(world_size: int) -> None:
    run(world_size, traced_by_fx)


def parametrized_on_meta() -> None:
    """No initialiser fills what a weight is computed from: an error at the first forward, and a load is the cure."""
    with torch.device("meta"):
        model = Parametrized("weight_norm")
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"))
    x, _ = stack_batch(0, here.rank)
    expect_loud(lambda: model(x), "first.parametrizations.weight.original0", "load weights")
    reference = seeded(Parametrized, "weight_norm")
    model.load_state_dict(reference.state_dict())
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parametrizations_on_meta(world_size: int) -> None:
    run(world_size, parametrized_on_meta)
