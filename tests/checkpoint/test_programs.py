"""Whole programs, as a person starts them: rank 0 holds the store and may be the first to leave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fsdplite as fsdp

pytestmark = pytest.mark.slow  # whole interpreters, and most of these wait for a time-out

SOURCE = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys, torch
import fsdplite as fsdp
from fsdplite.checkpoint import storage
from tests.checkpoint.faults import Fault, FaultyFileSystem
root, kind = sys.argv[1:]
fsdp.init_distributed(timeout=10)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = fsdp.fsdp_wrap(torch.nn.Sequential(torch.nn.Linear(5, 3)))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 5)).sum().backward()
optimizer.step()
if kind == "fine":
    for step in (1, 2):
        fsdp.save_checkpoint(root, model, optimizer, step=step)
    fsdp.save_checkpoint(root, model, optimizer, step=3, background=True)
else:
    fault = Fault("fail", 1, 28) if rank == 1 else Fault("count")
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: name == "create")):
        fsdp.save_checkpoint(root, model, optimizer, step=1, background=kind == "background")
"""


def start(root: Path, kind: str, world_size: int = 2) -> list[tuple[int, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE),
        }  # fmt: skip
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(root), kind]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    results = []
    try:
        for process in ranks:
            _, text = process.communicate(timeout=90)
            results.append((process.returncode, text))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    return results


def test_a_program_that_ends_after_its_save(tmp_path):
    results = start(tmp_path, "fine")
    assert [code for code, _ in results] == [0, 0], results
    assert [c.step for c in fsdp.list_checkpoints(tmp_path)] == [1, 2, 3]
    assert all(fsdp.verify_checkpoint(c.path).ok for c in fsdp.list_checkpoints(tmp_path))


def test_a_program_that_fails_says_the_same_on_every_rank(tmp_path):
    started = time.monotonic()
    results = start(tmp_path, "fail")
    assert [code for code, _ in results] == [1, 1], results
    assert all("rank 1 failed to write" in text and "errno 28" in text for _, text in results), results
    assert time.monotonic() - started < 60 and fsdp.latest_step(tmp_path) is None


def test_a_background_failure_is_printed_at_exit(tmp_path):
    results = start(tmp_path, "background")
    assert all("a background save failed: rank 1 failed to write" in text for _, text in results), results
    assert fsdp.latest_step(tmp_path) is None
