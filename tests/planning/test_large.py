"""Large models and large worlds, on a machine that could hold neither."""

from __future__ import annotations

import pytest

import fsdplite as fsdp
from tests.planning.interpreter import run_python
from tests.planning.llama import LLAMA_8B, LLAMA_70B, LLAMA_405B, Llama, LlamaBlock, Shape


@pytest.mark.parametrize(
    "shape, ranks, numel, gib",
    [(LLAMA_8B, 8, 8.030e9, 15.0), (LLAMA_8B, 64, 8.030e9, 1.87), (LLAMA_70B, 64, 70.554e9, 16.4),
     (LLAMA_405B, 256, 405.853e9, 23.6)],
)  # fmt: skip
def test_published_states_of_llama_shapes(shape: Shape, ranks: int, numel: float, gib: float) -> None:
    """16 bytes a parameter over N ranks; sizes of Llama 3.1 with an untied head."""
    plan = fsdp.plan(lambda: Llama(shape), world_size=ranks, policy=fsdp.by_class(LlamaBlock), precision="bf16")
    assert plan.numel == pytest.approx(numel, rel=1e-4)
    assert plan.resting.total / 2**30 == pytest.approx(gib, rel=0.005)
    assert plan.padding_numel <= 1e-5 * plan.numel


PLAN_70B = """
import json, resource, time, warnings
warnings.filterwarnings("ignore")
import torch, fsdplite as fsdp
from tests.planning.interpreter import run_python
from tests.planning.llama import LLAMA_70B, Llama, LlamaBlock
started = time.perf_counter()
by_block = fsdp.by_class(LlamaBlock)
plan = fsdp.plan(lambda: Llama(LLAMA_70B), world_size=64, policy=by_block, precision="bf16", recompute=by_block,
                 inputs=torch.empty(1, 8192, dtype=torch.long, device="meta"))
took = time.perf_counter() - started
print(json.dumps({"seconds": took, "process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                  "full_peak_bytes": plan.full_peak_bytes, "flops": sum(task.flops for task in plan.tasks),
                  "units": len(plan.units)}))
"""


@pytest.mark.slow
def test_a_70b_shape_is_planned_in_little_memory() -> None:
    found = run_python("-c", PLAN_70B)
    print(found)
    assert found["units"] == 81 and found["process_bytes"] < 2 * 2**30
    # Two blocks of 1,632 MiB and the root's embedding, norm and head, in bf16.
    block, root = 1632 * 2**20, 2 * 128_256 * 8192 * 2
    assert found["full_peak_bytes"] == pytest.approx(2 * block + root, rel=1e-3)
    # Forward 2, backward 4, recomputation 2 (less each block's last matrix) flops a weight and token, and attention:
    # two products of scores forward and in recomputation, five backward.
    tokens, down = 8192, 8192 * 28_672
    weights = 6 * (80 * 855.6e6 + 128_256 * 8192) + 2 * 80 * (855.6e6 - down)
    attention = 80 * (2 + 2 + 5) * 2 * tokens * 8192
    assert found["flops"] == pytest.approx(tokens * (weights + attention), rel=0.01)


@pytest.mark.slow
def test_the_engine_on_a_rank_of_1024_does_what_is_planned() -> None:
    """Layout, collectives and peak of the real engine on fake tensors in a fake world; four blocks of the 70B shape."""
    found = run_python("-m", "tests.planning.fake_rank", "--layers", "4", "--world-size", "1024", "--rank", "777")
    print(found)
    assert found["same_layout"] and found["same_calls"] and found["calls"] == 2 * 4 + 1 + 4 + 1
    assert found["peak_bytes"] == pytest.approx(found["planned_peak_bytes"], rel=0.05)
