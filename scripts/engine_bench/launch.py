"""Start the ranks of a pass and read what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


SCRIPTS = Path(__file__).resolve().parent.parent


class PassFailed(RuntimeError):
    """A rank ended with an error, or the time was up."""


def run_pass(case: str, measure: str, world_size: int, rounds: int, quick: bool, timeout_s: float) -> Any:
    """One pass over one case of the engine benchmark."""
    arguments = ["--case", case, "--measure", measure, "--rounds", str(rounds), *(["--quick"] if quick else [])]
    return run_ranks("engine_bench.worker", arguments, world_size, f"{measure} of case '{case}'", timeout_s)


def run_ranks(module: str, arguments: list[str], world_size: int, what: str, timeout_s: float) -> Any:
    """Run a module on so many ranks, with ``--rank``, ``--rendezvous`` and ``--output`` after its arguments.

    Returns:
        The JSON value that its rank 0 writes to the output.

    Raises:
        PassFailed: With what the failing rank printed last.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, "-m", module, *arguments]
        command += ["--rendezvous", str(Path(folder) / "rendezvous"), "--output", str(output)]
        logs = [Path(folder) / f"rank-{rank}.txt" for rank in range(world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("wb") as stream:
                numbered = [*command, "--rank", str(rank)]
                ranks.append(subprocess.Popen(numbered, env=environment, stdout=stream, stderr=subprocess.STDOUT))
        try:
            _wait(ranks, logs, what, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return json.loads(output.read_text(encoding="utf-8"))


def _wait(ranks: list[subprocess.Popen], logs: list[Path], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline:
            raise PassFailed(f"{what}: not done within {timeout_s:.0f} s")
        if any(process.poll() for process in ranks):
            break  # the others wait for it in vain
        time.sleep(0.05)
    for rank, process in enumerate(ranks):
        if process.poll():
            tail = logs[rank].read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
            raise PassFailed("\n".join([f"{what}: rank {rank} ended with exit code {process.returncode}", *tail]))
