"""The recipes of the memory levers run as a person runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_recipes import REPOSITORY, run_recipe


@pytest.mark.slow
def test_train_recompute() -> None:
    text = run_recipe("train_recompute.py", "--depths", "4", "9", "--rows", "64", "--width", "16", "--json", ranks=2)
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["lever"], row["depth"]) for row in rows[4:]] == [
        ("none", 9), ("each block", 9), ("sqrt", 9), ("within 40MB", 9)
    ]  # fmt: skip
    assert all(row["losses"] == rows[4]["losses"] for row in rows[4:])
    held = {row["lever"]: row["held_bytes"] for row in rows[4:]}
    assert held["sqrt"] < held["none"] / 2 and held["within 40MB"] == held["none"]
    chart = run_recipe("train_recompute.py", "--depths", "4", "--rows", "64", "--width", "16")
    assert "█" in chart and "OTHER" not in chart


@pytest.mark.slow
def test_train_offload(tmp_path: Any) -> None:
    text = run_recipe("train_offload.py", "--blocks", "2", "--width", "64", "--path", str(tmp_path))
    assert "the same losses in all runs" in text and "nvme" in text and "█" in text
    (row,) = (
        json.loads(line)
        for line in run_recipe(
            "train_offload.py", "--blocks", "2", "--width", "64", "--path", str(tmp_path), "--only", "nvme", "--json", ranks=2
        ).splitlines()
    )
    assert row["lever"] == "nvme" and len(row["losses"]) == 4
    assert list(tmp_path.iterdir()) == []


def bench_offload(folder: Path, *options: str) -> list[str]:
    script = str(REPOSITORY / "scripts" / "bench.py")
    return [sys.executable, "-W", "ignore", script, "offload", "--path", str(folder), "--million", "8", *options]


@pytest.mark.slow
def test_bench_offload(tmp_path: Path) -> None:
    command = bench_offload(tmp_path, "--rounds", "2", "--buffer-mib", "1", "--json", str(tmp_path / "found.json"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["numel"] == 2048**2 and len(found["rounds"]) == 2, "as many units as 8 million parameters fill"
    assert "share of the disk's rate" in done.stdout and "with in_backward" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.slow
def test_bench_offload_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(bench_offload(tmp_path, "--rounds", "1000"))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("*/*"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM and list(tmp_path.iterdir()) == []
