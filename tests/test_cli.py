"""The `fsdplite` command as a person and as a program use it: exit codes, output, and several ranks at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdplite.cli import main
from fsdplite.cli.target import UsageError, load_target

REPOSITORY = Path(__file__).resolve().parent.parent
MODELS = """
import os

from torch import nn

from helper import WIDTH


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Broken(Block):
    def forward(self, x):  # forgets its residual path once it is a unit
        return super().forward(x) - x * hasattr(self, "no_sync")


def good():
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def broken():
    return nn.Sequential(Broken(), nn.Linear(WIDTH, 3))


def raises():
    raise RuntimeError("no weights today")


def raises_on_rank_1():
    if os.environ.get("RANK") == "1":
        raise RuntimeError("no weights here")
    return good()


NUMBER = 3
BUILT = good()
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `parity_models`, which is the current one."""
    (tmp_path / "parity_models.py").write_text(MODELS)
    (tmp_path / "helper.py").write_text("WIDTH = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("parity_models", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def parity_on_ranks(*arguments: str) -> subprocess.CompletedProcess:
    """The command in a process of its own, which starts two more."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "fsdplite", "parity", *arguments, "--ranks", "2"],
        capture_output=True, text=True, timeout=180, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("target", ["parity_models.py:good", "parity_models:good"])
def test_one_rank_agrees(target: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["parity", target, "--policy", "by_class:Block", "--bitwise"]) == 0
    out = capsys.readouterr().out
    assert "6 of 6 tensors are equal, parameter and gradient" in out and "all 12 comparisons within equal bits" in out
    assert "0.linear.weight" not in out and len(out.splitlines()) == 3
    assert max(map(len, out.splitlines())) <= 80


def test_a_broken_model_is_found(capsys: pytest.CaptureFixture) -> None:
    assert main(["parity", "parity_models.py:broken", "--policy", "by_class:Broken"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out and "beyond tolerance" in out and "1.weight" in out


def test_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["parity", "parity_models.py:broken", "--policy", "by_class:Broken", "--json", "--steps", "2"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False and found["world_size"] == 1 and len(found["losses"]) == found["steps"] == 2
    rows = {(row["name"], row["kind"]): row for row in found["differences"]}
    assert len(rows) == 8 and rows["0.linear.weight", "parameter"]["shape"] == [7, 7]
    assert not rows["1.weight", "gradient"]["passed"] and rows["1.weight", "gradient"]["difference"] > 0


@pytest.mark.slow
def test_two_ranks_agree() -> None:
    run = parity_on_ranks("parity_models.py:good", "--policy", "by_class:Block|by_name:2", "--precision", "bf16",
                          "--optimizer", "adamw", "--lr", "0.01", "--bitwise", "--json")  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["passed"] and found["world_size"] == 2 and found["precision"] == "bf16"
    assert all(row["difference"] == 0 for row in found["differences"])


@pytest.mark.slow
def test_two_ranks_differ() -> None:
    run = parity_on_ranks("parity_models:broken", "--policy", "by_class:Broken")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "DIFFERS" in run.stdout


@pytest.mark.slow
def test_what_another_rank_says_is_shown() -> None:
    run = parity_on_ranks("parity_models:raises_on_rank_1")
    assert run.returncode == 1
    assert "rank 1 failed" in run.stderr and "no weights here" in run.stderr


@pytest.mark.parametrize(
    "arguments, needle",
    [
        (["parity_models.py"], "package.module:name"),
        (["nowhere.py:good"], "no file 'nowhere.py'"),
        (["nowhere.models:good"], "no module 'nowhere.models'"),
        (["parity_models:god"], "has no 'god'; it has BUILT, Block, Broken, broken, good"),
        (["parity_models:NUMBER"], "cannot be called"),
        (["parity_models:BUILT"], "a function without arguments"),
        (["parity_models:good", "--policy", "by_size:many"], "by_size:NUMBER"),
        (["parity_models:good", "--policy", "by_class:Blok"], 'by_class("Block")'),
        (["parity_models:good", "--optimizer", "Adamm"], "AdamW"),
        (["parity_models:good", "--ranks", "0"], "at least 1"),
        (["parity_models:good", "--stage", "4"], "invalid choice"),
        ([], "TARGET"),
    ],
)
def test_usage(arguments: list[str], needle: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["parity", *arguments]) == 2
    assert needle in capsys.readouterr().err


def test_ranks_and_a_launcher_contradict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["parity", "parity_models:good", "--ranks", "3"]) == 2
    assert "leave --ranks out" in capsys.readouterr().err


def test_an_error_of_the_users_own_is_theirs() -> None:
    with pytest.raises(RuntimeError, match="no weights today"):
        main(["parity", "parity_models:raises"])


def test_help_lists_what_exists(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "parity" in listed and "exit codes" in listed
    assert main([]) == 2 and main(["parity", "--help"]) == 0
    assert "make_batch(step, rank, world_size)" in capsys.readouterr().out
    assert main(["prity", "x:y"]) == 2


@pytest.mark.parametrize(
    "arguments, command, meant",
    [
        (["plan", "x:y", "--polcy", "X"], "plan", "--polcy (did you mean '--policy'?)"),
        (["parity", "x:y", "--presicion=bf16"], "parity", "--presicion (did you mean '--precision'?)"),
        (["doctor", "--qick"], "doctor", "--qick (did you mean '--quick'?)"),
        (["migrate", "train.py", "--jason"], "migrate", "--jason (did you mean '--json'?)"),
        (["ckpt", "diff", "a", "b", "--ignroe", "x"], "ckpt diff", "--ignroe (did you mean '--ignore'?)"),
        (["--versoin"], "", "--versoin (did you mean '--version'?)"),
        (["ckpt", "ls", "a", "b"], "ckpt ls", "not expected: b"),
    ],
)
def test_a_misspelled_option(arguments: list[str], command: str, meant: str, capsys: pytest.CaptureFixture) -> None:
    """The command that was meant says so, with its own usage."""
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: fsdplite {command}".rstrip() + " ") and meant in said


def test_targets_may_be_attributes_of_attributes() -> None:
    assert load_target("parity_models:Block.forward").__name__ == "forward"
    with pytest.raises(UsageError):
        load_target("parity_models:Block.backward")


def test_a_missing_import_inside_a_module_is_not_a_missing_module(models: Path) -> None:
    (models / "needs.py").write_text("import not_there_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_target("needs:build")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA, where the command says that it is missing")
def test_gpu_check_says_what_it_needs() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0 and "CUDA" in json.loads(run.stdout)["skipped"]
