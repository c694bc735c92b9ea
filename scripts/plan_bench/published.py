"""Published throughput of fully sharded runs, and what is simulated for them.

In each family one run sets the achieved arithmetic rate; the others are predicted with that rate and nothing else. What
the sources leave out is assumed: sequences of 8,192 (torchtitan) and 4,096 (fms-fsdp) tokens, one and two of them a step,
no recomputation for 7B and 8B and by block for all larger models, FSDP over all ranks, 400 Gb/s a GPU beside H100 and
200 Gb/s beside A100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import fsdplite as fsdp
from tests.planning.llama import LLAMA_8B, LLAMA_70B, Llama, LlamaBlock, Shape

LLAMA2_7B = Shape(layers=32, width=4096, heads=32, kv_heads=32, hidden=11_008, vocabulary=32_000)
LLAMA2_13B = Shape(layers=40, width=5120, heads=40, kv_heads=40, hidden=13_824, vocabulary=32_000)
LLAMA2_34B = Shape(layers=48, width=8192, heads=64, kv_heads=8, hidden=22_016, vocabulary=32_000)
LLAMA2_70B = Shape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672, vocabulary=32_000)
H100 = fsdp.Topology()
A100 = fsdp.Topology(flops=2e14, memory_bandwidth=1.5e12, intra=fsdp.Link(2.3e11, 3e-6), inter=fsdp.Link(2.5e10, 1e-5))


@dataclass(frozen=True)
class Run:
    """One published number: tokens per second and GPU."""

    what: str
    shape: Shape
    ranks: int
    published: float
    recompute: bool
    rows: int
    length: int


FAMILIES: dict[str, tuple[fsdp.Topology, list[Run]]] = {
    "torchtitan, FSDP2 eager, H100": (
        H100,
        [Run("8B on 8", LLAMA_8B, 8, 5762, False, 1, 8192), Run("8B on 128", LLAMA_8B, 128, 5605, False, 1, 8192)],
    ),
    "torchtitan, FSDP2, A100": (
        A100,
        [Run("8B on 64", LLAMA_8B, 64, 2973, False, 1, 8192), Run("70B on 64", LLAMA_70B, 64, 331, True, 1, 8192)],
    ),
    "fms-fsdp, FSDP1 and compile, A100": (
        A100,
        [Run("7B on 128", LLAMA2_7B, 128, 4550, False, 2, 4096),
         Run("13B on 128", LLAMA2_13B, 128, 2150, True, 2, 4096),
         Run("34B on 128", LLAMA2_34B, 128, 820, True, 2, 4096),
         Run("70B on 128", LLAMA2_70B, 128, 410, True, 2, 4096)],
    ),
    "fms-fsdp, FSDP1 and compile, H100": (
        H100,
        [Run("7B on 96", LLAMA2_7B, 96, 9600, False, 2, 4096), Run("13B on 96", LLAMA2_13B, 96, 4850, True, 2, 4096),
         Run("34B on 96", LLAMA2_34B, 96, 1830, True, 2, 4096), Run("70B on 96", LLAMA2_70B, 96, 890, True, 2, 4096)],
    ),
}  # fmt: skip

_plans: dict[Any, Any] = {}


def plan_of(run: Run) -> Any:
    """The plan of a run; shapes that occur twice are planned once."""
    by_block = fsdp.by_class(LlamaBlock)
    key = (run.shape, run.recompute, run.rows, run.length)
    if key not in _plans:
        _plans[key] = fsdp.plan(
            lambda: Llama(run.shape), world_size=run.ranks, policy=by_block, precision="bf16",
            recompute=by_block if run.recompute else None,
            inputs=torch.empty(run.rows, run.length, dtype=torch.long, device="meta"),
        )  # fmt: skip
    return _plans[key].but(world_size=run.ranks, mesh=(1, run.ranks))


def tokens_per_s(run: Run, topology: fsdp.Topology) -> float:
    return run.rows * run.length / fsdp.simulate(plan_of(run), topology).step_s


def compare_published() -> list[dict[str, Any]]:
    """Every published run with its prediction, the base of each family first."""
    rows = []
    for source, (topology, runs) in FAMILIES.items():
        for _ in range(20):  # the rate at which the base comes out as published
            ratio = runs[0].published / tokens_per_s(runs[0], topology)
            topology = replace(topology, flops=topology.flops * ratio)
        for run in runs:
            rows.append({"source": source, "what": run.what, "published": run.published, "is_base": run is runs[0],
                         "predicted": tokens_per_s(run, topology), "flops": topology.flops,
                         "peak_bytes": plan_of(run).peak_bytes})  # fmt: skip
    return rows
