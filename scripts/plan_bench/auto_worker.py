"""One rank: five models wrapped by block, and as ``fsdp.auto`` says after it was told how fast this machine is."""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdplite as fsdp
from engine_bench.models import GPT, SmallUnit, SmallUnits

from .cases import MODELS, Model
from .links import as_topology, measure_links
from .worker import WARM_UP, step_of, timed


class Stages(nn.Module):
    """Four stages, which are called, of eight small blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(SmallUnit(32) for _ in range(8))) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


@dataclass(frozen=True)
class Task:
    """A model, and the share of wrapping by block's peak that is allowed; None: only time counts."""

    model: Model
    budget_share: float | None


def _rows(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, width, generator=torch.Generator().manual_seed(1))


def _tokens(vocabulary: int, rows: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


TASKS = {
    "50 small units": Task(Model("", lambda: SmallUnits(50, 16), _rows(16)), None),
    "4 stages of 8 small units": Task(Model("", Stages, _rows(32)), None),
    "GPT, 6 blocks of width 256": Task(MODELS["small"], None),
    "GPT, 20,000 words, untied": Task(Model("", lambda: Untied(), _tokens(20_000, 2, 32)), 0.85),
    "GPT, 4 x 256 tokens": Task(MODELS["long"], 0.7),
}


class Untied(GPT):
    """Embedding and head apart, both larger than all blocks."""

    def __init__(self) -> None:
        super().__init__(layers=4, width=128, heads=4, vocabulary=20_000, length=32)
        self.head = nn.Linear(128, 20_000, bias=False)


def compare(task: Task, topology: fsdp.Topology, rounds: int) -> dict[str, Any]:
    """Predicted and measured step and peak of both."""
    model, batch = task.model, task.model.batch()
    told: dict[str, Any] = {"inputs": batch, "device": "cpu", "topology": topology}
    choice = fsdp.auto(**told).choose(model.build())
    if task.budget_share is not None:
        budget = int(task.budget_share * choice.by_block.peak_bytes)
        choice = fsdp.auto(budget=budget, **told).choose(model.build())
    found: dict[str, Any] = {"chosen": choice.best.describe(), "budget_bytes": choice.budget_bytes}
    steps, times = {}, {}
    for name, candidate in (("by_block", choice.by_block), ("auto", choice.best)):
        torch.manual_seed(0)
        wrapped = fsdp.fsdp_wrap(model.build(), **candidate.options)
        steps[name], times[name] = step_of(wrapped, torch.optim.AdamW(wrapped.parameters()), batch), []
        measured = candidate.plan.compare(wrapped, steps[name])["peak_bytes"].measured
        found[name] = {"peak_bytes": measured, "predicted_peak_bytes": candidate.peak_bytes,
                       "predicted_ms": 1e3 * candidate.step_s}  # fmt: skip
    for number in range(WARM_UP + rounds):
        for name, step in steps.items():
            seconds = timed(step)
            if number >= WARM_UP:
                times[name].append(seconds)
    for name, seconds in times.items():
        found[name]["measured_ms"] = 1e3 * statistics.median(seconds)
    found["measured_ratio"] = statistics.median(a / b for a, b in zip(times["auto"], times["by_block"]))
    return found


def _of_first_rank(links: dict[str, list[float]]) -> dict[str, list[float]]:
    """All ranks must choose alike, so all take rank 0's numbers."""
    values = torch.tensor([seconds for times in links.values() for seconds in times], dtype=torch.float64)
    dist.broadcast(values, 0)
    rest = iter(values.tolist())
    return {kind: [next(rest) for _ in times] for kind, times in links.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--world-size", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    address = f"file://{args.rendezvous}"
    dist.init_process_group("gloo", init_method=address, rank=args.rank, world_size=args.world_size)
    topology = as_topology(_of_first_rank(measure_links()), args.world_size)
    found = {name: compare(task, topology, args.rounds) for name, task in TASKS.items()}
    if args.rank == 0:
        args.output.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
