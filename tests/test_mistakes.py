"""What a newcomer forgets or swaps is an error, or a warning, that says what to write instead."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite import gradient_part
from fsdplite.errors import ConfigError
from tests.harness import assert_close, expect_loud, gather, run


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank as torchrun starts it, which has joined nothing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_ranks_that_joined_no_group_do_not_wrap(second_of_two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ConfigError, match="WORLD_SIZE=2") as refused:
            fsdp.fsdp_wrap(model)
        assert "fsdp.init_distributed()" in refused.value.cure and refused.value.rank == int(rank)
        assert type(model) is nn.Linear and model.weight is weight
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    fsdp.fsdp_wrap(model)


def test_ranks_that_joined_no_group_do_not_save_over_each_other(
    second_of_two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain module: rank 0 may save it alone, and each rank may load it for itself."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="fsdp.init_distributed"):
        fsdp.save_checkpoint(tmp_path, model, step=1)
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    fsdp.save_checkpoint(tmp_path, model, step=1)
    monkeypatch.setenv("RANK", "1")
    assert fsdp.load_checkpoint(tmp_path, model).step == 1


def gradients_of_two_layers() -> list[torch.Tensor]:
    """A weight of 18 elements, which two ranks hold parts of, a bias and another weight."""
    model = fsdp.fsdp_wrap(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1, bias=False)), fsdp.by_class(nn.Linear))
    model(torch.ones(2, 6)).sum().backward()
    return [p.grad for p in model.parameters()]


BY_HAND: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "square": lambda grads: (grads[0] ** 2).sum(),
    "abs": lambda grads: grads[0].abs().max(),
    "mean": lambda grads: grads[0].mean(),
    "std": lambda grads: torch.std(grads[0], False),
    "dot": lambda grads: grads[0] @ grads[0],
    "product": lambda grads: torch.sum(grads[0].detach() * grads[0], dtype=torch.float64),
    "cat": lambda grads: torch.cat([g.flatten() for g in grads]).norm(),
    "float": lambda grads: torch.linalg.vector_norm((0.5 * grads[0]).double()),
}
NOT_MEANT: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "comparison": lambda grads: (torch.isfinite(grads[0]).all(), (grads[0] > 0).sum(), (grads[0] == 0).any()),
    "along a dimension": lambda grads: (grads[0] ** 2).sum(dim=0),
    "elements": lambda grads: grads[0].mul_(0.5) * 2 + torch.maximum(grads[0], grads[0]),
    "shown": lambda grads: (repr(grads[0]), str(grads[0] ** 2)),
}


def warned_by(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if "gradient of parameter" in str(w.message)]


def reductions_by_hand() -> None:
    gradient_part._warned = False  # as in a new process
    grads = gradients_of_two_layers()
    for name, call in NOT_MEANT.items():
        assert not warned_by(lambda call=call: call(grads)), name
    for name, call in BY_HAND.items():
        gradient_part._warned = False
        plain = [g.as_subclass(torch.Tensor).clone() for g in grads]
        assert torch.equal(call(grads), call(plain)), name
        gradient_part._warned = False
        (warning,) = warned_by(lambda call=call: [call(grads) for _ in range(2)])
        assert warning.filename == __file__ and warning.category is UserWarning, name
        part = f"this rank's part of it ({grads[0].numel()} of 18 elements)"
        for needle in ("'0.weight'", part, "clip_grad_norm_", "fsdp.full_grad"):
            assert needle in str(warning.message), (name, needle)


def test_reductions_of_gradients_by_hand_bring_one_warning() -> None:
    run(2, reductions_by_hand)


def whole_gradients(stage: int) -> None:
    """Where this rank holds all of it the number is right."""
    gradient_part._warned = False
    model = fsdp.fsdp_wrap(nn.Linear(6, 3), stage=stage)
    model(torch.ones(2, 6)).sum().backward()
    for p in model.parameters():
        assert not warned_by(lambda p=p: (p.grad**2).sum())


def test_reductions_of_whole_gradients_bring_none() -> None:
    run(1, whole_gradients, 3)
    run(2, whole_gradients, 0)


def parts_are_plain_tensors() -> None:
    """What arithmetic made of a gradient is assigned, copied, stored and combined as before."""
    gradient_part._warned = False
    model = fsdp.fsdp_wrap(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 6)).sum().backward()
    before = gather(model)
    weight = model.weight
    half = weight.grad * 0.5
    expected = weight.grad.as_subclass(torch.Tensor) * 0.5
    file = io.BytesIO()
    torch.save({"half": half}, file)
    file.seek(0)
    for same in (torch.load(file)["half"], copy.deepcopy(half)):
        assert type(same) is torch.Tensor and torch.equal(same, expected)
    assert nn.Parameter(half).requires_grad and torch.equal(torch.zeros(1).to(half), torch.zeros(1))
    expect_loud(lambda: half + weight, "full_params")
    assert torch.equal(half * weight.grad, expected * expected * 2)
    half += 1
    half -= 1
    weight.grad = half
    assert type(weight.grad) is type(model.bias.grad)
    with torch.no_grad():
        model.bias.add_(model.bias.grad * -1.0)
    model.bias.grad = None
    optimizer.step()
    after = gather(model)
    assert_close(after["weight"], before["weight"] - 0.5 * 2.0)  # two rows of ones in each rank's batch
    assert_close(after["bias"], before["bias"] - 2.0)


def test_what_arithmetic_makes_of_a_gradient_is_used_as_before() -> None:
    run(2, parts_are_plain_tensors)


def state_of_a_plain_run() -> None:
    """It is refused by the step after it was loaded, also when steps were taken before; the right one is taken."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = nn.Linear(6, 3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    step(plain, plain_optimizer)
    model = fsdp.fsdp_wrap(nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
        good = copy.deepcopy(optimizer.state_dict())
        before = gather(model)
        optimizer.load_state_dict(plain_optimizer.state_dict())
        for _ in range(2):
            expect_loud(lambda: step(model, optimizer), "exp_avg", "whole parameter", "(3, 6)", "load", "'weight'")
        for name, value in gather(model).items():
            assert_close(value, before[name])
        optimizer.zero_grad()
        optimizer.load_state_dict(good)


def test_a_plain_runs_optimizer_state_is_refused_after_the_first_step_too() -> None:
    run(2, state_of_a_plain_run)


CALLS: dict[str, tuple[Callable[[nn.Module, Any, str], Any], str]] = {
    "load, swapped": (lambda model, optimizer, root: fsdp.load_checkpoint(root, optimizer, model), "AdamW"),
    "load, root last": (lambda model, _, root: fsdp.load_checkpoint(model, root), "str"),
    "save, swapped": (lambda model, optimizer, root: fsdp.save_checkpoint(root, optimizer, model, step=1), "AdamW"),
    "save, root last": (lambda model, _, root: fsdp.save_checkpoint(model, root, step=1), "str"),
    "full_params": (lambda *_: fsdp.full_params("layers.0").__enter__(), "str"),
    "full_state_dict": (lambda model, optimizer, _: fsdp.full_state_dict(optimizer), "AdamW"),
    "full_grad": (lambda model, *_: fsdp.full_grad("weight", model), "str"),
    "mark_updated": (lambda model, optimizer, _: fsdp.mark_updated(optimizer), "AdamW"),
    "summary": (lambda model, optimizer, _: fsdp.summary(optimizer), "AdamW"),
    "trace": (lambda model, optimizer, _: fsdp.trace(optimizer).__enter__(), "AdamW"),
    "fsdp_wrap": (lambda *_: fsdp.fsdp_wrap(nn.Linear), "the class Linear"),
    "clip_grad_norm_": (lambda model, *_: model.clip_grad_norm_(model.parameters(), 1.0), "generator"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_in_another_order_are_told_the_form_of_the_call(name: str, tmp_path: Path) -> None:
    model = fsdp.fsdp_wrap(nn.Linear(2, 2))
    call, found = CALLS[name]
    with pytest.raises(ConfigError, match=f"found: {found}") as refused:
        call(model, torch.optim.AdamW(model.parameters()), str(tmp_path))
    assert name.split(",")[0] in refused.value.cure and not any(tmp_path.iterdir())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_state_dict_of_a_wrapper_is_told_from_one_of_another_model(prefix: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = fsdp.fsdp_wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), fsdp.by_class(nn.Linear))
    state = {prefix + name: value for name, value in plain.state_dict().items()}
    with pytest.raises(ConfigError, match=f"begin with '{prefix}'") as refused:
        model.load_state_dict(state)
    eval(refused.value.cure, {"model": model, "state": state})  # the cure as it is printed
    for name, value in gather(model).items():
        assert torch.equal(value, plain.state_dict()[name])
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({prefix + "0.weight": state[prefix + "0.weight"], "0.bias": torch.zeros(2)})


def test_a_module_that_takes_the_prefix_off_by_itself_may_do_so() -> None:
    def strip(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in list(state):
            state[name.removeprefix("module.")] = state.pop(name)

    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(strip)
    fsdp.fsdp_wrap(model)
    model.load_state_dict({"module.weight": torch.ones(2, 2), "module.bias": torch.zeros(2)})
    assert torch.equal(gather(model)["weight"], torch.ones(2, 2))
