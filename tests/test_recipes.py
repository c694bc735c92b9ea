"""The recipes train, and what they print can be read by a program. Some are launched as a person launches them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fsdplite as fsdp

from tests.harness import run_program

from .recipe_module import recipe  # noqa: F401

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = ("--size", "tiny", "--block", "32", "--batch", "8", "--steps", "40", "--interval", "10", "--sample", "20",
        "--threads", "1")  # fmt: skip

# The first half of such a run, for what is compared step by step.
HALF = (*TINY, "--steps", "20", "--lr-steps", "40", "--sample", "0")
UNCLIPPED = ("--clip", "1e9")  # the norm is a sum in another order at stage 0, so clipping by it rounds otherwise


def run_recipe(name: str, *arguments: str, ranks: int = 1) -> str:
    return run_program(REPOSITORY / "recipes" / name, *arguments, ranks=ranks)


def launch(name: str, *arguments: str, ranks: int = 1) -> str:
    """What a recipe prints if a person starts it: by plain python for one rank and by torchrun for more."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*launcher, str(REPOSITORY / "recipes" / name), *arguments],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def events_of(printed: str) -> list[dict]:
    """Every line of a JSON report is one object."""
    return [json.loads(line) for line in printed.splitlines()]


def train(*arguments: str, ranks: int = 1) -> list[dict]:
    return events_of(run_recipe("train_gpt.py", "--json", *arguments, ranks=ranks))


def losses(events: list[dict]) -> list[float]:
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def one_rank() -> list[dict]:
    return train(*TINY)


def test_no_file_is_trained_on_and_held_out(recipe: ModuleType) -> None:
    train_files, held_out_files = recipe.split_files()
    assert len(train_files) > 100 and len(held_out_files) > 10
    assert not set(train_files) & set(held_out_files)
    assert not [path for path in train_files + held_out_files if {"site-packages", "test", "tests"} & set(path.parts)]
    total = sum(path.stat().st_size for path in train_files + held_out_files)
    assert 1_000_000 < total <= 6_000_000
    assert recipe.split_files() == (train_files, held_out_files)


def test_unigram_entropy(recipe: ModuleType) -> None:
    text = torch.tensor([7] * 4 + [9] * 2 + [11] * 2, dtype=torch.uint8)  # shares 1/2, 1/4, 1/4
    assert recipe.unigram_entropy(text) == pytest.approx(1.5 * torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize("world_size, microbatches", [(1, 1), (2, 1), (2, 3), (4, 3)])
def test_ranks_share_each_global_batch(recipe: ModuleType, world_size: int, microbatches: int) -> None:
    text = torch.arange(200, dtype=torch.uint8)

    def rows(world_size: int, rank: int, microbatches: int) -> list[tuple[int, ...]]:
        batches = recipe.Batches(text, 5, 12, microbatches, 0, rank, world_size, torch.device("cpu"))
        pairs = list(batches(3))
        assert len(pairs) == microbatches
        for tokens, targets in pairs:
            assert tokens.shape == targets.shape == (12 // world_size // microbatches, 5)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
        return [tuple(row.tolist()) for tokens, _ in pairs for row in tokens]

    together = [row for rank in range(world_size) for row in rows(world_size, rank, microbatches)]
    assert sorted(together) == sorted(rows(1, 0, 1))


def test_one_rank_trains(one_rank: list[dict]) -> None:
    start, *steps, done = one_rank
    assert start["event"] == "start" and start["world_size"] == 1 and start["stage"] == 3
    assert 2.5 < start["unigram_entropy"] < 4
    assert [event["step"] for event in steps] == [10, 20, 30, 40]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert done["event"] == "done" and done["held_out_loss"] < 5
    assert done["sample"].startswith("def ") and len(done["sample"]) > 4
    # Masters and two Adam moments, 12 bytes a parameter: nothing full-size is kept beside them.
    assert 12 * start["parameters"] <= steps[-1]["rest_bytes"] < 13 * start["parameters"]


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    every_step = (*TINY, "--interval", "1", "--sample", "0")
    saving = (*every_step, "--save", str(tmp_path), "--resume")  # in an empty folder there is nothing to resume from
    straight = train(*every_step, "--steps", "8")
    first = train(*saving, "--steps", "4", "--lr-steps", "8")
    second = train(*saving, "--steps", "8")
    assert [event["step"] for event in second if event["event"] == "resumed"] == [4]
    steps = [event for event in first + second if event["event"] == "step"]
    for name in ("step", "loss", "held_out_loss", "grad_norm", "lr"):  # bit for bit
        assert [e[name] for e in steps] == [e[name] for e in straight if e["event"] == "step"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-8"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_how_far_saves_and_loads_are(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(300, 400, bias=False)
    fsdp.fsdp_wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.setattr(sys, "stdout", Terminal())
    report = recipe.Report(10, speaks=True, as_json=False)
    for what in ("MB saved", "MB loaded"):
        with report.bytes_of(what, model):
            if what == "MB saved":
                fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
            else:
                fsdp.load_checkpoint(tmp_path, model, optimizer)
        steps, megabytes = report.live.tasks
        assert steps.completed == 0 and megabytes.visible and megabytes.description == what
        # fp32 and two moments
        assert megabytes.total == pytest.approx(3 * 4 * 300 * 400 / 1e6) and megabytes.finished
    report.close()
    for speaks, as_json in ((True, True), (False, False)):
        quiet = recipe.Report(10, speaks=speaks, as_json=as_json)
        with quiet.bytes_of("MB loaded", model):
            assert quiet.live is None


@pytest.mark.slow
def test_two_ranks_see_what_one_rank_sees(one_rank: list[dict]) -> None:
    assert losses(train(*HALF, ranks=2)) == pytest.approx(losses(one_rank)[:2], rel=2e-3)


@pytest.fixture(scope="module")
def stage_3() -> list[dict]:
    return train(*HALF, *UNCLIPPED, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_differ_in_memory_alone(stage_3: list[dict], stage: int) -> None:
    events = train(*HALF, *UNCLIPPED, "--stage", str(stage), ranks=2)
    assert losses(events) == losses(stage_3)  # bit for bit
    parameters = events[0]["parameters"]
    # fp32 with Adam on two ranks: masters and moments whole; halved beside full parameters; halved.
    assert events[-2]["rest_bytes"] == pytest.approx({0: 12, 1: 6 + 4, 2: 6 + 4}[stage] * parameters, rel=0.05)
    assert stage_3[-2]["rest_bytes"] == pytest.approx(6 * parameters, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--policy", "linear"), ("--policy", "whole", "--accumulation", "2"), ("--precision", "bf16")]
)
def test_options_train_alike(one_rank: list[dict], options: tuple[str, ...]) -> None:
    tolerance = 5e-2 if "bf16" in options else 2e-3
    found = losses(train(*HALF, *options, ranks=2))
    assert len(found) == 2 and found == pytest.approx(losses(one_rank)[:2], rel=tolerance)


@pytest.mark.slow
def test_plain_output_is_one_line_per_interval() -> None:
    lines = launch("train_gpt.py", *TINY).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 4 and all("held-out" in line and "tokens/s" in line for line in steps)
    assert not any("\x1b" in line for line in lines)


def test_a_batch_the_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(AssertionError, match="--batch: expected a multiple of 1 ranks x 3 microbatches, found 8"):
        run_recipe("train_gpt.py", *TINY, "--accumulation", "3")


@pytest.mark.slow
def test_loss_falls_well_below_the_unigram_entropy() -> None:
    rows = ("--size", "tiny", "--block", "32", "--batch", "32", "--threads", "1")  # the default run takes a minute
    start, *_, done = events_of(launch("train_gpt.py", "--json", *rows, "--steps", "200", "--sample", "0", ranks=2))
    assert done["held_out_loss"] < 0.85 * start["unigram_entropy"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_wrap_by_hand_prints_a_step(ranks: int) -> None:
    printed = run_recipe("wrap_by_hand.py", ranks=ranks)
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        assert unit in printed
    # up.weight is the first half of its unit, nearly: on two ranks it fits into rank 0's slice, with a piece of up.bias.
    assert "blocks.0.up.weight: 16,384 of 16,384 elements" in printed
    assert f"blocks.0.down.bias: {64 if ranks == 1 else 0} of 64 elements" in printed
    if ranks > 1:
        assert "all-gather" in printed and "reduce-scatter" in printed
