"""partition(): which modules become units, and who owns each parameter and buffer."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn

from fsdplite.errors import PolicyError
from fsdplite.partition import blocks_worth_wrapping, partition
from fsdplite.policy import Policy, by_class, by_name, by_predicate, by_size
from tests.harness import MLP, Block, Stack
from tests.trees import Bag, Other, Tied, compiled, linear, owners, refused, units

# --- units ----------------------------------------------------------------------------------------------------------


def test_without_a_policy_the_root_owns_everything_in_order() -> None:
    model = Stack(2)
    found = partition(model, None)
    assert owners(found) == {"": [name for name, _ in model.named_parameters()]}
    assert found.units[0].module is model
    assert (found.nested, found.ignored_params, found.ignored_buffers, found.warnings) == ([], [], [], [])


def test_one_unit_per_block_and_the_rest_to_the_root() -> None:
    assert owners(partition(Stack(2), by_class(Block))) == {
        "": ["head.weight", "head.bias"],
        "blocks.0": ["blocks.0.linear.weight", "blocks.0.linear.bias"],
        "blocks.1": ["blocks.1.linear.weight", "blocks.1.linear.bias"],
    }


def test_units_are_in_named_modules_order_with_the_root_first() -> None:
    model = Stack(3)
    found = partition(model, by_class("Linear", "Block"))
    order = [name for name, _ in model.named_modules()]
    assert units(found) == sorted(units(found), key=order.index)
    assert units(found)[0] == "" and len(units(found)) == 1 + 3 + 3 + 1
    assert owners(found)["blocks.1"] == [], "a unit may own nothing"


def test_modules_without_parameters_are_no_units() -> None:
    leaves = by_predicate(lambda module: not list(module.children()))
    assert units(partition(MLP(), leaves)) == ["", "0", "2"]
    text = refused(MLP(), by_class(nn.Tanh), error=PolicyError)
    assert "without parameters" in text and "1" in text


def test_a_policy_that_matches_only_the_root_is_fine() -> None:
    assert units(partition(Block(), by_class(Block))) == [""]
    assert units(partition(Stack(2), by_size(78))) == [""]


def test_by_size_works_bottom_up() -> None:
    """Each Linear has 30 elements, the head 18: what no unit below took counts for the module above."""
    assert units(partition(Stack(2), by_size(30))) == ["", "blocks.0.linear", "blocks.1.linear"]
    assert units(partition(Stack(2), by_size(18))) == ["", "blocks.0.linear", "blocks.1.linear", "head"]
    model = nn.Sequential(nn.Sequential(linear(), nn.Linear(3, 3, bias=False), linear()), linear())
    assert owners(partition(model, by_size(9))) == {"": ["0.0.weight", "0.2.weight", "1.weight"], "0.1": ["0.1.weight"]}
    assert owners(partition(model, by_size(2))) == {
        "": ["1.weight"],
        "0": ["0.0.weight", "0.2.weight"],
        "0.1": ["0.1.weight"],
    }


def test_by_size_skips_containers_and_counts_a_tied_weight_once() -> None:
    assert units(partition(Stack(4), by_size(60))) == [""], "the ModuleList holds 120 elements and cannot be called"
    tied = Bag(a=linear(), b=linear())
    tied.b.weight = tied.a.weight
    model = Bag(inside=tied, other=nn.Linear(2, 1, bias=False))
    assert units(partition(model, by_size(2))) == ["", "other"]


def test_by_size_counts_what_another_policy_took() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3, bias=False), linear()))
    assert units(partition(model, by_size(10))) == ["", "0"]
    assert units(partition(model, by_size(10) | by_name("0.0"))) == ["", "0.0"]


def test_warnings_reach_the_caller() -> None:
    (warning,) = partition(Stack(2), by_class("Block", "Decoder")).warnings
    assert "Decoder" in warning


@pytest.mark.parametrize("policy", [by_class("Blok"), by_name("layers.*")], ids=["class", "name"])
def test_L1_a_policy_that_matches_nothing_is_an_error(policy: Policy) -> None:
    assert "matches no module" in refused(Stack(2), policy, error=PolicyError)


# --- tied and shared ------------------------------------------------------------------------------------------------


def test_T1_a_tied_weight_belongs_to_the_lowest_unit_around_its_users() -> None:
    model = Tied()
    found = partition(model, by_class(nn.Embedding, nn.Linear))
    assert owners(found) == {"": ["embed.weight"], "embed": [], "mid": ["mid.weight", "mid.bias"], "head": []}
    (spec,) = found.units[0].params
    assert spec.names == ("embed.weight", "head.weight")
    assert spec.parameter is model.embed.weight
    assert spec.locations == [(model.embed, "weight"), (model.head, "weight")]
    assert sum(s.parameter.numel() for unit in found.units for s in unit.params) == 64


def test_a_tie_inside_one_block_stays_in_the_block() -> None:
    model = nn.Sequential(Tied(), Tied(), linear())
    found = partition(model, by_class(Tied, nn.Embedding, nn.Linear))
    assert owners(found)[""] == []
    assert owners(found)["0"] == ["0.embed.weight"] and owners(found)["1"] == ["1.embed.weight"]


def test_a_tie_across_depths_goes_to_the_lowest_common_unit() -> None:
    """Units: root > a > a.x, a.y > a.y.z. Tied: a.x with a.y.z (so a), a.y.z with a.y (so a.y)."""
    z = Bag(p=nn.Parameter(torch.ones(1)), q=nn.Parameter(torch.ones(1)), own=nn.Parameter(torch.ones(1)))
    model = Bag(a=Bag(x=Other(p=z.p), y=Other(z=z, q=z.q)))
    found = partition(model, by_name("a", "a.*", "a.y.z"))
    assert owners(found) == {"": [], "a": ["a.x.p"], "a.x": [], "a.y": ["a.y.q"], "a.y.z": ["a.y.z.own"]}


def test_a_weight_that_the_parent_holds_too_belongs_to_the_parent() -> None:
    child = linear()
    model = Bag(block=Bag(alias=child.weight, proj=child))
    found = partition(model, by_class(nn.Linear, Bag))
    assert owners(found)["block"] == ["block.alias"] and owners(found)["block.proj"] == []


def test_T4_one_module_under_two_names_is_one_unit() -> None:
    model = Bag()
    model.a = model.b = linear()
    found = partition(model, by_class(nn.Linear))
    assert owners(found) == {"": [], "a": ["a.weight"]}
    (spec,) = found.units[1].params
    assert spec.names == ("a.weight", "b.weight")
    assert spec.locations == [(model.a, "weight")]


def test_T4_matched_by_its_second_name() -> None:
    model = Bag()
    model.a = model.b = linear()
    assert owners(partition(model, by_name("b"))) == {"": [], "a": ["a.weight"]}


def test_a_module_shared_by_two_units_is_owned_above_both() -> None:
    """Either unit may run without the other; a subtree test alone would give it to the first."""
    shared = linear()
    model = Bag(enc=Bag(emb=shared, own=linear()), dec=Bag(emb=shared))
    found = partition(model, by_name("enc", "dec"))
    assert owners(found) == {"": ["enc.emb.weight"], "enc": ["enc.own.weight"], "dec": []}
    found = partition(model, by_name("enc", "dec", "enc.emb"))
    assert owners(found)["enc.emb"] == ["enc.emb.weight"], "a unit of its own gathers itself, whoever calls it"


def test_one_parameter_under_two_names_of_one_module() -> None:
    model = linear()
    model.again = model.weight
    (spec,) = partition(model, None).units[0].params
    assert spec.names == ("weight", "again")
    assert spec.locations == [(model, "weight"), (model, "again")]


def random_tree(rng: random.Random, depth: int) -> Bag:
    """Modules and parameters that are reused at random places."""
    modules: list[nn.Module] = []
    parameters: list[nn.Parameter] = []

    def build(level: int) -> Bag:
        bag = (Bag if rng.random() < 0.5 else Other)()
        for key in "pq"[: rng.randint(0, 2)]:
            if not parameters or rng.random() < 0.6:
                parameters.append(nn.Parameter(torch.ones(rng.randint(0, 3))))
                setattr(bag, key, parameters[-1])
            else:
                setattr(bag, key, rng.choice(parameters))
        for key in "abc"[: rng.randint(1, 3) if level else 0]:
            reuse = modules and rng.random() < 0.2
            setattr(bag, key, rng.choice(modules) if reuse else build(level - 1))
        modules.append(bag)
        return bag

    return build(depth)


def is_chosen(chosen: set[int], module: nn.Module) -> bool:
    return id(module) in chosen


def test_every_parameter_has_one_owner_that_encloses_all_its_uses() -> None:
    """Checked path by path: the owner is on every path to the parameter, and no unit below the owner is."""
    for seed in range(60):
        rng = random.Random(seed)
        root = random_tree(rng, depth=4)
        chosen = {id(root), *(id(module) for module in root.modules() if rng.random() < 0.4)}
        found = partition(root, by_predicate(functools.partial(is_chosen, chosen)))
        owned = [spec for unit in found.units for spec in unit.params]
        assert sorted(map(id, root.parameters())) == sorted(id(spec.parameter) for spec in owned)
        ids = {id(unit.module) for unit in found.units}
        paths: dict[int, list[tuple[str, list[int]]]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            steps = name.split(".")[:-1]
            on_path = [root.get_submodule(".".join(steps[:i])) for i in range(len(steps) + 1)]
            paths.setdefault(id(parameter), []).append((name, [id(m) for m in on_path if id(m) in ids]))
        for unit in found.units:
            canonical = [spec.name for spec in unit.params]
            order = [name for name, _ in root.named_parameters()]
            assert canonical == sorted(canonical, key=order.index)
            for spec in unit.params:
                uses = paths[id(spec.parameter)]
                assert list(spec.names) == [name for name, _ in uses]
                on_all = set.intersection(*(set(path) for _, path in uses))
                lowest = max(on_all, key=uses[0][1].index)
                assert id(unit.module) == lowest, (seed, spec.names)
                assert all(module._parameters[key] is spec.parameter for module, key in spec.locations)


# --- buffers --------------------------------------------------------------------------------------------------------


def test_buffers_belong_to_the_unit_nearest_above() -> None:
    model = Stack(1)
    model.register_buffer("step", torch.zeros((), dtype=torch.int64), persistent=False)
    model.register_buffer("nothing", None)
    model.blocks[0].norm = nn.BatchNorm1d(5)
    found = partition(model, by_class(Block))
    root, block = found.units
    assert [(spec.name, spec.key, spec.persistent) for spec in root.buffers] == [("step", "step", False)]
    assert [spec.name for spec in block.buffers] == [
        "blocks.0.norm.running_mean",
        "blocks.0.norm.running_var",
        "blocks.0.norm.num_batches_tracked",
    ]
    assert all(spec.module is model.blocks[0].norm and spec.persistent for spec in block.buffers)


def test_a_shared_modules_buffers_have_one_owner() -> None:
    norm = nn.BatchNorm1d(2)
    model = Bag(x=Bag(norm=norm, own=linear()), y=Bag(norm=norm))
    found = partition(model, by_name("x", "y"))
    assert [spec.name for spec in found.units[0].buffers if spec.key == "running_mean"] == ["x.norm.running_mean"]
    assert [unit.buffers for unit in found.units[1:]] == [[], []]


# --- blocks worth wrapping ------------------------------------------------------------------------------------------


def test_L2_repeated_blocks_are_named_with_their_share() -> None:
    text = blocks_worth_wrapping(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))))
    assert text is not None and "4 Linear" in text and "100%" in text and 'by_class("Linear")' in text
    text = blocks_worth_wrapping(Stack(3))
    assert text is not None and "3 Block" in text and "83%" in text  # 90 of 108


def test_blocks_are_found_at_any_depth_and_through_containers() -> None:
    nested = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    assert "4 Block" in str(blocks_worth_wrapping(Bag(stages=nested, head=linear())))
    assert "'model'" in (text := str(blocks_worth_wrapping(Bag(model=Stack(4), extra=linear())))) and "4 Block" in text
    model = Stack(2)
    model.blocks[0] = compiled(model.blocks[0])
    assert "2 Block" in str(blocks_worth_wrapping(model))


def test_no_advice_where_wrapping_would_not_help() -> None:
    assert blocks_worth_wrapping(linear()) is None
    assert blocks_worth_wrapping(nn.Sequential(nn.Linear(5, 5), nn.Tanh())) is None
    assert blocks_worth_wrapping(Bag(a=nn.Linear(100, 100), blocks=nn.ModuleList([Block(), Block()]))) is None
    assert blocks_worth_wrapping(nn.Sequential(nn.Tanh(), nn.Tanh())) is None
    shared = Block()
    assert blocks_worth_wrapping(Bag(a=shared, b=shared)) is None, "one module used twice is one block"
