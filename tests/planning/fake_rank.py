"""The engine itself as one rank of a large world: fake process group, fake tensors, a Llama-shaped model.

    python -m tests.planning.fake_rank --layers 80 --world-size 1024 --rank 5

prints one JSON object: what the engine laid out, sent and held, how long the host took, and what the plan says.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fsdplite as fsdp
from fsdplite import inspect
from fsdplite.recompute.matching import recompute_matching
from tests.harness.counts import Counts
from tests.planning.llama import LLAMA_70B, Llama, LlamaBlock


class Held(TorchDispatchMode):
    """Bytes of all storages that operators return, also when the engine resizes them. Independent of the planner's."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.total = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, Tensor):
                    self.see(value.untyped_storage())
            self.peak = max(self.peak, self.total)
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self.forget, key)
        self.total += storage.nbytes() - self.sizes[key]
        self.sizes[key] = storage.nbytes()

    def forget(self, key: int) -> None:
        self.total -= self.sizes.pop(key, 0)

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result = original(storage, nbytes)
            self.see(storage)
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original


def run_engine(args: argparse.Namespace, shape: Any, tokens: Tensor) -> dict[str, Any]:
    dist.init_process_group("fake", rank=args.rank, world_size=args.world_size, store=FakeStore())
    by_block = fsdp.by_class(LlamaBlock)
    held = Held()
    with FakeTensorMode(allow_non_fake_inputs=True), held, held.watching_resizes():
        model = Llama(shape)
        tokens = torch.empty(tokens.shape, dtype=tokens.dtype)
        started = time.process_time()
        fsdp.fsdp_wrap(model, by_block, precision="bf16", recompute=by_block)
        wrap_s = time.process_time() - started
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with Counts() as counts:
            step()
        held.peak = 0
        started = time.process_time()
        step()
        step_s = time.process_time() - started
        layout = [
            (unit.name, flat.numel, flat.padded_numel, flat.shard_numel)
            for unit in inspect.units(model) for flat in unit.flats
        ]  # fmt: skip
    calls = [(call.kind, call.elements, str(call.dtype)) for call in counts.calls]
    dist.destroy_process_group()
    return {"layout": layout, "calls": calls, "peak_bytes": held.peak, "wrap_s": wrap_s, "step_s": step_s}


def run_plain(shape: Any, tokens: Tensor) -> float:
    """Host seconds of the same step without the engine."""
    with FakeTensorMode(allow_non_fake_inputs=True), Held():
        model = Llama(shape).bfloat16()
        recompute_matching(model, fsdp.by_class(LlamaBlock))
        tokens = torch.empty(tokens.shape, dtype=tokens.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            started = time.process_time()
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return time.process_time() - started


def run_plan(args: argparse.Namespace, shape: Any, tokens: Tensor) -> dict[str, Any]:
    by_block = fsdp.by_class(LlamaBlock)
    plan = fsdp.plan(
        lambda: Llama(shape), world_size=args.world_size, rank=args.rank, policy=by_block, precision="bf16",
        recompute=by_block, optimizer="SGD", inputs=tokens, device="cpu",
    )  # fmt: skip
    # The engine takes fake tensors for those of a CPU, and a fake group copies nothing.
    without = plan.answer(plan.question.but(transport_copies=False))
    layout = [
        (unit.name, flat.layout.numel, flat.layout.padded_numel, flat.layout.shard_numel)
        for unit in plan.units for flat in unit.flats
    ]  # fmt: skip
    calls = [(call.kind, call.numel, str(call.dtype)) for call in plan.traffic.calls if call.kind != "control"]
    return {"layout": layout, "calls": calls, "peak_bytes": without.peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--world-size", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=5)
    parser.add_argument("--length", type=int, default=8192)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    shape = replace(LLAMA_70B, layers=args.layers)
    tokens = torch.empty(1, args.length, dtype=torch.long, device="meta")
    engine = run_engine(args, shape, tokens)
    plain_s = run_plain(shape, tokens)
    plan = run_plan(args, shape, tokens)
    per_unit = (engine["step_s"] - plain_s) / (args.layers + 1)
    print(json.dumps({
        "same_layout": engine["layout"] == plan["layout"],
        "same_calls": engine["calls"] == plan["calls"],
        "calls": len(engine["calls"]),
        "elements_sent": sum(call[1] for call in engine["calls"]),
        "peak_bytes": engine["peak_bytes"],
        "planned_peak_bytes": plan["peak_bytes"],
        "wrap_s": round(engine["wrap_s"], 2),
        "step_s": round(engine["step_s"], 2),
        "plain_step_s": round(plain_s, 2),
        "added_ms_per_unit": round(1e3 * per_unit, 2),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
