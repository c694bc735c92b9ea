"""Kills a rank in the middle of a save, and goes on: on as many ranks, on more, on one. The losses do not notice.

    python recipes/resume_elsewhere.py

1. Three steps at a time are trained on 2 ranks, each with a checkpoint behind it. In the first attempt rank 1 is
   killed while it writes the second checkpoint. torchrun ends the other rank and starts both again (--max-restarts),
   they load the first checkpoint, which is whole, and go on.
2. Another run goes on from the last checkpoint on 3 ranks, and leaves one more.
3. A third one goes on from that on 1 rank.

Beside them one process trains all steps without any interruption or checkpoint. The global batch of a step is the same
on every number of ranks, so the losses must be equal. They are equal to rounding, not bit for bit: gradients are
summed in another order on another number of ranks. What was computed twice, before and after the kill, must be equal
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdplite as fsdp
from fsdplite.checkpoint import storage

LEGS = ((2, 6), (3, 9), (1, 12))  # (ranks, the step at which they stop)
SAVE_EVERY = 3
KILLED_AT = 6  # rank 1 does not survive this checkpoint, the first time
ROWS = 12  # of the global batch: a multiple of every number of ranks
TOLERANCE = 1e-5  # relative; the losses are fp32


# ---------------------------------------------------------------------------------- the training script, under torchrun


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows on all ranks, whatever their number; drawn by the step's number, so the step is the position."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 16, generator=generator)
    return x, x.sin().cumsum(1)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    fsdp.fsdp_wrap(model, fsdp.by_class(nn.Linear))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


class KilledWhileWriting(storage.FileSystem):
    """Half of the first write reaches the disk, then this process is gone, as by the kernel's out-of-memory kill."""

    def write_at(self, file: storage.File, offset: int, data: Any) -> int:
        super().write_at(file, offset, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def train(root: Path, last: int) -> None:
    fsdp.init_distributed(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, optimizer = model_and_optimizer()

    first = 0
    if fsdp.latest_step(root) is not None:  # a restarted script does not know that it is one: it just looks
        first = fsdp.load_checkpoint(root, model, optimizer).step

    log = (root / "losses.jsonl").open("a", buffering=1)
    for step in range(first + 1, last + 1):
        x, y = (part.chunk(world_size)[rank] for part in global_batch(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= world_size
        if rank == 0:
            log.write(json.dumps({"step": step, "ranks": world_size, "attempt": attempt, "loss": mean.item()}) + "\n")
        if step % SAVE_EVERY == 0:
            doomed = step == KILLED_AT and rank == 1 and world_size == 2 and attempt == 0
            with storage.using(KilledWhileWriting() if doomed else storage.current()):
                fsdp.save_checkpoint(root, model, optimizer, step=step)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------ the driver, by plain python


def uninterrupted() -> dict[int, float]:
    """The losses of one process that never stops."""
    model, optimizer = model_and_optimizer()
    losses = {}
    for step in range(1, LEGS[-1][1] + 1):
        x, y = global_batch(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses


def torchrun(ranks: int, root: Path, last: int) -> None:
    """One run. A rank that dies takes the others with it, and all are started again, at most once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(ranks), "--monitor-interval", "0.1"]
    command += [__file__, "--root", str(root), "--last", str(last)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{ranks} ranks ended with exit code {result.returncode}:\n{result.stderr}")


def judge(events: list[dict[str, Any]], expected: dict[int, float]) -> list[str]:
    """What is not as it should be."""
    problems = []
    restarted = {event["step"]: event["loss"] for event in events if event["attempt"]}
    for event in events:
        step, loss = event["step"], event["loss"]
        if abs(loss - expected[step]) > TOLERANCE * abs(expected[step]):
            problems.append(f"step {step} on {event['ranks']} ranks: expected a loss of {expected[step]}, found {loss}")
        if not event["attempt"] and event["ranks"] == 2 and loss != restarted.get(step, loss):
            problems.append(f"step {step}: {loss} before the kill, {restarted[step]} after it")
    if not restarted or min(restarted) != KILLED_AT - SAVE_EVERY + 1:
        resumed_at = KILLED_AT - SAVE_EVERY + 1
        problems.append(f"expected a restart that goes on with step {resumed_at}, found {sorted(restarted)}")
    if {event["step"] for event in events} != set(expected):
        problems.append(f"expected steps 1 to {max(expected)}, found {sorted({event['step'] for event in events})}")
    return problems


def drive(root: Path) -> int:
    for ranks, last in LEGS:
        torchrun(ranks, root, last)
    expected = uninterrupted()
    events = [json.loads(line) for line in (root / "losses.jsonl").read_text().splitlines()]
    print("step  ranks  loss       uninterrupted  difference")
    for event in events:
        step, loss = event["step"], event["loss"]
        note = "  after the restart" if event["attempt"] else ""
        if step == KILLED_AT and event["ranks"] == 2 and not event["attempt"]:
            note = "  rank 1 is killed in the save behind this step"
        print(f"{step:4}  {event['ranks']:5}  {loss:.7f}  {expected[step]:.7f}      {loss - expected[step]:+.1e}{note}")
    problems = judge(events, expected)
    verdict = f"equal: every loss to {TOLERANCE:g} relative, steps repeated after the kill bit for bit"
    print("\n".join(problems) or verdict)
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="where checkpoints go; default: a folder that is removed at the end")
    parser.add_argument("--last", type=int, help=argparse.SUPPRESS)  # given to the ranks by the driver
    args = parser.parse_args()
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        train(args.root, args.last)
        return 0
    if args.root is not None:
        args.root.mkdir(parents=True, exist_ok=False)
        return drive(args.root)
    with tempfile.TemporaryDirectory() as folder:
        return drive(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
