"""Whole programs, as a person starts them: rank 0 holds the store and may be the first to leave.

All of them are forks of one interpreter that has imported torch, and end as programs do: by their last line or an
exception, through the interpreter's own exit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fsdplite as fsdp

pytestmark = pytest.mark.slow  # an interpreter of its own, and programs that wait for each other

SOURCE = Path(__file__).resolve().parents[2]
WORLD_SIZE = 2

PROGRAM = """
import json, os, sys, torch
import fsdplite as fsdp
from fsdplite.checkpoint import storage
from tests.checkpoint.faults import Fault, FaultyFileSystem
from tests.harness import preload  # what a first step would import, once instead of in each fork
for program in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        break
    program["child"] = child
    print(json.dumps(program), flush=True)
else:
    while True:
        try:
            child, status = os.wait()
        except ChildProcessError:
            sys.exit()
        print(json.dumps({"ended": child, "code": os.waitstatus_to_exitcode(status)}), flush=True)
root, kind, rank = program["root"], program["kind"], program["rank"]
sys.stderr.flush()
os.dup2(os.open(program["log"], os.O_WRONLY | os.O_CREAT), 2)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(program["port"]))
fsdp.init_distributed(timeout=10)
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[Path, list[tuple[int, str]]]]:
    """Of each kind of program its root, and by rank its exit code and what it wrote to stderr."""
    base = tmp_path_factory.mktemp("programs")
    programs = []
    for kind in ("fine", "fail", "background"):
        port = free_port()
        programs += [
            {"kind": kind, "rank": rank, "port": port, "root": str(base / kind), "log": str(base / f"{kind}-{rank}")}
            for rank in range(WORLD_SIZE)
        ]
    environment = {
        **os.environ, "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE),
    }  # fmt: skip
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    codes = {line["ended"]: line["code"] for line in lines if "ended" in line}
    found: dict[str, tuple[Path, list[tuple[int, str]]]] = {}
    for program in (line for line in lines if "child" in line):
        result = codes[program["child"]], Path(program["log"]).read_text()
        found.setdefault(program["kind"], (Path(program["root"]), []))[1].append(result)
    return found


def test_a_program_that_ends_after_its_save(ended):
    root, results = ended["fine"]
    assert [code for code, _ in results] == [0, 0], results
    assert [c.step for c in fsdp.list_checkpoints(root)] == [1, 2, 3]
    assert all(fsdp.verify_checkpoint(c.path).ok for c in fsdp.list_checkpoints(root))


def test_a_program_that_fails_says_the_same_on_every_rank(ended):
    root, results = ended["fail"]
    assert [code for code, _ in results] == [1, 1], results
    assert all("rank 1 failed to write" in text and "errno 28" in text for _, text in results), results
    assert fsdp.latest_step(root) is None


def test_a_background_failure_is_printed_at_exit(ended):
    root, results = ended["background"]
    assert all("a background save failed: rank 1 failed to write" in text for _, text in results), results
    assert fsdp.latest_step(root) is None
