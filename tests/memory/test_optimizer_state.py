"""optimizer.state, groups and hooks of an offloaded optimizer: what a program does there counts as with the plain."""

from __future__ import annotations

import collections
import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.errors import OffloadError
from tests.harness import expect_loud, for_each, here, run
from tests.memory.parts import Net, assert_same_bits, build
from tests.memory.test_offloaded import WIDE, compare, make, place

BOTH = ("nvme", "cpu")


def wide() -> nn.Module:
    """Parameters that are cut into pieces, and chunks with several of them."""
    return Net(1, **WIDE)


def steps(model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    seen = []
    for step in numbers:
        torch.manual_seed(step)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * step + here.rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def both(folder: str, loop: Any, **options: Any) -> None:
    compare(folder, [place(kind, folder) for kind in BOTH], loop, wide, **options)


# ---- what is written to a state


def write_item(state: Any) -> None:
    state["exp_avg"] = torch.full_like(state["exp_avg"].as_subclass(Tensor), 0.25)
    state["step"] = torch.tensor(40.0)


def write_update(state: Any) -> None:
    state.update(exp_avg_sq=torch.full_like(state["exp_avg_sq"].as_subclass(Tensor), 0.5), step=torch.tensor(7.0))


def write_again(state: Any) -> None:
    taken = state.pop("exp_avg"), state.pop("step")
    assert "exp_avg" not in state and len(state) == 1 and state.pop("exp_avg", None) is None
    state["exp_avg"] = taken[0] * 2
    assert torch.equal(state.setdefault("step", torch.tensor(3.0)), torch.tensor(3.0))
    assert state.setdefault("step", torch.tensor(9.0)) == 3.0


def write_in_place(state: Any) -> None:
    state["exp_avg"].mul_(3.0)
    state["step"].fill_(11.0)


def write_nothing(state: Any) -> None:
    state.clear()
    assert not state


def written_body(folder: str, write: Any) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        seen = steps(model, optimizer, range(2))
        for p in model.parameters():
            write(optimizer.state[p])
        return seen + steps(model, optimizer, range(2, 4)), optimizer

    both(folder, loop)


def filtered_body(folder: str) -> None:
    """A state that is made of states of the same view, and one that was taken out and is put back."""

    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        seen = steps(model, optimizer, range(2))
        names = {id(p): name for name, p in model.named_parameters()}
        kept = {p: s for p, s in optimizer.state.items() if "norm" not in names[id(p)]}
        optimizer.state = collections.defaultdict(dict, kept)
        seen += steps(model, optimizer, range(2, 3))
        first = next(iter(model.parameters()))
        taken = optimizer.state.pop(first)
        seen += steps(model, optimizer, range(3, 4))
        optimizer.state[first] = taken
        copied = copy.deepcopy(optimizer.state[first])
        seen += steps(model, optimizer, range(4, 5))
        optimizer.state[first].update(copied)
        return seen + steps(model, optimizer, range(5, 6)), optimizer

    both(folder, loop)


WRITES = (write_item, write_update, write_again, write_in_place, write_nothing)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_written_to_a_state_counts(tmp_path: Any, world_size: int) -> None:
    run(world_size, for_each, [(str(tmp_path), write) for write in WRITES], written_body)
    run(world_size, filtered_body, str(tmp_path))


def refused_writes_body(folder: str) -> None:
    for kind in BOTH:
        model = build(wide, offload=place(kind, folder))
        optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
        steps(model, optimizer, range(1))
        name, p = next((n, p) for n, p in model.named_parameters() if p.numel() > 1000)  # of which this rank has a part
        state = optimizer.state[p]
        before = state["exp_avg"].clone()
        expect_loud(lambda: state.update(exp_avg=torch.zeros(3)), "exp_avg", "this rank's slice", name)
        expect_loud(lambda: state.update(exp_avg=before.double()), "float64", "float32")
        expect_loud(lambda: state.update(mine=torch.zeros_like(before)), "no space was reserved", "mine")
        expect_loud(lambda: optimizer.state.update({p: {"exp_avg": before * 2, "mine": before}}), "mine")
        assert torch.equal(state["exp_avg"], before) and list(state) == ["step", "exp_avg", "exp_avg_sq"]
        with pytest.raises(KeyError):
            state["absent"]
        state["note"] = "mine"
        assert optimizer.state[p]["note"] == "mine" and dict(state)["note"] == "mine"
        del state["note"]
        steps(model, optimizer, range(1, 2))
        optimizer.close()


def test_what_cannot_be_kept_is_refused(tmp_path: Any) -> None:
    run(2, refused_writes_body, str(tmp_path))


# ---- parameters and settings that come and go


def regrouped_body(folder: str) -> None:
    """A parameter that is taken out of its group and put back has its moments, as in torch."""

    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        seen = steps(model, optimizer, range(2))
        every = list(optimizer.param_groups[0]["params"])
        optimizer.param_groups[0]["params"] = list(model.head.parameters())
        seen += steps(model, optimizer, range(2, 4))
        assert all(p in optimizer.state for p in every) and len(optimizer.state) == len(every)
        optimizer.param_groups[0]["params"] = every
        return seen + steps(model, optimizer, range(4, 5)), optimizer

    both(folder, loop)


def switched_body(folder: str, cls: type, change: dict, in_backward: bool) -> None:
    """Settings that ask for more state than before: torch makes it then, and so does this."""

    def loop(model: nn.Module, offload: Any) -> Any:
        early = {} if offload is None or not in_backward else {"in_backward": True}
        optimizer = make(cls, model, offload, lr=0.01, **early)
        seen = steps(model, optimizer, range(2))
        for group in optimizer.param_groups:
            group.update(change)
        return seen + steps(model, optimizer, range(2, 5)), optimizer

    both(folder, loop)


SWITCHES = [
    (torch.optim.SGD, {"momentum": 0.9}, False),
    (torch.optim.SGD, {"momentum": 0.9}, True),
    (torch.optim.SGD, {"lr": 0.0}, False),
]


def amsgrad_body(folder: str) -> None:
    """Of AdamW torch wants the new state from the start; a group that is added has it."""

    def loop(model: nn.Module, offload: Any) -> Any:
        layer = list(model.layers[0].parameters())
        optimizer = make(torch.optim.AdamW, model, offload, [{"params": layer[:2]}, {"params": layer[3:4]}], lr=0.01)
        seen = steps(model, optimizer, range(2))
        optimizer.add_param_group({"params": layer[4:], "amsgrad": True})
        return seen + steps(model, optimizer, range(2, 5)), optimizer

    both(folder, loop)


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_and_settings_that_change(tmp_path: Any, world_size: int) -> None:
    run(world_size, regrouped_body, str(tmp_path))
    run(world_size, for_each, [(str(tmp_path), *switch) for switch in SWITCHES], switched_body)
    run(world_size, amsgrad_body, str(tmp_path))


def foreign_body(folder: str) -> None:
    for kind in BOTH:
        model, other = (build(wide, offload=place(kind, folder)) for _ in range(2))
        loose = nn.Parameter(torch.zeros(5))
        last = here.rank == here.world_size - 1  # the others are told, and do not wait
        own = list(model.parameters())
        stranger = "another wrapped model" if last or here.world_size == 1 else f"rank {here.world_size - 1}"
        expect_loud(lambda: fsdp.offloaded(torch.optim.SGD, model, list(other.parameters())), "another wrapped model")
        expect_loud(lambda: fsdp.offloaded(torch.optim.SGD, model, [*own, loose]), "shape (5,)")
        expect_loud(
            lambda: fsdp.offloaded(torch.optim.SGD, model, list(other.parameters()) if last else own), stranger
        )
        optimizer = fsdp.offloaded(torch.optim.SGD, model, own[:2])
        expect_loud(lambda: optimizer.add_param_group({"params": [loose]}), "not in the model")
        optimizer.add_param_group({"params": own[2:]})
        assert len(optimizer.param_groups) == 2
        steps(model, optimizer, range(1))
        nested = fsdp.offloaded(torch.optim.SGD, model.layers[0], own)
        for one in (optimizer, nested):
            one.close()
        assert os.listdir(folder) == [] or here.world_size > 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_of_another_model_are_refused(tmp_path: Any, world_size: int) -> None:
    run(world_size, foreign_body, str(tmp_path))


# ---- hooks of state_dict and load_state_dict


def hooks_body(folder: str) -> None:
    def with_hooks(optimizer: Any, heard: list) -> None:
        optimizer.register_state_dict_pre_hook(lambda o: heard.append("pre"))
        optimizer.register_state_dict_post_hook(lambda o, d: {**d, "mine": len(heard)})
        optimizer.register_load_state_dict_pre_hook(lambda o, d: {**d, "param_groups": [
            {**g, "lr": g["lr"] * 2} for g in d["param_groups"]]})  # fmt: skip
        optimizer.register_load_state_dict_post_hook(lambda o: heard.append(o.param_groups[0]["lr"]))

    found = []
    for offload in (None, place("nvme", folder), place("cpu", folder)):
        model = build(wide, offload=offload)
        optimizer, heard = make(torch.optim.AdamW, model, offload, lr=0.25), []
        steps(model, optimizer, range(1))
        with_hooks(optimizer, heard)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert saved["param_groups"][0]["lr"] == 0.25
        found.append((heard, saved["mine"], optimizer.param_groups[0]["lr"]))
        steps(model, optimizer, range(1, 2))
    assert found == [(["pre", 0.5], 1, 0.5)] * 3


def test_hooks_of_state_dict(tmp_path: Any) -> None:
    run(1, hooks_body, str(tmp_path))


# ---- state from the start


class Sometimes(Net):
    """Never uses its second layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))


def adagrad_body(folder: str) -> None:
    from tests.checkpoint.reader import read

    roots = {}
    for kind in (None, *BOTH):
        offload = None if kind is None else place(kind, folder)
        model = build(lambda: Sometimes(2, **WIDE), offload=offload)
        optimizer = make(torch.optim.Adagrad, model, offload, lr=0.1, initial_accumulator_value=0.5)
        steps(model, optimizer, range(2))
        roots[kind] = os.path.join(folder, "roots", str(kind))
        fsdp.save_checkpoint(roots[kind], model, optimizer, step=2)
        if kind is not None:
            optimizer.close()
    expected = dict(sorted(read(roots[None] + "/step-2").items()))
    assert "optimizer/layers.1.up.weight/sum" in expected
    for kind in BOTH:
        assert_same_bits(dict(sorted(read(f"{roots[kind]}/step-2").items())), expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_is_there_from_the_start(tmp_path: Any, world_size: int) -> None:
    run(world_size, adagrad_body, str(tmp_path))


# ---- failures


class Broken(Exception):
    pass


def after_failure_body(folder: str) -> None:
    """A step that raises leaves parameters guarded, and nothing half updated is saved."""
    for kind in BOTH:
        model = build(wide, offload=place(kind, folder))
        optimizer = fsdp.offloaded(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        steps(model, optimizer, range(1))
        p = model.layers[0].up.weight

        def broken() -> None:
            raise Broken

        with pytest.raises(Broken):
            optimizer.step(broken)
        expect_loud(lambda: p.norm(), "full_params")
        original = optimizer._updater.run
        optimizer._updater.run = lambda *args: broken()
        with pytest.raises(Broken):
            steps(model, optimizer, range(1))
        optimizer._updater.run = original
        expect_loud(lambda: p.norm(), "full_params")
        root = os.path.join(folder, "root")
        expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=1), "not whole", "load a checkpoint")
        expect_loud(optimizer.state_dict, "not whole")
        optimizer.close()


def in_backward_failure_body(folder: str) -> None:
    """Host memory, updates in backward: what fails on one rank is said on all, at step()."""
    model = build(wide, offload=place("cpu", folder))
    optimizer = fsdp.offloaded(torch.optim.SGD, model, lr=0.1, in_backward=True)
    steps(model, optimizer, range(2))
    original = optimizer._updater.run

    def broken(*args: Any) -> None:
        if here.rank == here.world_size - 1:
            raise Broken("on one rank")
        original(*args)

    optimizer._updater.run = broken
    with pytest.raises(Broken if here.rank == here.world_size - 1 else OffloadError, match="on one rank"):
        steps(model, optimizer, range(2, 3))
    expect_loud(optimizer.step, "load a checkpoint")


def test_after_a_failure(tmp_path: Any) -> None:
    run(1, after_failure_body, str(tmp_path))
    run(2, after_failure_body, str(tmp_path))
    run(2, in_backward_failure_body, str(tmp_path))


def descriptors_body(folder: str) -> None:
    """A process may open a thousand files or so, and a model has that many states."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    model = build(wide, offload=place("nvme", folder))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    steps(model, optimizer, range(1))
    files, before = len(os.listdir(folder)), opened()
    held = optimizer.state_dict()
    first = [state["exp_avg"] for state in held["state"].values()]
    assert len(first) > files and opened() - before <= files
    first[0].zero_()
    del held, first
    assert opened() == before
    user = next(iter(optimizer.state))
    assert not optimizer.state[user]["exp_avg"].any() and optimizer.state[user]["exp_avg_sq"].any()
    optimizer.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc/self/fd, to count descriptors in")
def test_a_held_state_takes_one_descriptor_per_file(tmp_path: Any) -> None:
    run(1, descriptors_body, str(tmp_path))


def default_device_body(folder: str) -> None:
    """What is made for host memory is there, whatever torch.set_default_device says: here, a place without bytes."""
    for cls in (torch.optim.Adam, torch.optim.Adagrad):

        def loop(model: nn.Module, offload: Any, cls: Any = cls) -> Any:
            if offload is None:
                optimizer = cls(model.parameters(), lr=0.1)
                return steps(model, optimizer, range(3)), optimizer
            with torch.device("meta"):
                optimizer = make(cls, model, offload, lr=0.1)
            seen = []
            for step in range(3):
                torch.manual_seed(step)
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * step + here.rank))
                loss = model(x).square().mean()
                loss.backward()
                with torch.device("meta"):
                    optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            return seen, optimizer

        compare(folder, [place(kind, folder) for kind in BOTH], loop, wide)


def test_a_default_device_elsewhere(tmp_path: Any) -> None:
    run(1, default_device_body, str(tmp_path))
