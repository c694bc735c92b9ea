"""Running a command of this package on several gloo ranks of this machine, without torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["RENDEZVOUS", "under_torchrun", "run_on_ranks"]

RENDEZVOUS = "FSDPLITE_RENDEZVOUS_FILE"  # tells a rank started here where to meet the others
GRACE_S = 5.0  # for the other ranks to report, once one has failed


def under_torchrun() -> bool:
    """Whether a launcher has made this process one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m fsdplite ARGUMENTS`` as ``ranks`` processes on the CPU. Rank 0 prints; the others keep still.

    Returns:
        0 if every rank returned 0, 2 if one found the usage wrong, else 1.
    """
    with tempfile.TemporaryDirectory(prefix="fsdplite-") as folder:
        processes = []
        logs = [Path(folder) / f"rank-{rank}.txt" for rank in range(ranks)]
        try:
            for rank in range(ranks):
                processes.append(_start(arguments, rank, ranks, Path(folder), logs[rank]))
            _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return _verdict([process.returncode for process in processes], logs)


def _start(arguments: Sequence[str], rank: int, ranks: int, folder: Path, log: Path) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "",  # ranks of one machine share its CPU, whatever else it has
        RENDEZVOUS: str(folder / "rendezvous"),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    source = str(Path(__file__).resolve().parents[2])  # this package, also where it is not installed
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), source]))
    command = [sys.executable, "-m", "fsdplite", *arguments]
    if rank == 0:
        return subprocess.Popen(command, env=environment)
    with log.open("wb") as stream:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stream)


def _wait(processes: list[subprocess.Popen]) -> None:
    """Until all have ended, or until one has failed and the others have had their time to say so."""
    failed_at = None
    while any(process.poll() is None for process in processes):
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + GRACE_S:
            return
        time.sleep(0.02)


def _verdict(codes: list[int], logs: list[Path]) -> int:
    if codes[0] <= 0:  # rank 0 has said nothing of its own: what did the first that failed say?
        for rank, code in enumerate(codes):
            if rank and code > 0:
                text = logs[rank].read_text(encoding="utf-8", errors="replace").strip()
                print(f"rank {rank} failed:\n{text}", file=sys.stderr)
                break
    if 2 in codes:
        return 2
    return 1 if any(codes) else 0
