"""Optimizer state and groups by name, without side effects. Cases K17, K19, K21, K23, K24."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import assert_close, expect_loud, gather, here, plain, run

from .parts import fully, same_bits, save_and_read


class Two(nn.Sequential):
    def __init__(self, dtype=torch.float64) -> None:
        super().__init__(nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype))


def K17_body(root, fused):
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Two(torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(301)
    save_and_read(root, model, optimizer, step=1)
    model = fsdp.fsdp_wrap(Two(torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    fsdp.load_checkpoint(root, model, optimizer)
    steps = [optimizer.state[p]["step"] for p in model.parameters()]
    assert len(steps) == 4
    for step in steps:
        assert step.item() == 301 and step.dtype == torch.float32 and step.shape == () and step.device.type == "cpu"
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [302.0] * 4


@pytest.mark.parametrize("fused", [None, True])
def test_K17_step_counters(tmp_path, fused):
    run(2, K17_body, str(tmp_path), fused)


def group_of(optimizer, model, name):
    parameter = dict(model.named_parameters())[name]
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def K19_body(root, wrap):
    def build():
        torch.manual_seed(0)
        model = Two()
        if wrap:
            model = fsdp.fsdp_wrap(model)
        return model, dict(model.named_parameters())

    model, p = build()
    a = {"params": [p["0.weight"]], "lr": 0.1, "weight_decay": 0, "betas": (0.9, 0.99)}
    b = {"params": [p["0.bias"], p["1.bias"]], "lr": 0.01, "foreach": None}
    c = {"params": [p["1.weight"]], "lr": 0.001, "weight_decay": 0.1, "tag": "c"}
    optimizer = torch.optim.AdamW([a, b, c])
    fsdp.save_checkpoint(root, model, optimizer, step=1)

    model, p = build()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p["1.weight"]], "lr": 7.0},
            {"params": [p["0.weight"]], "lr": 8.0},
            {"params": [p["1.bias"], p["0.bias"]], "lr": 9.0, "foreach": False},
        ]
    )
    before = [[id(q) for q in g["params"]] for g in optimizer.param_groups]
    fsdp.load_checkpoint(root, model, optimizer)
    assert [[id(q) for q in g["params"]] for g in optimizer.param_groups] == before
    group = group_of(optimizer, model, "0.weight")
    assert group["lr"] == 0.1 and group["betas"] == (0.9, 0.99) and type(group["betas"]) is tuple
    assert group["weight_decay"] == 0
    for name in ("0.bias", "1.bias"):
        assert group_of(optimizer, model, name)["lr"] == 0.01 and group_of(optimizer, model, name)["foreach"] is None
    group = group_of(optimizer, model, "1.weight")
    assert group["lr"] == 0.001 and group["tag"] == "c" and group["weight_decay"] == 0.1

    # Parameters whose groups were saved with different settings cannot share one.
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer), "0.weight", "different settings")
    assert optimizer.param_groups[0]["lr"] == 5.0


def test_K19_groups_by_their_members(tmp_path):
    run(2, K19_body, str(tmp_path / "a"), True)
    run(1, K19_body, str(tmp_path / "b"), False, group=False)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ls = nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)])

    def forward(self, x, used=(0, 2)):
        for index in used:
            x = torch.tanh(self.ls[index](x))
        return x


def train(model, optimizer, steps, rank, size, **options):
    for step in steps:
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        rows = 4 // size
        optimizer.zero_grad()
        model(x[rank * rows : (rank + 1) * rows], **options).square().mean().backward()
        optimizer.step()


def K21_body(root):
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Three())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, range(2), here.rank, here.world_size)
    live = save_and_read(root, model, optimizer, step=2)
    assert not any("ls.1" in name for name in live if name.startswith("optimizer"))

    model = fsdp.fsdp_wrap(Three())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fsdp.load_checkpoint(root, model, optimizer)
    same_bits(fully(model, optimizer), live)
    assert not optimizer.state.get(dict(model.named_parameters())["ls.1.weight"])
    train(model, optimizer, range(2, 4), here.rank, here.world_size)

    torch.manual_seed(0)
    plain_model = Three()
    plain_optimizer = torch.optim.Adam(plain_model.parameters(), lr=0.1)
    train(plain_model, plain_optimizer, range(4), 0, 1)
    found = gather(model)
    for name, value in plain_model.named_parameters():
        assert_close(found[name], value.detach(), what=name)


def test_K21_gaps(tmp_path):
    run(2, K21_body, str(tmp_path))


class RaisingAdam(torch.optim.Adam):
    def step(self, closure=None):
        raise AssertionError("step was called")


def K23_body(root, wrap):
    torch.manual_seed(0)
    model = Two(torch.float32)
    if wrap:
        model = fsdp.fsdp_wrap(model)
    optimizer = RaisingAdam(model.parameters())
    hooks = []
    optimizer.register_step_pre_hook(lambda *a: hooks.append("pre"))
    optimizer.register_step_post_hook(lambda *a: hooks.append("post"))
    optimizer.register_state_dict_post_hook(lambda *a: hooks.append("state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *a: hooks.append("load"))
    model.register_forward_pre_hook(lambda *a: hooks.append("forward"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = scheduler.state_dict()
    rng = torch.get_rng_state()
    fsdp.save_checkpoint(root, model, optimizer, step=0)
    fsdp.load_checkpoint(root, model, optimizer)
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    hooks.clear()
    gradients = [p.grad for p in model.parameters()]
    copies = [plain(g) for g in gradients]
    fsdp.save_checkpoint(root, model, optimizer, step=1)
    fsdp.load_checkpoint(root, model, optimizer)
    assert all(p.grad is g and torch.equal(plain(g), c) for p, g, c in zip(model.parameters(), gradients, copies))
    assert not hooks and scheduler.state_dict() == before and not optimizer.state
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("world_size", [1, 2])
def test_K23_no_side_effects(tmp_path, world_size):
    run(world_size, K23_body, str(tmp_path / "wrapped"), True)
    run(1, K23_body, str(tmp_path / "plain"), False, group=False)


def freeze(model, *names):
    for name, p in model.named_parameters():
        if name.startswith(names):
            p.requires_grad_(False)


def K24_body(root):
    def build(wrap=True):
        torch.manual_seed(0)
        model = Three()
        freeze(model, "ls.0")
        model = fsdp.fsdp_wrap(model) if wrap else model
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    every = {"used": (0, 1, 2)}
    model, optimizer = build()
    train(model, optimizer, range(2), here.rank, here.world_size, **every)
    freeze(model, "ls.1")
    train(model, optimizer, range(2, 3), here.rank, here.world_size, **every)
    live = save_and_read(root, model, optimizer, step=3)
    assert any(n.startswith("optimizer/ls.1") for n in live) and not any(n.startswith("optimizer/ls.0") for n in live)

    model, optimizer = build()
    freeze(model, "ls.1")
    fsdp.load_checkpoint(root, model, optimizer)
    same_bits(fully(model, optimizer), live)
    train(model, optimizer, range(3, 5), here.rank, here.world_size, **every)

    reference, optimizer = build(wrap=False)
    train(reference, optimizer, range(2), 0, 1, **every)
    freeze(reference, "ls.1")
    train(reference, optimizer, range(2, 5), 0, 1, **every)
    found = gather(model)
    for name, value in reference.named_parameters():
        assert_close(found[name], value.detach(), what=name)

    handle = fsdp.save_checkpoint(root, model, optimizer=None, step=9, trainable_only=True)
    from .reader import read

    assert set(read(handle.path)) == {"ls.2.weight", "ls.2.bias"}
    report = fsdp.load_checkpoint(root, model)
    assert report.step == 9 and report.missing == []


def test_K24_frozen_and_later_frozen(tmp_path):
    run(2, K24_body, str(tmp_path))


def strange_state(root):
    model = fsdp.fsdp_wrap(Two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[next(model.parameters())]["blocks"] = torch.zeros(5)
    expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=1), "0.weight", "blocks", "element-wise")
    expect_loud(
        lambda: fsdp.save_checkpoint(root, model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), step=1),
        "parameter group 0",
        "not in the model",
    )


def test_state_that_cannot_be_resharded_is_refused(tmp_path):
    run(2, strange_state, str(tmp_path))
    assert not list(tmp_path.iterdir())


class Counted(torch.optim.Optimizer):
    """Sums gradients, and counts its steps in a tensor of one element, as the slices of small parameters are."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["total"], state["step"] = torch.zeros_like(parameter), torch.zeros(1)
            state["step"] += 1
            state["total"] += parameter.grad
            parameter -= state["total"] / state["step"]


class Sizes(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        for n in range(1, 8):
            setattr(self, f"p{n}", nn.Parameter(torch.full((n,), value, dtype=torch.float64)))

    def forward(self, x):
        return x * sum(p.sum() for p in self.parameters())


def save_counted(root):
    model = fsdp.fsdp_wrap(Sizes(1.0))
    optimizer = Counted(model.parameters())
    model(torch.tensor(0.5, dtype=torch.float64)).backward()
    optimizer.step()
    fsdp.save_checkpoint(root, model, optimizer, step=1)


def load_counted(root):
    model = fsdp.fsdp_wrap(Sizes(0.0))
    optimizer = Counted(model.parameters())
    fsdp.load_checkpoint(root, model, optimizer)
    model(torch.tensor(0.5, dtype=torch.float64)).backward()
    optimizer.step()
    for name, value in gather(model).items():
        assert torch.equal(value, torch.zeros_like(value)), name  # 1 - 0.5 / 1 - (0.5 + 0.5) / 2


@pytest.mark.parametrize("saved_by, loaded_by", [(2, 3), (3, 1)])
def test_counters_of_one_element_are_no_moments(tmp_path, saved_by, loaded_by):
    run(saved_by, save_counted, str(tmp_path))
    run(loaded_by, load_counted, str(tmp_path))
