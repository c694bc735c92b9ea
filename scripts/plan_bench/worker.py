"""One rank: measures links, the plain model and wrapped ones; rank 0 predicts each wrapped step and writes both."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdplite as fsdp

from .cases import MODELS, WRAPPINGS, Block, Model
from .links import as_topology, measure_links

WARM_UP = 3


def timed(call: Callable[[], Any]) -> float:
    """Seconds of the slowest rank: where there are more ranks than cores they differ, and a step waits for all."""
    dist.barrier()
    started = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


class Meetings:
    """All ranks wait for each other after every block of a model, in forward and in backward, as they do for units.

    For machines with fewer cores than ranks, where a rank has to get its core back each time. With a core for each rank
    there is nothing to get back, and a model without meetings is the plainer measurement.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        self._message = torch.zeros(1024, dtype=torch.uint8)
        if dist.get_world_size() <= len(os.sched_getaffinity(0)):
            return
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_hook(self._meet)
                module.register_full_backward_hook(self._meet)

    def _meet(self, *_: Any) -> None:
        self.count += 1
        dist.all_reduce(self._message, op=dist.ReduceOp.MAX)


def measure(model: Model, wrappings: list[str], rounds: int, control_s: float) -> dict[str, list[float]]:
    """Seconds by contender and round; all of them run once a round.

    Args:
        control_s: Of a small message alone: what is taken off the plain model's time for each meeting.
    """
    batch = model.batch()
    steps: dict[str, Callable[[], None]] = {}
    torch.manual_seed(0)
    plain = model.build()
    meetings = Meetings(plain)
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    for name in wrappings:
        torch.manual_seed(0)
        wrapped = fsdp.fsdp_wrap(model.build(), **WRAPPINGS[name].options)
        steps[name] = step_of(wrapped, torch.optim.AdamW(wrapped.parameters()), batch)
    found: dict[str, list[float]] = {name: [] for name in ("plain", "update", *steps)}
    for number in range(WARM_UP + rounds):
        meetings.count = 0
        times = {"plain": timed(lambda: plain(batch).backward()) - meetings.count * control_s}
        times["update"] = timed(plain_optimizer.step)
        plain_optimizer.zero_grad()
        times |= {name: timed(step) for name, step in steps.items()}
        if number >= WARM_UP:
            for name, seconds in times.items():
                found[name].append(seconds)
    return found


def step_of(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def predict(model: Model, wrapping: str, topology: fsdp.Topology, world_size: int, plain: Any) -> Any:
    """Simulate a wrapped step; of measurements only links and the plain model go in."""
    options = WRAPPINGS[wrapping].options
    alone = fsdp.plan(model.build, world_size=1, inputs=model.batch(), device="cpu")
    topology = topology.calibrated(alone, statistics.median(plain["plain"]), statistics.median(plain["update"]))
    plan = fsdp.plan(model.build, world_size=world_size, inputs=model.batch(), device="cpu", **options)
    return fsdp.simulate(plan, topology)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--world-size", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    torch.set_num_threads(1)
    address = f"file://{args.rendezvous}"
    dist.init_process_group("gloo", init_method=address, rank=args.rank, world_size=args.world_size)
    links = [measure_links()]
    control_s = links[0]["control"][0]
    measured = {name: measure(MODELS[name], list(WRAPPINGS), args.rounds, control_s) for name in args.model}
    links.append(measure_links())
    if args.rank == 0:
        halves = [[statistics.median(pair) for pair in zip(*(half[kind] for half in links))] for kind in links[0]]
        topology = as_topology(dict(zip(links[0], halves)), args.world_size)
        rows = []
        for name in args.model:
            for wrapping in WRAPPINGS:
                timeline = predict(MODELS[name], wrapping, topology, args.world_size, measured[name])
                seconds = statistics.median(measured[name][wrapping])
                rows.append({"model": name, "wrapping": wrapping, "measured_ms": 1e3 * seconds,
                             "predicted_ms": 1e3 * timeline.step_s,
                             "communication_ms": 1e3 * timeline.communication_s})  # fmt: skip
        found = {
            "rows": rows,
            "links": links,
            "intra_bytes_per_s": topology.intra.bandwidth,
            "launch_s": topology.launch_s,
            "first_touch_bytes_per_s": topology.first_touch,
            "scatter_passes": topology.scatter_passes,
        }
        for kind in ("plain", "update"):
            found[f"{kind}_ms"] = {name: 1e3 * statistics.median(measured[name][kind]) for name in args.model}
        args.output.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
