"""How fast gloo is here: collectives timed alone, and the two numbers of a link that describe them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdplite import Link, Topology
from fsdplite.collectives import _ALL_GATHER, _REDUCE_SCATTER

SIZES = (1 << 12, 1 << 20, 1 << 22, 12 << 20)  # bytes of the full side
ROUNDS = 9


def measure_links() -> dict[str, list[float]]:
    """Median seconds by kind, for each of ``SIZES``."""
    world_size = dist.get_world_size()
    found: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    for size in SIZES:
        numel = size // 4 // world_size
        full, shard = torch.zeros(numel * world_size), torch.zeros(numel)
        found["all_gather"].append(_seconds(lambda: getattr(dist, _ALL_GATHER)(full, shard)))
        found["reduce_scatter"].append(_seconds(lambda: getattr(dist, _REDUCE_SCATTER)(shard, full)))
        found["all_reduce"].append(_seconds(lambda: dist.all_reduce(full)))
    message = torch.zeros(1024, dtype=torch.uint8)
    found["control"] = [_seconds(lambda: dist.all_reduce(message, op=dist.ReduceOp.MAX))]
    found["first_touch"] = [_first_touch_s()]
    return found


def _first_touch_s() -> float:
    """Seconds that filling the largest size takes longer in new memory than in old."""
    kept = torch.zeros(SIZES[-1] // 4)
    new = _seconds(lambda: torch.empty(SIZES[-1] // 4).fill_(1.0))
    return max(1e-9, new - _seconds(lambda: kept.fill_(1.0)))


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        call()
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)  # of the slowest rank
        times.append(seconds.item())
    return statistics.median(times)


def as_topology(measured: dict[str, list[float]], world_size: int) -> Topology:
    """Bandwidth from the large gathers, latency from the small one; reductions as a multiple of gathers."""
    small, *large = measured["all_gather"]
    share = (world_size - 1) / world_size
    rates = [size * share / max(1e-9, seconds - small) for size, seconds in zip(SIZES[1:], large)]
    slopes = [(b - measured["reduce_scatter"][0]) / (a - small) for a, b in zip(large, measured["reduce_scatter"][1:])]
    return Topology(
        ranks_per_node=world_size,
        flops=1e11,  # these two are scaled by the plain model's step; their proportion is that of a CPU core
        operator_s=1e-5,
        first_touch=SIZES[-1] / measured["first_touch"][0],
        intra=Link(statistics.median(rates), 0.0),
        launch_s=small,
        scatter_passes=max(1.0, statistics.median(slopes)),
        control_s=measured["control"][0],
        overlaps=False,  # as many busy threads as cores: what gloo does is time that the computation does not get
    )
