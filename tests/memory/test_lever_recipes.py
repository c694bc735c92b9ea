"""The recipes of the memory levers run as a person runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.test_recipes import run_recipe


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


@pytest.mark.slow
def test_bench_offload(tmp_path: Any) -> None:
    import subprocess
    import sys

    from tests.test_recipes import REPOSITORY

    command = [sys.executable, str(REPOSITORY / "scripts" / "bench.py"), "offload", "--path", str(tmp_path)]
    command += ["--million", "8", "--rounds", "2", "--buffer-mib", "1", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["numel"] == 8_000_000 and len(found["rounds"]) == 2
    assert "share of the disk's rate" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
