"""fsdp.offloaded: the bits of the plain optimizer, whatever the class, the loop, the groups and the place of the state."""

from __future__ import annotations

import collections
import os
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.offload.files import StateFile
from fsdplite.offload.pieces import chunk_numel_within, cut
from fsdplite.layout import FlatLayout
from tests.harness import MLP, Vec, assert_rested, expect_loud, for_each, here, local_batch, mse, run, seeded
from tests.memory.parts import Layer, Net, assert_same_bits, batch, build, train, whole

# 17 thousand elements a layer in fp32 and chunks of 4096: several chunks, and parameters that are cut.
WIDE = {"width": 64, "inner": 131}


def place(kind: str, folder: str, **options: Any) -> fsdp.Offload:
    path = {"path": folder} if kind == "nvme" else {}
    return fsdp.Offload(optimizer=kind, buffer_bytes=16384, **path, **options)


def make(cls: type, model: nn.Module, offload: Any, params: Any = None, **settings: Any) -> torch.optim.Optimizer:
    if offload is None:
        return cls(model.parameters() if params is None else params, **settings)
    return fsdp.offloaded(cls, model, params, **settings)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of this rank's state, by parameter and key."""
    found = {}
    for name, p in model.named_parameters():
        if p in optimizer.state:
            found.update({f"{name}/{k}": torch.as_tensor(v).clone() for k, v in optimizer.state[p].items() if v is not None})
    return found


def compare(folder: str, places: list[fsdp.Offload], loop: Any, net: Any, **wrap: Any) -> None:
    """``loop(model, offload)`` returns numbers and an optimizer; all is compared with the run without."""
    expected = None
    for offload in (None, *places):
        model = build(net, offload=offload, **wrap)
        seen, optimizer = loop(model, offload)
        found = seen, whole(model), states(model, optimizer)
        assert_rested(model)
        if offload is None:
            expected = found
            continue
        optimizer.close()
        assert found[0] == expected[0], f"{found[0]} instead of {expected[0]}"
        assert_same_bits(found[1], expected[1], str(offload))
        assert_same_bits(found[2], expected[2], str(offload))


# ---- classes

CLASSES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.1, "fused": True}),
    ("AdamW", {"lr": torch.tensor(0.1)}),
    ("AdamW", {"lr": 0.1, "foreach": True}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
    ("Adadelta", {"lr": 0.1}),
]


def classes_body(folder: str, kind: str, settings: dict) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(getattr(torch.optim, kind), model, offload, **settings)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        seen = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(x * (1 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen, optimizer

    compare(folder, [place("cpu", folder), place("nvme", folder)], loop, lambda: Net(1, **WIDE))


@pytest.mark.parametrize("kind, settings", CLASSES)
def test_bits_of_every_class(tmp_path: Any, kind: str, settings: dict) -> None:
    run(1, classes_body, str(tmp_path), kind, settings)


# ---- stages, precisions, loops


def lever(folder: str, stage: int, precision: str, loop_options: dict, kinds: tuple[str, ...]) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        scaler = fsdp.LossScaler(init_scale=1024.0) if precision == "fp16" else None
        return train(model, optimizer, range(3), scaler=scaler, **loop_options), optimizer

    places = [place(kind.removesuffix("+"), folder, params="cpu" if kind.endswith("+") else None) for kind in kinds]
    compare(folder, places, loop, lambda: Net(3), stage=stage, precision=precision)


def matrix(world_size: int) -> list[tuple]:
    loops = ({}, {"accumulate": 2, "clip": 0.5}, {"accumulate": 2, "no_sync": True})
    rows: list[tuple] = []
    for stage in (1, 2, 3):
        for number, precision in enumerate(("fp32", "bf16", "fp16")):
            kinds = ("nvme+",) if (stage + number) % 2 else ("nvme", "cpu+")
            rows.append((stage, precision, loops[(stage + number) % 3], kinds))
    rows.append((0, "bf16", loops[1], ("nvme", "cpu")))
    return rows if world_size < 3 else rows[6:]


@pytest.mark.slow_from(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_of_a_run_without(tmp_path: Any, world_size: int) -> None:
    run(world_size, for_each, [(str(tmp_path), *row) for row in matrix(world_size)], lever)


# ---- groups, schedules, parameters that come and go


def groups_body(folder: str) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 0.02, "amsgrad": True}]
        optimizer = make(torch.optim.AdamW, model, offload, groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=8)
        seen = []
        for step in range(4):
            seen += train(model, optimizer, range(step, step + 1))
            schedule.step()
            seen += schedule.get_last_lr()
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.01]
        return seen, optimizer

    compare(folder, [place("nvme", folder), place("cpu", folder)], loop, lambda: Net(2))


def thawing_body(folder: str) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        seen = train(model, optimizer, range(2))
        model.layers[0].up.weight.requires_grad_(True)  # frozen when it was wrapped
        model.layers[1].up.bias.requires_grad_(False)
        seen += train(model, optimizer, range(2, 4))
        model.layers[1].up.bias.requires_grad_(True)
        return seen + train(model, optimizer, range(4, 6)), optimizer

    def net() -> nn.Module:
        model = Net(2)
        model.layers[0].up.weight.requires_grad_(False)
        return model

    compare(folder, [place("nvme", folder), place("cpu", folder)], loop, net)


class Partly(Net):
    """The second layer runs in odd steps only: parameters without gradients keep their state and their counters."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers if self.calls % 2 else self.layers[:1]:
            x = layer(x)
        return self.head(x)


def unused_body(folder: str) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        return train(model, optimizer, range(5)), optimizer

    compare(folder, [place("nvme", folder), place("cpu", folder)], loop, lambda: Partly(2))


def ignored_body(folder: str) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        late = list(model.head.parameters())
        early = [p for p in model.parameters() if all(p is not q for q in late)]
        optimizer = make(torch.optim.SGD, model, offload, early, lr=0.1, momentum=0.9)
        seen = train(model, optimizer, range(2))
        optimizer.add_param_group({"params": late, "lr": 0.05})
        return seen + train(model, optimizer, range(2, 4)), optimizer

    for offload_kind in ("nvme", "cpu"):
        expected = None
        for offload in (None, place(offload_kind, folder)):
            torch.manual_seed(0)
            model = Net(2)
            fsdp.fsdp_wrap(model, fsdp.by_class(Layer), ignored=[model.layers[0].norm], offload=offload)
            seen, optimizer = loop(model, offload)
            found = seen, whole(model), states(model, optimizer)
            expected = expected or found
            assert found[0] == expected[0]
            assert_same_bits(found[1], expected[1])
            assert_same_bits(found[2], expected[2])


def closure_body(folder: str) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        seen = []
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                torch.manual_seed(step)
                optimizer.zero_grad()
                x, y = batch(step)
                loss = (model(x) - y).square().mean()
                loss.backward()
                return loss

            seen.append(optimizer.step(closure).item())
        return seen, optimizer

    compare(folder, [place("nvme", folder), place("cpu", folder)], loop, lambda: Net(2))


def reset_body(folder: str) -> None:
    """Starting again from no state, as programs do after a spike of the loss."""

    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        seen = train(model, optimizer, range(2))
        optimizer.state = collections.defaultdict(dict)
        return seen + train(model, optimizer, range(2, 4)), optimizer

    compare(folder, [place("nvme", folder), place("cpu", folder)], loop, lambda: Net(2))


def closed_body(folder: str) -> None:
    """Where the state lies is settled when the model is wrapped, and a closed optimizer has none to save."""
    os.chdir(folder)
    os.makedirs(f"state-{here.rank}")
    model = fsdp.fsdp_wrap(seeded(Net, 2), offload=place("nvme", f"state-{here.rank}"))
    optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.1)
    os.chdir("/")
    train(model, optimizer, range(2))
    assert os.listdir(os.path.join(folder, f"state-{here.rank}"))
    fsdp.save_checkpoint(os.path.join(folder, "before"), model, optimizer, step=2)
    saved = optimizer.state_dict()
    optimizer.close()
    optimizer.close()
    assert not os.listdir(os.path.join(folder, f"state-{here.rank}"))
    for load in (
        lambda: optimizer.load_state_dict(saved),
        lambda: fsdp.load_checkpoint(os.path.join(folder, "before"), model, optimizer),
        optimizer.step,
    ):
        expect_loud(load, "closed", "new optimizer")
        assert not os.listdir(os.path.join(folder, f"state-{here.rank}")), "files that nothing removes"
    expect_loud(lambda: fsdp.save_checkpoint(os.path.join(folder, "root"), model, optimizer, step=1), "closed", "before close")
    assert fsdp.latest_step(os.path.join(folder, "root")) is None
    expect_loud(optimizer.state_dict, "closed")
    expect_loud(lambda: place("nvme", ""), "path")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closed_optimizer(tmp_path: Any, world_size: int) -> None:
    run(world_size, closed_body, str(tmp_path))


@pytest.mark.parametrize("body", [groups_body, thawing_body, unused_body, ignored_body, closure_body, reset_body])
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_and_parameters(tmp_path: Any, body: Any, world_size: int) -> None:
    run(world_size, body, str(tmp_path))


def few_elements_body(folder: str) -> None:
    """X11: some ranks own nothing; the counters agree all the same."""
    for kind in ("nvme", "cpu"):
        model = fsdp.fsdp_wrap(seeded(Vec, 2, 1.0), offload=place(kind, folder, params="cpu"))
        optimizer = fsdp.offloaded(torch.optim.Adam, model, lr=0.1)
        scaler = fsdp.LossScaler(init_scale=1024.0)
        for c in (float("inf") if here.rank == 0 else 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(c)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 512.0
        assert all(abs(w - 0.9) < 1e-6 for w in whole(model)["w"].tolist())
        assert [s["step"].item() for s in optimizer.state.values()] == [1.0]


def test_X11_ranks_without_elements() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(4, few_elements_body, folder)


def double_body(folder: str, dtype: torch.dtype) -> None:
    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss = mse(model, local_batch(step, here.rank, 67, 3, dtype=dtype))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen, optimizer

    def net() -> nn.Module:
        return MLP((67, 65, 3), dtype)

    compare(folder, [place("nvme", folder), place("cpu", folder)], loop, net, policy=fsdp.by_class(nn.Linear))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(tmp_path: Any, dtype: torch.dtype) -> None:
    run(2, double_body, str(tmp_path), dtype)


# ---- time


def late_body(folder: str, delay: str) -> None:
    lengths = {"fixed": lambda: 0.05, "random": lambda: random.uniform(0.0, 0.05)}
    originals = StateFile.read_at, StateFile.write_at

    def slow(call: Any) -> Any:
        def late(self: StateFile, offset: int, view: memoryview) -> int:
            time.sleep(lengths[delay]())
            return call(self, offset, view)

        return late

    def loop(model: nn.Module, offload: Any) -> Any:
        optimizer = make(torch.optim.AdamW, model, offload, lr=0.1)
        if offload is not None:
            StateFile.read_at, StateFile.write_at = (slow(call) for call in originals)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            loss = mse(model, local_batch(step, here.rank, 67, 3, dtype=torch.float32))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen, optimizer

    try:
        compare(folder, [place("nvme", folder)], loop, lambda: MLP((67, 165, 3), torch.float32), policy=None)
    finally:
        StateFile.read_at, StateFile.write_at = originals


@pytest.mark.parametrize("delay", ["fixed", "random"])
def test_D8_late_reads_and_writes_change_nothing(tmp_path: Any, delay: str) -> None:
    run(2, late_body, str(tmp_path), delay)


# ---- what is refused, and how shards are cut


def refused_body(folder: str) -> None:
    model = build(Net, offload=place("nvme", folder))
    expect_loud(lambda: fsdp.offloaded(torch.optim.Adafactor, model), "Adafactor", "element-wise")
    expect_loud(lambda: fsdp.offloaded(torch.optim.LBFGS, model), "LBFGS")
    expect_loud(lambda: fsdp.offloaded(model, torch.optim.AdamW), "class of an optimizer")
    expect_loud(lambda: fsdp.offloaded(torch.optim.AdamW, model.parameters()), "a model")
    expect_loud(lambda: fsdp.offloaded(torch.optim.AdamW, Net()), "Offload(optimizer=")
    expect_loud(lambda: fsdp.offloaded(torch.optim.AdamW, build(Net)), "Offload(optimizer=")
    with pytest.raises(TypeError, match=r"AdamW has no such option[^?]*did you mean 'lr'"):
        fsdp.offloaded(torch.optim.AdamW, model, lrr=0.1)
    optimizer = fsdp.offloaded(torch.optim.SGD, model, lr=0.1)
    import copy
    import pickle

    expect_loud(lambda: pickle.dumps(optimizer), "save_checkpoint")
    expect_loud(lambda: copy.deepcopy(optimizer), "save_checkpoint")
    assert isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__name__ == "SGD"


def plain_optimizer_body() -> None:
    import warnings

    model = build(Net, offload=fsdp.Offload(optimizer="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="make it with fsdp.offloaded"):
        train(model, optimizer, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1))
        train(model, fsdp.offloaded(torch.optim.SGD, model, lr=0.1), range(1))


def test_a_plain_optimizer_on_such_a_model_is_said() -> None:
    run(1, plain_optimizer_body)


def test_what_is_refused(tmp_path: Any) -> None:
    run(1, refused_body, str(tmp_path))


def test_the_cut_covers_a_shard_once() -> None:
    layout = FlatLayout([(5000,), (0,), (3,), (9000,)], world_size=3, alignment=4)
    assert chunk_numel_within(16384, 4) == 4096 and chunk_numel_within(1, 8) == 4096
    for rank in range(3):
        chunks, numel = cut(layout, rank, 4096, 1024)
        assert all(chunk.start % 4096 == 0 and chunk.stop - chunk.start <= 4096 for chunk in chunks)
        places: list[int] = []
        for index in range(4):
            start, stop = layout.shard_slice(index, rank)
            pieces = [piece for chunk in chunks for piece in chunk.pieces if piece.index == index]
            covered = [i for piece in pieces for i in range(piece.start, piece.stop)]
            assert covered == list(range(start, stop))
            # Every cut is at a multiple of a vector from the parameter's start, and so is its place.
            assert all(piece.offset == piece.start - start and piece.offset % 128 == 0 for piece in pieces)
            assert all(piece.place - piece.offset == pieces[0].place and piece.place % 128 == 0 for piece in pieces)
            places += [i for piece in pieces for i in range(piece.place, piece.place_stop)]
        assert len(set(places)) == len(places) and max(places, default=-1) + 1 == numel
        assert all(c.start <= p.place and p.place_stop <= c.stop for c in chunks for p in c.pieces)
