"""What works besides the cases: ways through autograd, and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    gather_grads,
    here,
    joined,
    mse,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)

Step = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def mean_over_ranks(reference: nn.Module, loss_of: Step, batch_of: Any, step: int) -> None:
    """REF for losses that are not linear in the batch: each rank's own loss, averaged."""
    losses = [loss_of(reference, batch_of(step, rank)) for rank in range(here.world_size)]
    (sum(losses) / here.world_size).backward()


# ---- several backwards, several orders


def gradient_penalty(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The squared norm of the loss's gradient by the input: a double backward through every weight."""
    x = batch[0].clone().requires_grad_()
    loss = (model(x) - batch[1]).square().mean()
    (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + by_input.square().sum()


def norm_of_input_gradient_alone(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x = batch[0].clone().requires_grad_()
    (by_input,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return by_input.square().mean()


def double_backward(loss_of: Step, policy: Any, reshard: bool | None) -> None:
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, stack_batch(step, here.rank)).backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        mean_over_ranks(reference, loss_of, stack_batch, step)
        reference_optimizer.step()
        assert_parity(model, reference)
        assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_double_backward_through_inputs(world_size: int) -> None:
    losses = (gradient_penalty, norm_of_input_gradient_alone)
    combinations = [(loss, policy, None) for loss in losses for policy in (fsdp.by_class("Block"), None)]
    combinations += [(loss, fsdp.by_class("Linear"), reshard) for loss in losses for reshard in (True, False)]
    run(world_size, for_each, combinations, double_backward)


def gradients_of_inputs_only(policy: Any) -> None:
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, policy)
    x, target = stack_batch(0, here.rank)
    found, expected = [], []
    for m, out in ((model, found), (reference, expected)):
        leaf = x.clone().requires_grad_()
        out.append(torch.autograd.grad((m(leaf) - target).square().mean(), leaf)[0])
    assert_close(found[0], expected[0])
    # Nothing of it stays: neither a gradient of a weight nor a full buffer, and the next step is a clean one.
    assert all(grad is None for grad in gather_grads(model).values())
    train_rank(model, sgd(model), [1], stack_batch, here.rank)
    train_ref(reference, sgd(reference), [1], stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_inputs_only(world_size: int) -> None:
    run(world_size, for_each, [(fsdp.by_class("Block"),), (None,)], gradients_of_inputs_only)


def retained(policy: Any, reshard: bool | None, create_graph: bool, stage: int) -> None:
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard, stage=stage)
    optimizer, reference_optimizer = sgd(model), sgd(reference)
    for step in range(2):
        for m, o, batch in (
            (model, optimizer, stack_batch(step, here.rank)),
            (reference, reference_optimizer, joined(stack_batch, step, here.world_size)),
        ):
            o.zero_grad()
            loss = mse(m, batch)
            if create_graph:
                loss.backward(create_graph=True)
            else:
                loss.backward(retain_graph=True)
                loss.backward(retain_graph=True)
                (3 * loss).backward()
            del loss
        # What create_graph hangs on a gradient is not part of its value.
        for parameter in reference.parameters():
            parameter.grad = parameter.grad.detach()
        assert_parity(model, reference)
        optimizer.step()
        reference_optimizer.step()
    assert_parity(model, reference)
    model.zero_grad()
    train_rank(model, optimizer, [2], stack_batch, here.rank)
    assert_rested(model)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_retain_graph_and_create_graph(world_size: int) -> None:
    blocks = fsdp.by_class("Block")
    combinations = [(blocks, reshard, create, 3) for reshard in (None, True, False) for create in (False, True)]
    if world_size == 2:
        combinations += [(blocks, None, create, stage) for create in (False, True) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, retained)


def functional_derivatives(name: str, policy: Any, reshard: bool | None) -> None:
    """`torch.autograd.functional`: several backwards over one graph, or over the graph of a backward."""
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard)
    x, v = stack_batch(0, here.rank)[0][:1], stack_batch(1, here.rank)[0][:1]
    derive = getattr(torch.autograd.functional, name)

    def value(m: nn.Module) -> Tensor:
        if name == "jacobian":
            return derive(m, x)
        if name == "jvp":
            return derive(m, x, v)[1]
        scalar = lambda z: m(z).square().sum()  # noqa: E731
        return derive(scalar, x) if name == "hessian" else derive(scalar, x, v)[1]

    assert_close(value(model), value(reference))
    # An optimizer built now trains the model.
    train_rank(model, sgd(model), [1], stack_batch, here.rank)
    train_ref(reference, sgd(reference), [1], stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_functional_derivatives_by_inputs(world_size: int) -> None:
    names = ("jacobian", "jvp", "hvp", "hessian")
    combinations = [(name, fsdp.by_class("Block"), reshard) for name in names for reshard in (None, True)]
    run(world_size, for_each, combinations, functional_derivatives)


class Energy(nn.Module):
    """Hands on a derivative of its own by its input, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda v: self.layer(v).tanh().square().sum())(x)


def derivatives_inside(stage: int, policy: Any) -> None:
    """`torch.func.grad` switches saved-tensor hooks off: refused by name in a forward, and works if they are off around it."""
    model = nn.Sequential(Energy(), Energy())
    reference = copy.deepcopy(model)
    fsdp.fsdp_wrap(model, policy, stage=stage)

    def off(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("off"):
            output = m(batch[0])
        return output.square().mean()

    batches = [stack_batch(0, rank) for rank in range(here.world_size)]
    expect_loud(lambda: model(batches[here.rank][0]), "torch.func.grad", "disable_saved_tensors_hooks")
    off(model, batches[here.rank]).backward()
    mean_over_ranks(reference, off, lambda step, rank: batches[rank], 0)
    assert_parity(model, reference)


@pytest.mark.parametrize("world_size", [1, 2])
def test_functional_derivatives_inside_a_forward(world_size: int) -> None:
    combinations = [(stage, policy) for stage in (0, 3) for policy in (None, fsdp.by_class("Energy"))]
    run(world_size, for_each, combinations, derivatives_inside)


class TwoOutputs(nn.Module):
    """Two outputs of two layers, of which the loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5, dtype=torch.float64)
        self.b = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class UsesOne(nn.Module):
    """Two of them in a row; only one output of each is used, a different one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TwoOutputs()
        self.second = TwoOutputs()
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)[1])[0])


def unused_outputs(policy: Any, reshard: bool | None) -> None:
    model, reference = seeded(UsesOne), seeded(UsesOne)
    fsdp.fsdp_wrap(model, policy, reshard_after_forward=reshard)
    train_rank(model, adamw(model), range(2), stack_batch, here.rank)
    train_ref(reference, adamw(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert gather_grads(model)["first.a.weight"] is None
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unused_outputs(world_size: int) -> None:
    combinations = [(fsdp.by_class(TwoOutputs), None), (None, True), (fsdp.by_class(nn.Linear), None)]
    run(world_size, for_each, combinations, unused_outputs)


class Catching(Stack):
    """Its forward catches what a block raises, and goes on without that block."""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            try:
                x = block(x if i != 1 else x[:, :4])  # block 1 does not take four features
            except RuntimeError:
                pass
        return self.head(x)


def caught_inside(reshard: bool | None) -> None:
    model, reference = seeded(Catching, 3), seeded(Catching, 3)
    fsdp.fsdp_wrap(model, fsdp.by_class("Block"), reshard_after_forward=reshard)
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_caught_inside_the_forward(world_size: int) -> None:
    run(world_size, for_each, [(None,), (False,)], caught_inside)


# ---- hooks


def full_weights_in_hooks(when: str, policy: Any, stage: int) -> None:
    model, reference = seeded(Stack, 2), seeded(Stack, 2)
    seen: list[str] = []

    def look(kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            assert module.linear.weight.shape == (5, 5), (kind, module.linear.weight.shape)
            assert float(module.linear.weight.abs().sum()) > 0
            seen.append(kind)

        return hook

    def register() -> None:
        for block in model.blocks:
            block.register_forward_pre_hook(look("forward pre"))
            block.register_forward_hook(look("forward"))
            block.register_full_backward_pre_hook(look("backward pre"))
            block.register_full_backward_hook(look("backward"))

    if when == "before":
        register()
    fsdp.fsdp_wrap(model, policy, stage=stage)
    if when == "after":
        register()
    train_rank(model, sgd(model), range(2), stack_batch, here.rank)
    kinds = ["forward pre", "forward"] * 2 + ["backward pre", "backward"] * 2
    assert seen == kinds * 2, seen
    train_ref(reference, sgd(reference), range(2), stack_batch, here.world_size)
    assert_parity(model, reference)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_module_hooks_see_full_weights(world_size: int) -> None:
    combinations = [(when, policy, 3) for when in ("before", "after") for policy in (fsdp.by_class("Block"), None)]
    if world_size == 2:
        combinations += [("after", fsdp.by_class("Block"), stage) for stage in (0, 1, 2)]
    run(world_size, for_each, combinations, full_weights_in_hooks)


def parameter_hooks(when: str, n: int, stage: int) -> None:
    """A tensor hook sees this rank's own full gradient and may change it."""
    model = Vec(n, 1.0)
    seen: list[Tensor] = []

    def hook(grad: Tensor) -> Tensor:
        seen.append(grad.detach().clone())
        return 2 * grad

    if when == "before":
        model.w.register_hook(hook)
    fsdp.fsdp_wrap(model, stage=stage)
    if when == "after":
        handle = model.w.register_hook(hook)
    for call in range(2):
        model.zero_grad()
        model(here.rank + 1).backward()
        assert len(seen) == call + 1
        assert_close(seen[-1], torch.full((n,), here.rank + 1.0, dtype=torch.float64), bitwise=True)
        assert_all(gather_grads(model), here.world_size + 1)
    if when == "after":
        handle.remove()
        model.zero_grad()
        model(1.0).backward()
        assert len(seen) == 2
        assert_all(gather_grads(model), 1.0)
    assert_rested(model)


def post_accumulate_hooks(when: str, n: int, stage: int) -> None:
    """The hook runs once per synchronised backward, after the reduction, with the parameter and its slice."""
    model = Vec(n, 1.0)
    seen: list[list[float]] = []

    def hook(parameter: nn.Parameter) -> None:
        assert parameter is model.w
        assert parameter.grad.shape == parameter.shape
        seen.append(parameter.grad.tolist())

    if when == "before":
        model.w.register_post_accumulate_grad_hook(hook)
    fsdp.fsdp_wrap(model, stage=stage)
    if when == "after":
        model.w.register_post_accumulate_grad_hook(hook)
    local, mean = model.w.numel(), (here.world_size + 1) / 2
    model(here.rank + 1).backward()
    assert len(seen) == 1 or not local, seen
    assert all(values == [mean] * local for values in seen), seen
    with model.no_sync():
        model(here.rank + 1).backward()
    model(here.rank + 1).backward()
    assert len(seen) == 2 or not local, seen
    if local:
        assert seen[-1] == [3 * mean] * local, seen
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameter_hooks(world_size: int) -> None:
    stages = (3, 0, 1, 2) if world_size == 2 else (3,)
    combinations = [(when, n, stage) for when in ("before", "after") for n in (1, 5) for stage in stages]
    run(world_size, for_each, combinations, parameter_hooks)
    run(world_size, for_each, combinations, post_accumulate_hooks)
