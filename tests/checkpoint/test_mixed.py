"""Models that are more than one wrapped module: plain parts, ignored parts, low precision, copies, thawed parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import Stack, assert_close, full_shape, gather, here, plain, run

from .parts import fully, same_bits, save_and_read
from .reader import manifest_of, read


class Outer(nn.Module):
    """A plain module around a wrapped one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        self.scale = nn.Parameter(torch.full((5,), 2.0))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x):
        return self.inner(x) * self.scale


def plain_around_units(root):
    def build(seed):
        torch.manual_seed(seed)
        model = Outer()
        fsdp.fsdp_wrap(model.inner)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = build(0)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    handle = fsdp.save_checkpoint(root, model, optimizer, step=1)
    stored = read(handle.path)
    assert torch.equal(stored["scale"], plain(model.scale)) and stored["seen"].item() == 3
    assert torch.equal(stored["optimizer/scale/exp_avg"], optimizer.state[model.scale]["exp_avg"])
    found = gather(model.inner)
    assert torch.equal(stored["inner.0.weight"], found["0.weight"])

    other, its = build(1)
    fsdp.load_checkpoint(root, other, its)
    assert torch.equal(plain(other.scale), plain(model.scale))
    same_bits(gather(other.inner), found)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], its.state[q][key]), key


def test_a_plain_module_around_units(tmp_path):
    run(2, plain_around_units, str(tmp_path))
    tensors = manifest_of(tmp_path / "step-1")["tensors"]
    assert tensors["scale"]["kind"] == "replicated" and tensors["inner.0.weight"]["kind"] == "sharded"
    model = Outer()
    assert fsdp.load_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters())).unexpected == []
    same_bits(dict(model.state_dict()), {n: t for n, t in read(tmp_path / "step-1").items() if "/" not in n})


def ignored_parts(root):
    torch.manual_seed(0)
    model = Stack(2)
    model = fsdp.fsdp_wrap(model, ignored=[model.head])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(3, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    saved = {name: plain(p) for name, p in model.named_parameters() if name.startswith("head")}
    handle = fsdp.save_checkpoint(root, model, optimizer, step=1)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fsdp.load_checkpoint(root, model, optimizer)
    for name, value in saved.items():
        assert torch.equal(plain(dict(model.named_parameters())[name]), value)
        assert torch.equal(read(handle.path)[name], value)


def test_ignored_parameters(tmp_path):
    run(2, ignored_parts, str(tmp_path))
    model = Stack(2)
    fsdp.load_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()))
    same_bits(dict(model.state_dict()), {n: t for n, t in read(tmp_path / "step-1").items() if "/" not in n})


def low_precision(root):
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Stack(2, dtype=torch.float32), fsdp.by_name("blocks.*"), precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).float().sum().backward()
    optimizer.step()
    live = save_and_read(root, model, optimizer, step=1)
    assert {t.dtype for t in live.values()} == {torch.float32}
    model = fsdp.fsdp_wrap(Stack(2, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters())
    fsdp.load_checkpoint(root, model, optimizer)
    same_bits(fully(model, optimizer), live)


def test_masters_are_what_is_stored(tmp_path):
    run(2, low_precision, str(tmp_path))


def an_average(root):
    """A copy of the model beside it, as moving averages are kept."""
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Stack(2))
    average = copy.deepcopy(model)
    with torch.no_grad():
        for p in average.parameters():
            p.mul_(0.5)
    expected = gather(average)
    fsdp.save_checkpoint(root + "/model", model, step=1)
    save_and_read(root + "/average", average, step=1)
    fsdp.load_checkpoint(root + "/average", model)
    same_bits(gather(model), expected)


def test_a_copy_of_a_model(tmp_path):
    run(2, an_average, str(tmp_path))


def thawed(root):
    torch.manual_seed(0)
    model = Stack(2)
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    model = fsdp.fsdp_wrap(model)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    for p in model.blocks[0].parameters():
        p.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    live = save_and_read(root, model, optimizer, step=1)
    other = fsdp.fsdp_wrap(Stack(2))
    its = torch.optim.Adam(other.parameters())
    fsdp.load_checkpoint(root, other, its)
    same_bits(fully(other, its), live)


def test_parameters_thawed_after_wrapping(tmp_path):
    run(2, thawed, str(tmp_path))


def settings_that_are_tensors(root):
    model = fsdp.fsdp_wrap(Stack(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    fsdp.save_checkpoint(root, model, optimizer, step=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0), foreach=False)
    fsdp.load_checkpoint(root, model, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor) and lr.item() == 0.25 and lr.shape == ()


def test_a_learning_rate_that_is_a_tensor(tmp_path):
    run(2, settings_that_are_tensors, str(tmp_path))


def every_optimizer(root):
    """State of any shape that torch's element-wise optimizers keep comes back, on another world size too."""
    makers = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.1),
        "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
        "radam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
        "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
        "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.1),
        "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
        "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.1),
        "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
        "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    }
    x = torch.ones(2, 5, dtype=torch.float64)
    for name, make in makers.items():
        torch.manual_seed(0)
        reference = Stack(1)
        its = make(reference.parameters())
        for step in range(4):
            its.zero_grad()
            reference(x * (step + 1)).square().mean().backward()
            its.step()
        torch.manual_seed(0)
        model = fsdp.fsdp_wrap(Stack(1))
        optimizer = make(model.parameters())
        for step in range(4):
            if step == 2:
                fsdp.save_checkpoint(f"{root}/{name}", model, optimizer, step=step)
                torch.manual_seed(1)
                model = fsdp.fsdp_wrap(Stack(1))
                optimizer = make(model.parameters())
                fsdp.load_checkpoint(f"{root}/{name}", model, optimizer)
            optimizer.zero_grad()
            model(x * (step + 1)).square().mean().backward()
            optimizer.step()
        found = gather(model)
        for key, value in reference.named_parameters():
            assert_close(found[key], value.detach(), what=f"{name} {key}")
            assert full_shape(dict(model.named_parameters())[key]) == value.shape and here.world_size == 3


@pytest.mark.slow
def test_state_of_every_element_wise_optimizer(tmp_path):
    run(3, every_optimizer, str(tmp_path), timeout_s=60)
