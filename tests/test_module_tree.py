"""What partition() leaves alone, looks through or refuses by name: units, ignored parts, wrappers, containers."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

from fsdplite.errors import ConfigError, PolicyError
from fsdplite.partition import partition
from fsdplite.policy import Policy, by_class, by_name, by_size
from tests.harness import Block, Stack
from tests.trees import Bag, Tied, compiled, is_in, linear, owners, refused, units

# --- containers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [by_class(nn.ModuleList), by_class("ModuleList"), by_name("blocks"), by_name("*")])
def test_a_container_without_forward_is_an_error_that_lists_its_children(policy: Policy) -> None:
    text = refused(Stack(2), policy, error=PolicyError)
    assert "'blocks' (ModuleList)" in text and "without a forward" in text
    assert "blocks.0 (Block)" in text and "blocks.1 (Block)" in text
    assert 'by_class("Block")' in text and 'by_name("blocks.*")' in text


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([linear()]),
        nn.ModuleDict({"a": linear()}),
        nn.ParameterList([nn.Parameter(torch.ones(2))]),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
    ],
    ids=lambda container: type(container).__name__,
)
def test_every_kind_of_container_is_refused_below_and_as_root(container: nn.Module) -> None:
    below = refused(Bag(part=container), by_name("part"), error=PolicyError)
    assert "'part'" in below and type(container).__name__ in below
    root = refused(container, None)
    assert type(container).__name__ in root and "without a forward" in root


def test_a_root_container_lists_its_children() -> None:
    text = refused(Stack(2).blocks, None)
    assert "0 (Block), 1 (Block)" in text


def test_entry_points_make_a_module_callable() -> None:
    class Codec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = linear()

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x)

    assert "without a forward" in refused(Codec(), None)
    assert units(partition(Codec(), None, entry_points=("encode",))) == [""]
    assert units(partition(Bag(part=Codec()), by_class(Codec), entry_points=("encode",))) == ["", "part"]


def test_a_class_with_its_own_call_or_an_instance_forward_is_no_container() -> None:
    class Direct(nn.ModuleList):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert units(partition(Direct([linear()]), None)) == [""]
    bound = nn.ModuleList([linear()])
    bound.forward = lambda x: x
    assert units(partition(bound, None)) == [""]


# --- units that are there already -----------------------------------------------------------------------------------


def test_L14_existing_units_are_left_as_they_are() -> None:
    model = Stack(2)
    found = partition(model, by_class("Block"), is_unit=is_in(*model.blocks))
    assert owners(found) == {"": ["head.weight", "head.bias"]}
    assert found.nested == [("blocks.0", model.blocks[0]), ("blocks.1", model.blocks[1])]


def test_buffers_of_existing_units_stay_with_them() -> None:
    model = Bag(norm=nn.BatchNorm1d(2), own=linear())
    found = partition(model, None, is_unit=is_in(model.norm))
    assert found.units[0].buffers == [] and found.ignored_buffers == []


def test_nothing_inside_an_existing_unit_is_matched() -> None:
    model = Stack(2)
    found = partition(model, by_class(nn.Linear), is_unit=is_in(model.blocks[0]))
    assert units(found) == ["", "blocks.1.linear", "head"]
    inner = partition(model, by_class(nn.Linear), is_unit=is_in(model.blocks[0], model.blocks[0].linear))
    assert [name for name, _ in inner.nested] == ["blocks.0", "blocks.0.linear"]


def test_an_outer_unit_around_an_existing_one() -> None:
    model = nn.Sequential(Stack(1), linear())
    found = partition(model, by_class(Stack), is_unit=is_in(model[0].blocks[0]))
    assert owners(found) == {"": ["1.weight"], "0": ["0.head.weight", "0.head.bias"]}


def test_L14_wrapping_a_unit_again_is_an_error_that_names_it() -> None:
    block = Block()
    assert "Block" in (text := refused(block, None, is_unit=is_in(block))) and "already" in text


def test_a_tie_with_an_existing_unit_is_an_error_with_the_cure() -> None:
    model = Tied()
    text = refused(model, None, is_unit=is_in(model.embed))
    assert "'embed.weight'" in text and "'head.weight'" in text and "one call" in text
    text = refused(model, None, is_unit=is_in(model.embed), ignored=[model.head])
    assert "'head.weight'" in text
    assert units(partition(nn.Sequential(model, linear()), None, is_unit=is_in(model))) == [""], "a tie inside is fine"


def test_a_parameter_of_a_unit_outside_the_tree_is_an_error() -> None:
    """fsdp_wrap(model.embed) and then fsdp_wrap(model.head): only the parameter itself can tell."""
    model = Tied()
    text = refused(model.head, None, is_owned=lambda parameter: parameter is model.embed.weight)
    assert "'weight'" in text and "one call" in text


def test_a_module_that_is_both_inside_and_outside_an_existing_unit() -> None:
    shared = linear()
    model = Bag(unit=Bag(inner=shared), outside=shared)
    assert "unit.inner.weight" in refused(model, None, is_unit=is_in(model.unit))


# --- ignored --------------------------------------------------------------------------------------------------------


def test_ignored_modules_and_parameters_are_left_alone() -> None:
    model = Stack(2)
    model.blocks[1].norm = nn.BatchNorm1d(5)
    found = partition(model, by_class(nn.Linear), ignored=[model.blocks[1], model.head.bias])
    assert owners(found) == {
        "": [],
        "blocks.0.linear": ["blocks.0.linear.weight", "blocks.0.linear.bias"],
        "head": ["head.weight"],
    }
    names = [spec.name for spec in found.ignored_params]
    assert names == [n for n, _ in model.named_parameters() if n.startswith("blocks.1.") or n == "head.bias"]
    assert len(found.ignored_buffers) == 3 and all(not unit.buffers for unit in found.units)


def test_a_tied_parameter_is_ignored_at_all_its_places() -> None:
    model = Tied()
    found = partition(model, by_class(nn.Linear), ignored=[model.head])
    assert [spec.names for spec in found.ignored_params] == [("embed.weight", "head.weight")]
    assert owners(found) == {"": [], "mid": ["mid.weight", "mid.bias"]}


def test_ignored_may_be_a_generator_and_may_repeat() -> None:
    model = Stack(2)
    found = partition(model, None, ignored=(p for p in [model.head.bias, model.head.bias]))
    assert [spec.name for spec in found.ignored_params] == ["head.bias"]


def test_ignored_is_not_counted_by_size() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3, bias=False), linear()))
    assert units(partition(model, by_size(2), ignored=[model[0][0]])) == [""]
    assert units(partition(model, by_size(2), ignored=[model[0][0].weight])) == [""]
    assert units(partition(model, by_name("0.*"), ignored=[model[0][0].weight])) == ["", "0.1"], "nothing left to own"


def test_a_module_that_is_also_used_outside_the_ignored_part_is_ignored() -> None:
    shared = nn.BatchNorm1d(2)
    model = Bag(outside=shared, part=Bag(inner=shared), own=linear())
    found = partition(model, by_class(nn.BatchNorm1d, nn.Linear), ignored=[model.part])
    assert owners(found) == {"": [], "own": ["own.weight"]}
    assert [spec.names[0] for spec in found.ignored_params] == ["outside.weight", "outside.bias"]
    assert len(found.ignored_buffers) == 3


@pytest.mark.parametrize("item", ["head", 3, None, torch.ones(2), nn.Linear])
def test_ignored_holds_only_modules_and_parameters(item: Any) -> None:
    assert "ignored" in refused(Stack(1), None, ignored=[item], error=ConfigError)


@pytest.mark.parametrize("item", [linear(), nn.Parameter(torch.ones(2)), "head", 3], ids=["module", "parameter", "name", "number"])
def test_ignored_is_a_list(item: Any) -> None:
    assert "ignored=[...]" in refused(Stack(1), None, ignored=item, error=ConfigError)


def test_ignored_that_is_not_in_the_model_is_named() -> None:
    text = refused(Stack(1), None, ignored=[nn.Conv1d(3, 7, 5)], error=ConfigError)
    assert "Conv1d(3, 7" in text and "Stack" in text
    assert "(13, 2)" in refused(Stack(1), None, ignored=[nn.Parameter(torch.ones(13, 2))], error=ConfigError)


def test_ignored_cannot_be_the_root_or_part_of_a_unit() -> None:
    model = Stack(2)
    assert "Stack" in refused(model, None, ignored=[model], error=ConfigError)
    inside = (model.blocks[0], model.blocks[0].linear, model.blocks[0].linear.bias)
    for item in inside:
        text = refused(model, None, ignored=[item], is_unit=is_in(model.blocks[0]), error=ConfigError)
        assert "'blocks.0" in text and "already" in text


# --- compiled, parametrized, read by the parent ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", [by_class(Block), by_class("Block"), by_name("blocks.*"), by_name("blocks.[01]")])
def test_L11_the_compile_wrapper_becomes_the_unit(policy: Policy) -> None:
    model = Stack(2)
    model.blocks[0] = compiled(model.blocks[0])
    found = partition(model, policy)
    assert units(found) == ["", "blocks.0", "blocks.1"]
    assert found.units[1].module is model.blocks[0]
    assert owners(found)["blocks.0"] == ["blocks.0._orig_mod.linear.weight", "blocks.0._orig_mod.linear.bias"]


def test_a_compiled_root() -> None:
    found = partition(compiled(Stack(1)), by_class("Block", "Stack"))
    assert units(found) == ["", "_orig_mod.blocks.0"]


def test_a_compiled_unit_is_a_unit_already() -> None:
    block = Block()
    assert "Block" in refused(compiled(block), None, is_unit=is_in(block))
    model = nn.Sequential(compiled(block), linear())
    found = partition(model, by_class(Block), is_unit=is_in(block))
    assert owners(found) == {"": ["1.weight"]} and found.nested == [("0._orig_mod", block)]


def test_a_block_called_with_and_without_its_wrapper_is_owned_above() -> None:
    model = Bag(plain=Block())
    model.fast = compiled(model.plain)
    found = partition(model, by_class(Block))
    assert owners(found) == {"": ["plain.linear.weight", "plain.linear.bias"], "fast": []}


def test_parametrizations_are_no_units_of_their_own() -> None:
    model = Stack(1)
    torch.nn.utils.parametrizations.weight_norm(model.head)
    for policy in (by_size(1), by_class("Block", "Linear", "ParametrizationList"), by_name("head.**", "head")):
        found = partition(model, policy)
        assert not [name for name in units(found) if "parametrizations" in name]
        assert "head.parametrizations.weight.original0" in owners(found)["head"]


def test_a_weight_that_attention_reads_by_itself_stays_with_attention() -> None:
    """MultiheadAttention multiplies by out_proj.weight and never calls out_proj."""
    model = nn.TransformerEncoderLayer(4, 2, 8)
    found = partition(model, by_class(nn.Linear))
    assert units(found) == ["", "linear1", "linear2"]
    assert "self_attn.out_proj.weight" in owners(found)[""]


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 1))])
def test_torchscript_is_refused_by_name(make: Callable[[nn.Module], nn.Module]) -> None:
    scripted = make(linear())
    text = refused(Bag(a=linear(), b=Bag(fast=scripted)), None)
    assert "'b.fast'" in text and "TorchScript" in text
    assert "TorchScript" in refused(scripted, None)


def test_lazy_modules_are_refused_with_the_cure() -> None:
    text = refused(Bag(part=nn.LazyLinear(3)), None)
    assert "'part.weight'" in text and "forward" in text
    assert "running_mean" in refused(Bag(norm=nn.LazyBatchNorm1d(affine=False)), None)


def test_only_modules_can_be_wrapped() -> None:
    assert "nn.Module" in refused([linear()], None)


def test_meta_models_are_partitioned_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(3)))
    assert units(partition(model, by_class(nn.Linear))) == ["", "0", "1", "2"]


def test_the_model_is_not_changed() -> None:
    model = Tied()
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)], list(model.__dict__)
    partition(model, by_class(nn.Linear), ignored=[model.mid])
    after = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)], list(model.__dict__)
    assert before == after
