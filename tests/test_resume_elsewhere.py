"""`recipes/resume_elsewhere.py` against a run of plain PyTorch that never stops, and what it says of wrong losses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = REPOSITORY / "recipes" / "resume_elsewhere.py"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resume_elsewhere", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses() -> list[float]:
    """The recipe's model and rows, written down again, without the library."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(1, 13):
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sin().cumsum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_losses_do_not_notice_a_kill_and_other_ranks(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(REPOSITORY)}
    root = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, str(RECIPE), "--root", str(root)],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    events = [json.loads(line) for line in (root / "losses.jsonl").read_text().splitlines()]
    seen = [(event["step"], event["ranks"], event["attempt"]) for event in events]
    before = [(step, 2, 0) for step in range(1, 7)]
    after = [(step, 2, 1) for step in (4, 5, 6)]
    assert seen == [*before, *after, *((s, 3, 0) for s in (7, 8, 9)), *((s, 1, 0) for s in (10, 11, 12))]
    expected = plain_losses()
    assert [e["loss"] for e in events] == pytest.approx([expected[e["step"] - 1] for e in events], rel=1e-5)
    assert [e["loss"] for e in events[3:6]] == [e["loss"] for e in events[6:9]]  # bit for bit
    names = sorted(path.name for path in root.iterdir())
    assert names == ["losses.jsonl", "step-12", "step-3", "step-6", "step-9"]  # what the killed save left is gone
    assert "equal: every loss" in result.stdout and result.stdout.count("after the restart") == 3


def events_of(losses: dict[int, float], attempts: tuple[int, ...] = (0, 1)) -> list[dict]:
    steps = {0: range(1, 7), 1: range(4, 7)}
    events = [
        {"step": step, "ranks": 2, "attempt": attempt, "loss": losses[step]}
        for attempt in attempts for step in steps[attempt]
    ]
    return events + [{"step": s, "ranks": 3 if s < 10 else 1, "attempt": 0, "loss": losses[s]} for s in range(7, 13)]


def test_the_verdict_is_earned(recipe: ModuleType) -> None:
    losses = {step: 1.0 / step for step in range(1, 13)}
    assert recipe.judge(events_of(losses), losses) == []
    (problem,) = recipe.judge(events_of(losses), losses | {8: 0.1251})
    assert "step 8 on 3 ranks" in problem and "0.1251" in problem and "0.125" in problem
    other = events_of(losses)
    other[7]["loss"] += 1e-8  # within rounding, and still not what the first attempt computed
    (problem,) = recipe.judge(other, losses)
    assert "step 5" in problem and "before the kill" in problem
    (problem,) = recipe.judge(events_of(losses, attempts=(0,)), losses)
    assert "expected a restart" in problem
    (problem,) = recipe.judge(events_of(losses)[:-1], losses)
    assert "expected steps 1 to 12" in problem
