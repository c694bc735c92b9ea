"""One rank of a benchmark: a pass over one case. Started by ``launch``; rank 0 writes what was measured as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .contenders import LOW_PRECISION_NAMES, NAMES, build
from .memory import LiveBytes, StepCount
from .models import CASES, Case
from .prediction import measure_plain, predict_peak_bytes, run_step
from .timing import measure

MEMORY_STEPS = 3
# AdamW's own default, which on CPU is a loop over parameters: what users get. (The foreach form takes one more shard of
# everybody at the update, which hides what the engines themselves need.)
TIMING_OPTIMIZER = "default"
MEMORY_OPTIMIZER = "default"


def timing_pass(case: Case, rounds: int) -> dict[str, Any]:
    """Milliseconds by contender, quantity and round. At one rank the unwrapped model takes part."""
    names = ("plain", *NAMES) if case.world_size == 1 else NAMES
    contenders = [build(name, case, "fp32", TIMING_OPTIMIZER) for name in names]
    return measure(contenders, case, rounds, warm_up=3)


def memory_pass(case: Case, quick: bool) -> dict[str, Any]:
    """By precision and contender: peak, rest and collectives of each step; fsdplite's also as predicted.

    A quick one leaves out all but fsdplite and what it is compared to.
    """
    batch = case.make_batch(torch.Generator().manual_seed(1 + dist.get_rank()))
    update = measure_plain(case, "fp32", MEMORY_OPTIMIZER, batch)["update"] // case.world_size
    found: dict[str, Any] = {}
    for precision, names in (("fp32", NAMES), ("bf16", LOW_PRECISION_NAMES)):
        unwrapped = measure_plain(case, precision, MEMORY_OPTIMIZER, batch)
        unwrapped["update"] = update
        found[precision] = {}
        for name in names[:2] if quick else names:
            steps, predicted = _count_steps(name, case, precision, batch, unwrapped)
            found[precision][name] = {"steps": [_as_json(step) for step in steps], "predicted_peak_bytes": predicted}
    return found


def _count_steps(name: str, case: Case, precision: str, batch: torch.Tensor, unwrapped: Any) -> Any:
    live = LiveBytes()
    steps = []
    with live:
        contender = build(name, case, precision, MEMORY_OPTIMIZER)
        for _ in range(MEMORY_STEPS):
            with live.step() as count:
                run_step(contender, batch, live)
            steps.append(count)
            dist.barrier()
    predicted = predict_peak_bytes(contender.model, unwrapped) if name == "fsdplite" else None
    return steps, predicted


def _as_json(step: StepCount) -> dict[str, Any]:
    return {
        "peak_bytes": step.peak_bytes,
        "rest_bytes": step.rest_bytes,
        "calls": dict(step.calls),
        "collective_bytes": step.collective_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--measure", choices=("timing", "memory"), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rendezvous", required=True, help="a file that does not exist yet")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    warnings.filterwarnings("ignore")  # contenders warn about each other's APIs and about numpy
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    case = CASES[args.case]
    dist.init_process_group(
        "gloo", init_method=f"file://{args.rendezvous}", rank=args.rank, world_size=case.world_size
    )
    found = timing_pass(case, args.rounds) if args.measure == "timing" else memory_pass(case, args.quick)
    if args.rank == 0:
        args.output.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
