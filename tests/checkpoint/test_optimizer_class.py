"""Optimizer state of one class offered to another."""

from __future__ import annotations

import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import expect_loud


class Own(torch.optim.AdamW):
    """A user's variant."""


class OwnSGD(torch.optim.SGD):
    """Another."""


def trained(make, n=3):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(n)])
    optimizer = make(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_another_class_of_optimizer(tmp_path):
    """Its state means something else there: an error that names both, and left out when not strict."""
    trainees = {
        cls.__name__: trained(cls) for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, Own, OwnSGD)
    }
    for name, (model, optimizer) in trainees.items():
        fsdp.save_checkpoint(tmp_path / name, model, optimizer, step=1)
    fits = {("AdamW", "Own"), ("SGD", "OwnSGD")}  # a subclass goes on with its base's state
    adams = ("Adam", "AdamW", "Own")
    alike = {(one, other) for one in adams for other in adams} | {("OwnSGD", "SGD")}
    for saved, (source, its) in trainees.items():
        for name in trainees:
            model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
            optimizer = type(trainees[name][1])(model.parameters(), lr=0.75)

            def load(**options):
                return fsdp.load_checkpoint(tmp_path / saved, model, optimizer, **options)

            before = [p.detach().clone() for p in model.parameters()]
            if saved == name or (saved, name) in fits:
                assert load().notes == [] and optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"]
                continue
            expect_loud(load, f"is {saved}", f"is {name}", "strict=False", "in 1 point;")
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before)) and not optimizer.state
            decoupled = optimizer.param_groups[0].get("decoupled_weight_decay")
            (note,) = load(strict=False).notes
            assert saved in note and name in note and all(map(torch.equal, model.parameters(), source.parameters()))
            assert optimizer.param_groups[0]["lr"] == 0.75
            assert optimizer.param_groups[0].get("decoupled_weight_decay") is decoupled
            if (saved, name) not in alike:
                assert not optimizer.state and "left out" in note
                continue
            for mine, theirs in zip(model.parameters(), source.parameters()):
                assert optimizer.state[mine].keys() == its.state[theirs].keys()
                for key, value in its.state[theirs].items():
                    assert torch.equal(optimizer.state[mine][key], value), key


def test_variants_of_one_class(tmp_path):
    """How an update is computed is no other class, and an offloaded optimizer is named as its class."""
    model, optimizer = trained(torch.optim.AdamW)
    fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        other = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
        fsdp.load_checkpoint(tmp_path, other, torch.optim.AdamW(other.parameters(), **options))
    for cls, fits in ((torch.optim.AdamW, True), (Own, True), (torch.optim.Adam, False)):
        other = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
        fsdp.fsdp_wrap(other, fsdp.by_class("Linear"), offload=fsdp.Offload(optimizer="cpu"))
        moved = fsdp.offloaded(cls, other)
        if not fits:
            expect_loud(lambda: fsdp.load_checkpoint(tmp_path, other, moved), "AdamW", cls.__name__)
            continue
        fsdp.load_checkpoint(tmp_path, other, moved)
        fsdp.save_checkpoint(tmp_path / "moved", other, moved, step=1)
        fsdp.load_checkpoint(tmp_path / "moved", model, cls(model.parameters()))
