"""What cannot work is an error that names the unit, the parameter and the cure, at every world size."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import (
    MLP,
    Block,
    Stack,
    Vec,
    assert_all,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    here,
    mse,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

WORLD_SIZES = [1, 2, 3]


def wrapped_stack(stage: int = 3, policy: Any = "Block") -> nn.Module:
    return fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class(policy), stage=stage)


def still_trains(model: nn.Module) -> None:
    """A refusal leaves nothing behind: the next step is REF's first."""
    reference = seeded(Stack, 2)
    train_rank(model, sgd(model), [0], stack_batch, here.rank)
    train_ref(reference, sgd(reference), [0], stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


# ---- whole programs around or inside a wrapped model


def functional_call(stage: int) -> None:
    model = wrapped_stack(stage)
    x = stack_batch(0, here.rank)[0]
    replaced = {name: p.detach().clone() for name, p in seeded(Stack, 2).named_parameters()}
    expect_loud(lambda: torch.func.functional_call(model, replaced, (x,)), "weight")
    part = {"blocks.1.linear.bias": torch.zeros(5, dtype=torch.float64)}
    expect_loud(lambda: torch.func.functional_call(model, part, (x,)), "blocks.1.linear.bias")
    still_trains(model)


def data_parallel_around(stage: int) -> None:
    model = wrapped_stack(stage)
    expect_loud(lambda: nn.parallel.DistributedDataParallel(model), "DistributedDataParallel", "stage=0")
    still_trains(model)


def gradients_by_parameters(stage: int) -> None:
    model = wrapped_stack(stage)
    parameters = list(model.parameters())
    for wanted in (parameters, [parameters[-1]], parameters[0]):
        loss = mse(model, stack_batch(0, here.rank))
        expect_loud(lambda wanted=wanted, loss=loss: torch.autograd.grad(loss, wanted), "backward")
        del loss
    still_trains(model)


class Scripted(nn.Module):
    """A model with a TorchScript child."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(5, 5)
        self.compiled_head = torch.jit.script(nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled_head(self.plain(x))


def torch_script() -> None:
    expect_loud(lambda: fsdp.fsdp_wrap(Scripted()), "compiled_head", "TorchScript")
    expect_loud(lambda: fsdp.fsdp_wrap(Scripted(), fsdp.by_class(nn.Linear)), "compiled_head", "TorchScript")


def weights_replaced(how: str, stage: int) -> None:
    model = wrapped_stack(stage)
    x = stack_batch(0, here.rank)[0]

    def use() -> None:
        if how == "new":
            model.blocks[0].linear.weight = nn.Parameter(torch.ones(5, 5, dtype=torch.float64))
        elif how == "tied":
            model.blocks[0].linear.weight = model.blocks[1].linear.weight
        elif how == "removed":
            del model.blocks[0].linear.bias
        elif how == "none":
            model.blocks[0].linear.bias = None
        elif how == "data":
            model.blocks[0].linear.weight.data = torch.ones(5, 5, dtype=torch.float64)
        model(x)

    expect_loud(use, "blocks.0.linear." + ("bias" if how in ("removed", "none") else "weight"))


def casts(stage: int) -> None:
    model = wrapped_stack(stage)
    for change in (model.half, model.bfloat16, model.float, lambda: model.to(torch.float16), lambda: model.to("meta")):
        expect_loud(change, "weight", "before fsdp_wrap")
    before = [(id(p), p.dtype) for p in model.parameters()]
    for nothing in (model.double, model.cpu, lambda: model.to("cpu"), lambda: model.to(torch.float64), model.train):
        assert nothing() is model
    assert [(id(p), p.dtype) for p in model.parameters()] == before
    still_trains(model)
    single = fsdp.fsdp_wrap(seeded(MLP, dtype=torch.float32), stage=stage)
    assert single.float() is single and single.to(torch.float32) is single
    expect_loud(single.half, "0.weight")


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_programs_around_a_wrapped_model(world_size: int) -> None:
    for body in (functional_call, data_parallel_around, gradients_by_parameters, casts):
        run(world_size, for_each, [(3,)] if world_size != 2 else [(3,), (0,), (1,), (2,)], body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_torch_script_is_refused(world_size: int) -> None:
    run(world_size, torch_script)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replaced_weights_are_refused(world_size: int) -> None:
    ways = ("new", "tied", "removed", "none", "data")
    run(world_size, for_each, [(how, 3) for how in ways], weights_replaced)


# ---- a weight outside its unit's forward


def outside_forward(stage: int) -> None:
    model = wrapped_stack(stage)
    weight, bias, x = model.blocks[0].linear.weight, model.head.bias, torch.ones(2, 5, dtype=torch.float64)
    uses: list[Callable[[], Any]] = [
        lambda: weight * 2,
        lambda: weight.sum(),
        lambda: x @ weight.t(),
        lambda: weight[0],
        lambda: torch.cat([weight.flatten(), torch.ones(1)]),
        lambda: weight.norm(),
        lambda: nn.functional.linear(x, weight),
        lambda: weight.view(25),
        lambda: weight.tolist(),
        lambda: torch.stack([weight, weight]),
    ]
    for use in uses:
        expect_loud(use, "blocks.0.linear.weight", "full_params")
    expect_loud(lambda: bias + 1, "head.bias", "full_params")
    expect_loud(lambda: nn.utils.parameters_to_vector(model.parameters()), "blocks.0.linear.weight")
    if stage == 3:
        expect_loud(lambda: model.blocks[0].forward(x), "blocks.0.linear")
    # What is only looked at stays allowed.
    assert weight.ndim == 2 and weight.full_shape == (5, 5) and weight.requires_grad
    assert torch.zeros_like(weight).shape == weight.shape == weight.detach().shape
    assert len(repr(weight)) > 0 and weight in {weight} and weight.dtype == torch.float64
    still_trains(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_sharded_weight_in_arithmetic(world_size: int) -> None:
    run(world_size, for_each, [(3,)] if world_size != 2 else [(3,), (0,), (1,), (2,)], outside_forward)


class ReturnsItsWeight(nn.Module):
    """Hands out its own weight (or a view of it), alone or among other outputs."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x), {"w": self.linear.weight.t() if self.view else self.linear.weight}


class WritesItsWeight(nn.Module):
    """Changes its weight in place inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def weights_misused_in_forward(build: Callable[..., nn.Module], args: tuple, nested: bool) -> None:
    inner = seeded(build, *args)
    model = nn.Sequential(inner) if nested else inner
    fsdp.fsdp_wrap(model, fsdp.by_class(type(inner)) if nested else None)
    name = "0.linear.weight" if nested else "linear.weight"
    x = torch.ones(2, 5, dtype=torch.float64)
    expect_loud(lambda: model(x), name)
    with torch.no_grad():
        expect_loud(lambda: model(x), name)
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_weights_returned_or_written_in_forward(world_size: int) -> None:
    kinds = [(ReturnsItsWeight, (False,)), (ReturnsItsWeight, (True,)), (WritesItsWeight, ())]
    combinations = [(*kind, nested) for kind in kinds for nested in (True, False)]
    run(world_size, for_each, combinations, weights_misused_in_forward)


INITIALISERS: dict[str, Callable[[Any], Any]] = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
    "w.normal_": lambda w: w.normal_(),
    "w.uniform_": lambda w: w.uniform_(),
    "w.bernoulli_": lambda w: w.bernoulli_(0.5),
    "w[0] = 1": lambda w: w.__setitem__(0, 1.0),
}


def random_initialisers(stage: int) -> None:
    """Refused on every rank, also on those whose slice is empty."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear), stage=stage)
    weight, before = model[0].weight, gather(model)["0.weight"]
    accepted = []
    for name, initialise in INITIALISERS.items():
        with torch.no_grad():
            needles = ("0.weight", "full_params", "writeback=True")
            try:
                expect_loud(lambda initialise=initialise: initialise(weight), *needles)
            except AssertionError as error:
                accepted.append(f"{name}: {error}")
    assert not accepted, "\n".join(accepted)
    expect_loud(model[0].reset_parameters, "0.weight", "writeback=True")
    assert_close(gather(model)["0.weight"], before, bitwise=True)
    nn.init.constant_(weight, 3.0)
    assert_all(gather(model), 3.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_initialisers_are_refused_on_every_rank(world_size: int) -> None:
    run(world_size, for_each, [(3,)] if world_size != 2 else [(3,), (0,), (1,), (2,)], random_initialisers)


# ---- norms and optimizers


def norms_of_slices() -> None:
    model = wrapped_stack()
    mse(model, stack_batch(0, here.rank)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            for norm in (lambda g: g.norm(), torch.linalg.norm, torch.norm, lambda g: g.norm(p=1).item()):
                expect_loud(lambda norm=norm, grad=parameter.grad: norm(grad), "clip_grad_norm_")
    model.zero_grad()
    still_trains(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_other_norms_of_a_sharded_gradient(world_size: int) -> None:
    run(world_size, norms_of_slices)


class Shampoo(torch.optim.SGD):
    """Any optimizer of that name reads whole matrices."""


def whole_tensor_optimizers(name: str) -> None:
    model = fsdp.fsdp_wrap(nn.Sequential(nn.Linear(5, 3, bias=False)))
    build = {
        "Adafactor": lambda p: torch.optim.Adafactor(p),
        "Muon": lambda p: torch.optim.Muon(p),
        "LBFGS": lambda p: torch.optim.LBFGS(p),
        "Shampoo": lambda p: Shampoo(p, lr=0.1),
    }[name]
    before = gather(model)["0.weight"]

    def first_step() -> None:
        optimizer = build(model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5)).sum()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    expect_loud(first_step, name)
    assert_close(gather(model)["0.weight"], before, bitwise=True)
    model.zero_grad()
    assert_rested(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_optimizers_that_read_whole_tensors(world_size: int) -> None:
    names = ("Adafactor", "Muon", "LBFGS", "Shampoo")
    run(world_size, for_each, [(name,) for name in names], whole_tensor_optimizers)


def full_shape_state(name: str) -> None:
    """State allocated before wrapping has the old shapes: an error at the first step, not a wrong update."""
    model = seeded(Stack, 2)
    if name == "Adagrad":
        optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        mse(model, stack_batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    fsdp.fsdp_wrap(model, fsdp.by_class(Block))
    before = gather(model)
    mse(model, stack_batch(1, here.rank)).backward()
    expect_loud(optimizer.step, "weight")
    for key, value in gather(model).items():
        assert_close(value, before[key], bitwise=True, what=key)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_optimizer_that_holds_full_shape_state(world_size: int) -> None:
    run(world_size, for_each, [("AdamW",), ("Adagrad",)], full_shape_state)


def pickled() -> None:
    model = wrapped_stack()
    for thing in (model.head.weight, model.state_dict(), list(model.parameters())):
        expect_loud(lambda thing=thing: pickle.dumps(thing), "weight", "save_checkpoint")
    clone = copy.deepcopy(Vec(3, 1.0))
    assert pickle.loads(pickle.dumps(clone.w.detach())).tolist() == [1.0] * 3
    still_trains(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_pickling_a_slice(world_size: int) -> None:
    run(world_size, pickled)


def cures() -> None:
    """The cure fits what was tried: a read is not answered with how to edit."""
    model = wrapped_stack()
    weight = model.head.weight
    for read in (lambda: weight[0, 0], lambda: len(weight), lambda: weight @ weight.t(), lambda: ~weight):
        text = expect_loud(read, "head.weight", "full_params")
        assert "around the edit" not in text, text
    for write in (lambda: weight.__setitem__((0, 0), 1.0), lambda: weight.normal_(), lambda: weight.cumsum_(0)):
        expect_loud(write, "head.weight", "around the edit", "writeback=True")
    expect_loud(lambda: fsdp.fsdp_wrap(nn.Linear(2, 2), precision=torch.bfloat16), "did you mean 'bf16'")
    assert set(dir(fsdp)) == set(fsdp.__all__)


def test_cures_fit() -> None:
    run(1, cures)
