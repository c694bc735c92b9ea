"""Names, ties, strictness, casts, unfilled tensors. Cases K27, K30, K33, K94, K95, and A2 for checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import Block, Vec, expect_loud, gather, here, plain, run

from .parts import same_bits, save_and_read, wrapped
from .reader import manifest_of, read, stored_bytes


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.module = nn.Linear(5, 2, dtype=torch.float64)  # a name that wrappers use too

    def forward(self, x):
        return self.module(self.block(x))


def build_variant(compiled, recomputed, unit):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Outer()
    if recomputed:
        model.block = checkpoint_wrapper(model.block)
    if unit:
        fsdp.fsdp_wrap(model.block)
    if compiled:
        model.block = torch.compile(model.block, backend="eager")
    return model


def test_K27_names_of_the_plain_model(tmp_path):
    run(1, K27_alone, str(tmp_path), group=False, timeout_s=60)


def K27_alone(root):
    variants = list(itertools.product([False, True], repeat=3))
    names = ["block.linear.weight", "block.linear.bias", "module.weight", "module.bias"]
    for number, variant in enumerate(variants):
        torch.manual_seed(number)
        handle = fsdp.save_checkpoint(root, build_variant(*variant), step=number)
        assert list(manifest_of(handle.path)["tensors"]) == names, variant
    for first, second in itertools.product(range(8), repeat=2):
        model = build_variant(*variants[second])
        fsdp.load_checkpoint(root, model, step=first)
        saved = read(f"{root}/step-{first}")
        for name, p in zip(names, model.parameters(), strict=True):
            assert torch.equal(plain(p).reshape(-1), saved[name].reshape(-1)), (first, second, name)


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.mid(self.embed(x)))


def save_tied(root):
    live = save_and_read(root, wrapped(Tied, policy=fsdp.by_class(nn.Embedding, nn.Linear)), step=1)
    return live if here.rank == 0 else None


def load_tied(root, tie):
    torch.manual_seed(7)
    model = fsdp.fsdp_wrap(Tied(tie))
    report = fsdp.load_checkpoint(root, model)
    assert not report.missing and not report.unexpected
    saved = read(f"{root}/step-1")
    found = gather(model)
    assert torch.equal(found["embed.weight"], saved["embed.weight"])
    if tie:
        assert model.embed.weight is model.head.weight
    else:
        assert torch.equal(found["head.weight"], saved["embed.weight"])


def save_untied(root):
    model = wrapped(lambda: Tied(False))
    with fsdp.full_params(model, writeback=True), torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    fsdp.save_checkpoint(root, model, step=1)


def test_K30_tied_weights(tmp_path):
    root = str(tmp_path / "tied")
    run(2, save_tied, root)
    assert stored_bytes(tmp_path / "tied" / "step-1") == 256
    assert manifest_of(tmp_path / "tied" / "step-1")["aliases"] == {"head.weight": "embed.weight"}
    for tie in (True, False):
        run(2, load_tied, root, tie)
    root = str(tmp_path / "untied")
    run(2, save_untied, root)
    run(3, load_tied, root, True)


class WithTable(nn.Module):
    """A non-persistent buffer that only the constructor computes, or that the module can compute again."""

    def __init__(self, can_reset: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.table = Table(can_reset)

    def forward(self, x):
        return self.lin(x) + self.table.sin


class Table(nn.Module):
    def __init__(self, can_reset: bool) -> None:
        super().__init__()
        self.register_buffer("sin", torch.arange(3.0).sin(), persistent=False)
        if can_reset:
            self.reset_parameters = lambda: self.sin.copy_(torch.arange(3.0).sin())

    def forward(self, x):
        return x + self.sin


def loaded_from_meta(load: Callable[[nn.Module], Any]) -> nn.Module:
    """What no file holds fills itself, or is named in an error; returns the model of the latter."""
    with torch.device("meta"):
        model = WithTable(True)
    model = fsdp.fsdp_wrap(model)
    load(model)
    assert torch.equal(model.table.sin, torch.arange(3.0).sin())
    with torch.device("meta"):
        model = WithTable(False)
    model = fsdp.fsdp_wrap(model)
    expect_loud(lambda: load(model), "table.sin", "meta")
    return model


def K33_body(root):
    fsdp.save_checkpoint(root, wrapped(lambda: WithTable(True)), step=1)
    model = loaded_from_meta(lambda model: fsdp.load_checkpoint(root, model))
    expect_loud(lambda: fsdp.save_checkpoint(root, model, step=2), "table.sin", "meta")


def test_K33_nothing_stays_unfilled(tmp_path):
    run(2, K33_body, str(tmp_path))


def K94_body(root, wrap):
    def vec(value, dtype):
        model = Vec(5, value, dtype)
        return fsdp.fsdp_wrap(model) if wrap else model

    fsdp.save_checkpoint(root, vec(1 + 2**-10, torch.float32), step=1)
    fsdp.save_checkpoint(root, vec(1 + 2**-7, torch.bfloat16), step=2)
    narrow = vec(3.0, torch.bfloat16)
    expect_loud(lambda: fsdp.load_checkpoint(root, narrow, step=1), "'w'", "F32", "BF16", "allow_cast")
    assert set(plain(narrow.w).tolist()) <= {3.0}
    fsdp.load_checkpoint(root, narrow, step=1, allow_cast=True)
    assert set(plain(narrow.w).tolist()) <= {1.0}
    wide = vec(0.0, torch.float32)
    fsdp.load_checkpoint(root, wide, step=2)
    assert set(plain(wide.w).tolist()) <= {1 + 2**-7}
    whole = nn.Module()
    whole.register_buffer("w", torch.zeros(5, dtype=torch.int64))
    expect_loud(lambda: fsdp.load_checkpoint(root, whole, step=1, allow_cast=True), "'w'", "F32", "I64")
    assert not whole.w.any()


@pytest.mark.parametrize("world_size", [1, 2])
def test_K94_no_silent_cast(tmp_path, world_size):
    run(world_size, K94_body, str(tmp_path), True)
    run(1, K94_body, str(tmp_path / "plain"), False, group=False)


def model_with(sizes, value, dtypes=None):
    model = nn.Module()
    for name, n in sizes.items():
        child = nn.Module()
        child.weight = nn.Parameter(torch.full((n,), value, dtype=(dtypes or {}).get(name, torch.float32)))
        model.add_module(name, child)
    model.forward = lambda x: x
    return model


class Named(nn.Module):
    def __init__(self, sizes, value, dtypes=None) -> None:
        super().__init__()
        for name, child in model_with(sizes, value, dtypes).named_children():
            self.add_module(name, child)

    def forward(self, x):
        return x


def K95_body(root):
    saved = fsdp.fsdp_wrap(Named({"a": 3, "c": 4, "d": 5, "z": 6}, 1.0))
    fsdp.save_checkpoint(root, saved, torch.optim.Adam(saved.parameters()), step=1)
    model = fsdp.fsdp_wrap(Named({"a": 3, "b": 2, "c": 7, "d": 5}, 2.0, {"d": torch.bfloat16}))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    for strict in (True, False):
        text = expect_loud(
            lambda: fsdp.load_checkpoint(root, model, optimizer, strict=strict),
            "c.weight",
            "d.weight",
            "BF16",
            "(7,)",
            "(4,)",
        )
        assert ("b.weight" in text and "z.weight" in text) is strict
        assert all(set(plain(p).tolist()) <= {2.0} for p in model.parameters())
        assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    model = fsdp.fsdp_wrap(Named({"a": 3, "b": 2, "c": 4, "d": 5}, 2.0))
    report = fsdp.load_checkpoint(root, model, strict=False)
    assert report.missing == ["b.weight"] and report.unexpected == ["z.weight"]
    for name, value in gather(model).items():
        assert set(value.tolist()) == {2.0 if name == "b.weight" else 1.0}


def test_K95_strictness_tells_everything_at_once(tmp_path):
    run(2, K95_body, str(tmp_path))


def test_equal_problems_are_one_line(tmp_path):
    """Tensors with one problem are counted, each kind of problem is shown, and its cure stands once."""
    sizes = {f"n{i}": 3 for i in range(60)}
    fsdp.save_checkpoint(tmp_path, Named(sizes, 1.0), step=1)
    narrow = Named(sizes, 1.0, dict.fromkeys(sizes, torch.bfloat16))
    text = expect_loud(
        lambda: fsdp.load_checkpoint(tmp_path, narrow),
        "in 60 points", "60 tensors ('n0.weight', 'n1.weight', 'n2.weight', ...) are stored as F32, wanted as BF16",
    )  # fmt: skip
    assert len(text.splitlines()) == 5 and text.count("allow_cast") == 1 and "strict" not in text
    fsdp.export_safetensors(tmp_path, tmp_path / "out")
    text = expect_loud(lambda: fsdp.load_safetensors(narrow, tmp_path / "out"), "60 tensors", "dtype=")
    assert "allow_cast" not in text  # this call has no such argument
    other = Named({f"other{i}": 3 for i in range(60)} | {"n1": 4}, 1.0)
    text = expect_loud(
        lambda: fsdp.load_checkpoint(tmp_path, other),
        "in 120 points", "shape: 'n1.weight'", "missing: 'other0.weight'", "unexpected: 'n0.weight'", "40 more",
    )  # fmt: skip
    assert text.count("strict=False") == 1 and "allow_cast" not in text


def A2_body(root):
    model = fsdp.fsdp_wrap(Vec(4, 1.0))
    fsdp.save_checkpoint(root, model, step=1)
    with model.no_sync():
        model(1.0).backward()
    expect_loud(lambda: fsdp.save_checkpoint(root, model, step=2), "w", "no_sync")
    assert fsdp.latest_step(root) == 1
    model.zero_grad()
    with fsdp.full_params(model):
        expect_loud(lambda: fsdp.save_checkpoint(root, model, step=2), "'w'", "full_params")
    fsdp.save_checkpoint(root, model, step=2)
    assert fsdp.latest_step(root) == 2


def test_A2_unsynchronised_gradients(tmp_path):
    run(2, A2_body, str(tmp_path))


class Running(nn.Module):
    def __init__(self, value) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("seen", torch.full((2,), value))
        self.register_buffer("count", torch.tensor(int(value)))

    def forward(self, x):
        return self.lin(x)


def buffers_body(root):
    model = fsdp.fsdp_wrap(Running(5.0), sync_params=False)
    model.seen.fill_(here.rank)
    fsdp.save_checkpoint(root, model, step=1)
    other = fsdp.fsdp_wrap(Running(9.0))
    fsdp.load_checkpoint(root, other)
    assert other.seen.tolist() == [0.0, 0.0] and other.count.item() == 5
    same_bits(gather(other), gather(model))


def test_buffers_are_rank_0s(tmp_path):
    run(2, buffers_body, str(tmp_path))


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_extra_state_of_modules_is_not_lost_in_silence(tmp_path):
    with pytest.warns(UserWarning, match="'0'.*get_extra_state") as caught:
        fsdp.save_checkpoint(tmp_path, nn.Sequential(Stateful(2, 2)), step=1)
    assert [w.filename for w in caught] == [__file__]
