"""Policies: what each spelling matches, and the errors that say what is there instead."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fsdplite.errors import PolicyError
from fsdplite.policy import Policy, as_policy, by_class, by_name, by_predicate, by_size, from_model
from tests.harness import Block, Stack


class WideBlock(Block):
    """A subclass: isinstance matches it, the name `Block` does not."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([Block(), WideBlock()])
        self.head = nn.Linear(5, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


def matched(policy: Policy, model: nn.Module) -> list[str]:
    policy = policy.bind(model)
    return [name for name, module in named(model) if policy.matches(name, module)]


def error_of(policy: Policy, model: nn.Module) -> str:
    with pytest.raises(PolicyError) as caught:
        policy.bind(model).check(named(model))
    return str(caught.value)


# --- by_class -------------------------------------------------------------------------------------------------------

BY_CLASS = {
    "class, with subclasses": (by_class(Block), ["layers.0", "layers.1"]),
    "subclass only": (by_class(WideBlock), ["layers.1"]),
    "name is exact": (by_class("Block"), ["layers.0"]),
    "several": (by_class("Block", nn.Embedding), ["embed", "layers.0"]),
    "qualified where it is defined": (by_class("torch.nn.modules.sparse.Embedding"), ["embed"]),
    "qualified where it is published": (by_class("torch.nn.Embedding"), ["embed"]),
    "qualified, of this file": (by_class(f"{__name__}.WideBlock"), ["layers.1"]),
    "another module's class of that name": (by_class("torch.nn.Block"), []),
    "name with spaces around it": (by_class(" Embedding "), ["embed"]),
}


@pytest.mark.parametrize("case", BY_CLASS, ids=list(BY_CLASS))
def test_by_class(case: str) -> None:
    policy, expected = BY_CLASS[case]
    assert matched(policy, Net()) == expected


@pytest.mark.parametrize("entries", [(), ("",), ("  ",), (3,), (int,), ([Block],), (Block(),), ("Block", "")])
def test_by_class_refuses_what_is_no_class(entries: tuple[Any, ...]) -> None:
    with pytest.raises(PolicyError, match="by_class"):
        by_class(*entries)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("Blok", "Block"), ("block", "Block"), ("Linaer", "Linear"), ("my.models.Blocks", "Block")]
)
def test_L1_an_absent_class_lists_what_is_there_and_suggests_the_nearest(wrong: str, meant: str) -> None:
    text = error_of(by_class(wrong), Stack(2))
    assert f'by_class("{wrong}")' in text
    assert f'by_class("{meant}")' in text
    assert "Block (x2)" in text and "Linear (x3)" in text
    assert "ModuleList" not in text, "a container cannot be wrapped, so it is no suggestion"


def test_L1_an_absent_class_object_is_an_error_too() -> None:
    assert "torch.nn.modules.conv.Conv1d" in error_of(by_class(nn.Conv1d), Stack(2))


def test_a_long_list_of_classes_is_cut() -> None:
    model = nn.Sequential(*(type(f"Layer{i}", (nn.Linear,), {})(1, 1) for i in range(60)))
    text = error_of(by_class("Nothing"), model)
    assert "Layer0" in text and "Layer59" not in text and "and 36 more" in text


def test_L1_one_present_and_one_absent_warns_and_names_the_absent_one() -> None:
    warnings = by_class("Block", "Decoder").check(named(Stack(2)))
    assert len(warnings) == 1 and '"Decoder"' in warnings[0]
    assert by_class("Block", "Linear").check(named(Stack(2))) == []


def test_a_warning_suggests_the_nearest_too() -> None:
    (warning,) = by_class("Block", "Liner").check(named(Stack(2)))
    assert 'by_class("Linear")' in warning


# --- by_name --------------------------------------------------------------------------------------------------------

BY_NAME = {
    "blocks.*": ["blocks.0", "blocks.1"],
    "blocks.**": ["blocks.0", "blocks.0.linear", "blocks.1", "blocks.1.linear"],
    "blocks.*.*": ["blocks.0.linear", "blocks.1.linear"],
    "*.linear": ["blocks.0.linear", "blocks.1.linear"],
    "blocks.1": ["blocks.1"],
    "blocks.[1-9]": ["blocks.1"],
    "bl*": ["blocks"],
    "head": ["head"],
    "HEAD": [],
    "ead": [],
}


@pytest.mark.parametrize("glob", BY_NAME)
def test_by_name(glob: str) -> None:
    assert matched(by_name(glob), Stack(2)) == BY_NAME[glob]


def test_by_name_never_matches_the_root() -> None:
    assert "" not in matched(by_name("*"), Stack(1))
    assert "" not in matched(by_name("**"), Stack(1))


@pytest.mark.parametrize("globs", [(), ("",), (" ",), (Block,), (["blocks.*"],), ("head", "")])
def test_by_name_refuses_what_is_no_name(globs: tuple[Any, ...]) -> None:
    with pytest.raises(PolicyError, match="by_name"):
        by_name(*globs)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("layers.*", "blocks.*"),
        ("layers.0", "blocks.0"),
        ("block.*", "blocks.*"),
        ("model.blocks.*", "blocks.*"),
        ("blocks.*.lin", "blocks.*.linear"),
        ("heads", "head"),
    ],
)
def test_L1_an_absent_name_lists_what_is_there_and_suggests_the_nearest(wrong: str, meant: str) -> None:
    text = error_of(by_name(wrong), Stack(2))
    assert f'by_name("{wrong}")' in text
    assert f'by_name("{meant}")' in text
    assert "blocks.1.linear" in text and "head" in text


def test_a_wildcard_in_the_same_place_counts_more_than_letters() -> None:
    model = Stack(2)
    model.layernorm = nn.LayerNorm(5)
    assert 'by_name("blocks.*")' in error_of(by_name("layers.*"), model)


def test_many_names_are_listed_as_patterns() -> None:
    text = error_of(by_name("layers.*"), Stack(40))
    assert "blocks.* (x40), blocks.*.linear (x40), head" in text
    assert "blocks.17" not in text


def test_L1_one_present_and_one_absent_name_warns() -> None:
    (warning,) = by_name("head", "layers.*").check(named(Stack(2)))
    assert '"layers.*"' in warning and 'by_name("blocks.*")' in warning


# --- by_size, by_predicate ------------------------------------------------------------------------------------------


def test_by_size_counts_what_is_not_taken() -> None:
    block = Block()
    assert by_size(30).matches("b", block)
    assert not by_size(31).matches("b", block)
    assert by_size(7).matches("b", block, 7)
    assert not by_size(7).matches("b", block, 6)
    assert not by_size(1).matches("blocks", nn.ModuleList([block])), "a container cannot be called"


@pytest.mark.parametrize("size", [0, -1, 1.5, "10M", True, None])
def test_by_size_refuses_what_is_no_count(size: Any) -> None:
    with pytest.raises(PolicyError, match="by_size"):
        by_size(size)


def test_by_size_names_the_largest_when_none_is_large_enough() -> None:
    text = error_of(by_size(1000), Stack(2))
    assert "78 elements (root)" in text and "30 elements (blocks.0)" in text and "by_size(78)" in text


def with_default(module: nn.Module, kind: type = Block) -> bool:
    return isinstance(module, kind)


class CallableObject:
    def __call__(self, name: str, module: nn.Module) -> bool:
        return name.startswith("blocks.") and isinstance(module, Block)


@pytest.mark.parametrize(
    "fn",
    [
        lambda module: isinstance(module, Block),
        lambda name, module: name in ("blocks.0", "blocks.1"),
        lambda *args: isinstance(args[0], Block),
        with_default,
        functools.partial(with_default, kind=Block),
        CallableObject(),
    ],
    ids=["module", "name and module", "any arguments", "default", "partial", "object"],
)
def test_by_predicate_follows_the_signature(fn: Any) -> None:
    assert matched(by_predicate(fn), Stack(2)) == ["blocks.0", "blocks.1"]


def test_by_predicate_asks_once_per_module_in_order() -> None:
    """So a function that counts, such as every second block, means what it says."""
    seen: list[str] = []

    def every_second(name: str, module: nn.Module) -> bool:
        seen.append(name)
        return isinstance(module, Block) and name.endswith(("0", "2"))

    model = Stack(3)
    policy = by_predicate(every_second).bind(model)
    policy.check(named(model))
    assert matched(policy, model) == ["blocks.0", "blocks.2"]
    assert seen == [name for name, _ in named(model)]


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_by_predicate_must_answer_with_a_bool(answer: Any) -> None:
    with pytest.raises(PolicyError, match="True or False") as caught:
        by_predicate(lambda module: answer).bind(Stack(1))
    assert type(answer).__name__ in str(caught.value)


@pytest.mark.parametrize("fn", [3, "Block", lambda: True, lambda a, b, c: True, lambda module, *, recurse: True])
def test_by_predicate_refuses_what_it_cannot_call(fn: Any) -> None:
    with pytest.raises(PolicyError, match="by_predicate"):
        by_predicate(fn)


def test_by_predicate_that_is_true_for_nothing() -> None:
    assert "the classes present are" in error_of(by_predicate(lambda module: False), Stack(2))


# --- from_model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", ["Block", ["Block"], ("Block", "Absent"), {"Block"}, [Block]])
def test_from_model_reads_what_the_model_declares(declared: Any) -> None:
    model = Stack(2)
    model._no_split_modules = declared
    policy = from_model().bind(model)
    assert matched(policy, model) == ["blocks.0", "blocks.1"]
    assert policy.check(named(model)) == [], "a block that this configuration has none of is no warning"


def test_from_model_looks_into_submodules() -> None:
    outer = nn.Sequential(Stack(2), nn.Linear(3, 3))
    outer._no_split_modules = None  # as in a base class that declares nothing
    outer[0]._no_split_modules = ["Block"]
    assert matched(from_model(), outer) == ["0.blocks.0", "0.blocks.1"]


def test_from_model_joins_what_several_parts_declare() -> None:
    model = nn.Sequential(Stack(1), nn.Embedding(2, 2))
    model[0]._no_split_modules = ["Block"]
    model[1]._no_split_modules = ["Embedding"]
    assert matched(from_model(), model) == ["0.blocks.0", "1"]


def test_from_model_reads_other_spellings() -> None:
    model = Stack(2)
    model._repeated_blocks = ["Block"]
    assert matched(from_model(), model) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("declared", [None, [], set(), ""])
def test_from_model_without_a_declaration_lists_what_is_there(declared: Any) -> None:
    model = Stack(2)
    model._no_split_modules = declared
    with pytest.raises(PolicyError) as caught:
        from_model().bind(model)
    assert "_no_split_modules" in str(caught.value) and "Block (x2)" in str(caught.value)


def test_from_model_that_declares_only_absent_classes() -> None:
    model = Stack(2)
    model._no_split_modules = ["Blocks"]
    assert 'by_class("Block")' in error_of(from_model(), model)


# --- combination, description, conversion ---------------------------------------------------------------------------


def test_union_matches_what_either_matches() -> None:
    model = Net()
    policy = by_class("Block") | by_name("head") | by_predicate(lambda module: isinstance(module, nn.Embedding))
    assert matched(policy, model) == ["embed", "layers.0", "head"]
    model._no_split_modules = ["WideBlock"]
    assert matched(from_model() | by_name("head"), model) == ["layers.1", "head"]


def test_union_warns_for_the_part_that_matches_nothing() -> None:
    (warning,) = (by_class("Block") | by_name("layers.*")).check(named(Stack(2)))
    assert '"layers.*"' in warning


def test_union_that_matches_nothing_lists_both_kinds() -> None:
    text = error_of(by_class("Blok") | by_name("layers.*"), Stack(2))
    assert 'by_class("Block")' in text and 'by_name("blocks.*")' in text
    assert "classes present" in text and "names present" in text


def test_union_only_with_policies() -> None:
    with pytest.raises(TypeError):
        by_class("Block") | "Linear"


def test_descriptions_are_stable() -> None:
    """Ranks compare a hash of them, so no address and no order of a set may get in."""
    policy = by_class("Block", nn.Linear) | by_name("a.*") | by_size(10)
    assert policy.describe() == 'by_class("Block", torch.nn.modules.linear.Linear) | by_name("a.*") | by_size(10)'
    assert by_predicate(with_default).describe() == f"by_predicate({__name__}.with_default)"
    for other in (by_predicate(functools.partial(with_default)), by_predicate(lambda m: True), from_model()):
        assert "0x" not in other.describe()
    model = Stack(1)
    model._no_split_modules = {"Linear", "Block", "Tanh", "A", "B", "C"}
    assert from_model().bind(model).describe().endswith('"A", "B", "Block", "C", "Linear", "Tanh")')


def test_as_policy_keeps_policies() -> None:
    policy = by_class("Block")
    assert as_policy(policy) is policy
    assert as_policy(None) is None


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        (Block, "by_class(Block)"),
        ([Block, nn.Linear], "by_class(Block, Linear)"),
        ({"Block"}, "by_class('Block')"),
        (Block(), "by_class(Block)"),
        ("Block", 'by_class("Block")'),
        ("blocks.*", 'by_name("blocks.*")'),
        (1000, "by_size(1000)"),
        (lambda module: True, "by_predicate(fn)"),
        (from_model, "from_model()"),
        (by_class, "by_class(...)"),
        ({}, "by_class(...)"),
        (2.5, "by_class(...)"),
        (torch.ones(2), "by_class(...)"),
    ],
)
def test_as_policy_shows_the_policy_that_was_meant(wrong: Any, cure: str) -> None:
    with pytest.raises(PolicyError) as caught:
        as_policy(wrong)
    assert caught.value.cure.startswith(cure)


# --- names and classes are those the user wrote ---------------------------------------------------------------------


def test_parametrized_modules_keep_their_class_name() -> None:
    model = Stack(2)
    torch.nn.utils.parametrizations.weight_norm(model.head)
    assert type(model.head) is not nn.Linear
    assert "head" in matched(by_class("Linear"), model)
    assert "head" in matched(by_class("torch.nn.Linear"), model)
    assert "Parametrized" not in error_of(by_class("Blok"), model)


def test_names_inside_a_compile_wrapper_match_without_the_wrapper() -> None:
    model = Stack(2)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    assert "blocks.0._orig_mod.linear" in matched(by_name("blocks.0.linear"), model)
    assert "_orig_mod" not in error_of(by_name("layers.*"), model)
    assert "OptimizedModule" not in error_of(by_class("Blok"), model)
    assert "blocks.0._orig_mod" in matched(by_class("Block"), model)


def test_policies_do_not_import_dynamo() -> None:
    source = (
        "import sys, torch\nfrom torch import nn\nfrom fsdplite.partition import partition\n"
        "from fsdplite.policy import by_class\n"
        "partition(nn.Sequential(nn.Linear(2, 2)), by_class(nn.Linear))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)
