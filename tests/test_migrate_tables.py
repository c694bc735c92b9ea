"""The tables of `fsdplite migrate` speak of names that exist, here and in torch, and its guide says what it says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest
import torch

import fsdplite as fsdp
from fsdplite.migration import config_settings, plain
from fsdplite.migration.engines import ENGINES
from fsdplite.migration.finder import find
from fsdplite.migration.rule import VERDICTS, Engine, Rule

from .recipe_module import recipe  # noqa: F401

REPOSITORY = Path(__file__).resolve().parent.parent


def rules() -> list[tuple[Engine, Rule]]:
    return [(engine, rule) for engine in ENGINES for rule in engine.rules]


def texts(rule: Rule) -> list[str]:
    """Everything that a rule may say."""
    said = [rule.write, rule.note, rule.reference or ""]
    for argument in rule.arguments.values():
        said += [*argument.values.values(), *argument.notes.values(), *argument.templates.values(), argument.note,
                 argument.none, argument.number, argument.absent, argument.absent_note, argument.otherwise]  # fmt: skip
    return said


def test_every_name_of_this_library_is_exported() -> None:
    said = [text for _, rule in rules() for text in texts(rule)]
    for setting in config_settings.SETTINGS.values():
        said += [setting.write, setting.note, *setting.values.values()]
    said += [text for text in vars(plain).values() if isinstance(text, str)]
    guide = (REPOSITORY / "docs" / "migrating.md").read_text(encoding="utf-8")
    said += re.findall(r"`[^`\n]*`", guide) + re.findall(r"```python\n.*?```", guide, re.DOTALL)
    names = {name for text in said for name in re.findall(r"(?<!distributed\.)\bfsdp\.([A-Za-z_]\w*)", text)}
    assert len(names) > 15 and not names - set(fsdp.__all__)
    methods = {name for text in said for name in re.findall(r"\bmodel\.((?:set|clip|no)_\w+)\(", text)}
    assert methods and all(hasattr(fsdp.FSDPUnit, name) for name in methods)


def test_every_option_is_a_parameter_of_its_call() -> None:
    for engine, rule in rules():
        call = re.match(r"fsdp\.(\w+)\(.*\{options\}", rule.write)
        if call is None:
            continue
        parameters = set(inspect.signature(getattr(fsdp, call[1])).parameters)
        options = {argument.to for argument in rule.arguments.values() if not argument.to.isdigit()} - {""}
        for argument in rule.arguments.values():
            for text in (*argument.values.values(), argument.absent, argument.otherwise):
                options |= {part.partition("=")[0] for part in text.split("; ") if re.match(r"\w+=", part)}
        assert options <= parameters, f"{engine.name}: {rule.names}: {options - parameters}"


@pytest.mark.filterwarnings("ignore")
def test_all_arguments_are_known_where_a_rule_says_so() -> None:
    from torch.distributed import fsdp as torch_fsdp

    theirs = {
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        **{name: getattr(torch_fsdp, name) for name in ("FullyShardedDataParallel", "MixedPrecision", "fully_shard",
                                                        "MixedPrecisionPolicy")},
    }  # fmt: skip
    complete = {rule.names: rule for _, rule in rules() if rule.knows_all}
    assert complete.keys() == theirs.keys()
    for name, rule in complete.items():
        parameters = set(inspect.signature(theirs[name]).parameters)
        assert not parameters - {*rule.parameters.split(), *rule.arguments}, name


def test_what_is_to_be_written_is_python() -> None:
    for engine, rule in rules():
        assert rule.verdict in VERDICTS and (rule.write or rule.note), rule.names
        assert not rule.note.endswith("."), rule.note
        if "{options}" == rule.write:
            continue
        text = re.sub(r"\{[^}]*\}", "x", re.sub(r"\{options\}|\{config!settings[^}]*\}", "", rule.write))
        ast.parse(f"f({text})" if re.match(r"(?!state|report|norm)\w+=", text) else text)  # options, or a statement


def test_what_does_not_name_the_users_objects_can_be_made() -> None:
    fragments = [
        text for _, rule in rules() for argument in rule.arguments.values() for text in argument.values.values()
    ] + [text.replace("{path}", "/tmp") for s in config_settings.SETTINGS.values() for text in s.values.values()]
    made = [part.partition("=")[2] for text in fragments for part in text.split("; ") if "=fsdp." in part]
    made += [rule.write.partition("=")[2] for _, rule in rules() if re.match(r"\w+=fsdp\.[^{]*$", rule.write)]
    names = {"fsdp": fsdp, "torch": torch, "Block": torch.nn.Linear}
    values = [eval(text, names) for text in dict.fromkeys(made)]
    assert len(values) > 5 and {type(value) for value in values} >= {fsdp.Offload, fsdp.Precision}


PLACES = {  # where torch keeps names that its users import from deeper modules
    "torch.nn": ("torch.nn.parallel",),
    "torch.distributed": (
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "torch.distributed.algorithms.model_averaging.averagers",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch.distributed.optim",
        "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
        "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks",
    ),
    "torch": ("torch.distributed.fsdp",),
    "torch.distributed.fsdp": ("torch.distributed.fsdp.wrap", "torch.distributed.fsdp.api"),
    "torch.distributed.algorithms._checkpoint": ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper",),
    "torch.distributed._composable": ("torch.distributed._composable.checkpoint_activation",),
    "torch.distributed.tensor": ("torch.distributed.tensor.parallel",),
}  # fmt: skip


def is_in_torch(place: str, name: str) -> bool:
    parts = f"{place}.{name}".split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.filterwarnings("ignore")
def test_every_name_of_torch_exists() -> None:
    from torch.distributed.fsdp import FSDPModule

    methods = {"DDP model": "torch.nn.parallel.DistributedDataParallel", "FSDP1 model":
               "torch.distributed.fsdp.FullyShardedDataParallel",
               "ZeRO optimizer": "torch.distributed.optim.ZeroRedundancyOptimizer"}  # fmt: skip
    missing = []
    for engine, rule in rules():
        if not engine.modules[0].startswith("torch"):
            continue
        for name in rule.names.split():
            if rule.of:
                owners = [methods[kind] for kind in rule.of.split("|") if kind in methods]
                owners = owners or ["torch.nn.parallel.DistributedDataParallel", "torch.distributed.tensor.DTensor",
                                    "torch.distributed.fsdp.FullyShardedDataParallel"]  # fmt: skip
                there = any(is_in_torch(owner, name) for owner in owners) or hasattr(FSDPModule, name)
                there = there or rule.is_attribute  # set by __init__
            else:
                places = [place for module in engine.modules for place in (module, *PLACES.get(module, ()))]
                there = any(is_in_torch(place, name) for place in places)
            if not there:
                missing.append(f"{engine.name}: {name}")
    assert not missing, missing


def test_optimizers_are_those_that_the_engine_refuses() -> None:
    from fsdplite.optimizer_hooks import WHOLE_TENSOR_OPTIMIZERS

    assert plain.WHOLE_TENSOR_OPTIMIZERS == WHOLE_TENSOR_OPTIMIZERS


def sections() -> list[tuple[str, list[str]]]:
    text = (REPOSITORY / "docs" / "migrating.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    found = [(part.partition("\n")[0], re.findall(r"```python\n(.*?)```", part, re.DOTALL)) for part in parts]
    return [(heading, blocks) for heading, blocks in found if len(blocks) == 2]


def test_what_the_guide_tells_to_write_runs(
    recipe: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (heading, (_, after)) in enumerate(sections()):
        size = recipe.SIZES["tiny"]
        model = recipe.GPT(size, 8)
        rows = torch.randint(256, (2, 2, 9))
        names = {
            "model": model, "GPT": lambda: recipe.GPT(size, 8), "Block": recipe.Block, "mesh": None,
            "batches": [(row[:, :-1], row[:, 1:]) for row in rows],
            "optimizer": torch.optim.AdamW(model.parameters()),
        }  # fmt: skip
        exec(compile(after.replace("runs/a", f"runs/{number}"), heading, "exec"), names)
        assert fsdp.latest_step(f"runs/{number}") == 1000, heading


def test_the_guide_shows_what_the_command_says() -> None:
    assert len(sections()) >= 4
    for heading, (before, after) in sections():
        findings = find(ast.parse(before))
        assert len(findings) > 2 and all(f.verdict != "none" for f in findings), heading
        assert [f for f in find(ast.parse(after)) if f.verdict != "keep"] == [], heading
        flat = re.sub(r"\s", "", after)
        for written in (f.write for f in findings if f.write.startswith("fsdp.fsdp_wrap(") and f.verdict == "change"):
            call = re.sub(r"\s", "", written.partition(",")[0].partition(")")[0])
            assert call in flat, (heading, written)
