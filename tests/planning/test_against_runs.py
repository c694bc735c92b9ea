"""What a plan predicts is what a run on two ranks holds and sends."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pytest
import torch

import fsdplite as fsdp
from tests.harness import Counts, here, run, seeded
from tests.planning.measure import peak_of
from tests.planning.models import GPT, Block

BASE = {"layers": 4, "width": 64, "vocabulary": 256, "length": 32, "tied": True}

# name: (changes to the model, changes to the wrapping, microbatches, no_sync)
CONFIGURATIONS: dict[str, tuple[dict, dict, int, bool]] = {
    "fp32": ({}, {}, 1, False),
    "no prefetch, kept": ({}, {"prefetch": 0, "reshard_after_forward": False}, 1, False),
    "two ahead, root freed": ({}, {"prefetch": 2, "reshard_after_forward": True}, 1, False),
    "one unit": ({}, {"policy": None}, 1, False),
    "stage 0": ({}, {"stage": 0}, 1, False),
    "stage 1, bf16": ({}, {"stage": 1, "precision": "bf16"}, 1, False),
    "stage 2": ({}, {"stage": 2}, 1, False),
    "bf16 on the wire": (
        {}, {"precision": fsdp.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}, 1, False,
    ),
    "recompute": ({}, {"recompute": fsdp.by_class(Block)}, 1, False),
    "recompute in segments": ({}, {"recompute": "sqrt"}, 1, False),
    "accumulation": ({}, {"precision": "bf16"}, 3, False),
    "accumulation without sync": ({}, {}, 3, True),
    "stage 2, accumulation": ({}, {"stage": 2}, 2, False),
    "shards at rest in host memory": ({}, {"offload": fsdp.Offload(params="cpu")}, 1, False),
    "the same in bf16": ({}, {"offload": fsdp.Offload(params="cpu"), "precision": "bf16"}, 1, False),
    "masters and moments in files": (
        {}, {"offload": fsdp.Offload("cpu", "nvme", tempfile.gettempdir(), buffer_bytes=65536), "precision": "bf16"}, 1, False,
    ),
    "lora": ({"adapters": 4}, {"precision": "bf16"}, 1, False),
    "big embedding": ({"vocabulary": 4000, "tied": False}, {}, 1, False),
    "big embedding, few tokens": ({"vocabulary": 20_000, "tied": False, "rows": 1}, {}, 1, False),
}  # fmt: skip


def rows_of(changes: dict) -> tuple[int, dict]:
    return changes.get("rows", 4), {name: value for name, value in changes.items() if name != "rows"}


def measure(changes: dict, options: dict, microbatches: int, no_sync: bool) -> tuple[int, Counts]:
    rows, changes = rows_of(changes)
    model = seeded(GPT, **BASE | changes)
    fsdp.fsdp_wrap(model, **{"policy": fsdp.by_class(Block)} | options)
    offload = options.get("offload")
    make = fsdp.offloaded if offload is not None and offload.optimizer else lambda cls, _, params, **s: cls(params, **s)
    optimizer = make(torch.optim.AdamW, model, [p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tokens = torch.randint(256, (rows, BASE["length"]))

    def step() -> None:
        for number in range(microbatches):
            waits = no_sync and number < microbatches - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    peak = peak_of(step)
    with Counts() as counts:
        step()
    return peak, counts


def body(name: str) -> dict[str, Any]:
    changes, options, microbatches, no_sync = CONFIGURATIONS[name]
    found, counts = measure(changes, options, microbatches, no_sync)
    calls = [(call.kind, call.elements, call.dtype) for call in counts.calls]
    control = [(call.elements, call.dtype) for call in counts.control]
    if here.rank:
        return {}
    rows, changes = rows_of(changes)
    plan = fsdp.plan(
        lambda: GPT(**BASE | changes),
        world_size=here.world_size,
        **{"policy": fsdp.by_class(Block)} | options,
        inputs=torch.zeros(rows, BASE["length"], dtype=torch.long),
        microbatches=microbatches,
        no_sync=no_sync,
        device="cpu",
    )
    predicted = [(call.kind, call.numel, call.dtype) for call in plan.traffic.calls if call.kind != "control"]
    assert predicted == calls, (name, predicted, calls)
    assert control == [(call.numel, call.dtype) for call in plan.traffic.calls if call.kind == "control"]
    return {"found": found, "predicted": plan.peak_bytes, "phase": plan.peak_phase, "unit": plan.peak_unit}


ALWAYS = {
    "fp32", "stage 1, bf16", "stage 2", "recompute", "accumulation without sync", "lora", "big embedding, few tokens",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGURATIONS]
)
def test_peak_within_five_percent_and_traffic_exact(name: str) -> None:
    result = run(2, body, name)[0]
    print(name, result, result["predicted"] / result["found"])
    assert abs(result["predicted"] - result["found"]) <= 0.05 * result["found"], (name, result)
