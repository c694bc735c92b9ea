"""What could be changed to hold less memory, and what each change costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from ..modules import user_name
from ..offload.options import Offload
from ..policy import by_class, by_name
from ..precision import as_precision
from ..structure import map_tensors, tensors_in
from .boundaries import blocks_of, classes_of, large_beside

if TYPE_CHECKING:
    from .prediction import Plan
    from .question import Question

__all__ = ["Change", "Price", "candidates", "price"]

# Only the ratios count, when computation is weighed against traffic: 400 TFLOP/s beside 50 GB/s a rank, 25 GB/s to the
# host, 5 GB/s to its disk, and 100 GB/s of its memory for an update there.
_FLOPS_PER_S = 4e14
_BYTES_PER_S = 5e10
_HOST_BYTES_PER_S = 2.5e10
_DISK_BYTES_PER_S = 5e9
_HOST_MEMORY_PER_S = 1e11


@dataclass(frozen=True)
class Change:
    """One option changed.

    Attributes:
        text: What to write.
        apply: From a question to the changed one; None where it changes nothing.
        note: A price that is no number.
    """

    text: str
    apply: Callable[[Question], Question | None]
    note: str = ""


@dataclass(frozen=True)
class Price:
    """What a change costs, as ratios of the changed to the present.

    Attributes:
        flops: Of computation per step.
        sent: Of bytes that a rank sends.
        ranks: Of ranks.
        calls: Of collectives.
    """

    flops: float
    sent: float
    ranks: float
    calls: float
    weight: float  # of all, for sorting: estimated time with nothing hidden, times ranks

    def __str__(self) -> str:
        parts = [
            f"{(ratio - 1) * 100:+.0f}% {name}"
            for name, ratio in (("computation", self.flops), ("traffic", self.sent), ("collectives", self.calls))
            if abs(ratio - 1) >= 0.005
        ]
        if self.ranks != 1:
            parts.append(f"{self.ranks:g} times the ranks")
        return ", ".join(parts)


def price(before: Plan, after: Plan) -> Price:
    """Compare two plans of one step."""

    def ratio(new: float, old: float) -> float:
        return new / old if old else 1.0

    flops = [sum(task.flops for task in plan.tasks) for plan in (before, after)]
    sent = [plan.traffic.sent_bytes for plan in (before, after)]
    calls = [len(plan.traffic.calls) for plan in (before, after)]
    time_s = [f / _FLOPS_PER_S + b / _BYTES_PER_S + _offload_s(p) for f, b, p in zip(flops, sent, (before, after))]
    ranks = ratio(after.question.world_size, before.question.world_size)
    # More collectives, and gathers that nothing hides, cost a little too: they break ties.
    exposed = 0.02 * (before.question.prefetch - after.question.prefetch) + 0.001 * (ratio(calls[1], calls[0]) - 1)
    weight = ranks * ratio(time_s[1], time_s[0]) - 1 + exposed
    return Price(ratio(flops[1], flops[0]), ratio(sent[1], sent[0]), ranks, ratio(calls[1], calls[0]), weight)


def _offload_s(plan: Plan) -> float:
    seconds = (plan.to_device_bytes + plan.to_host_bytes) / _HOST_BYTES_PER_S + plan.disk_bytes / _DISK_BYTES_PER_S
    if plan.resting.host or plan.resting.disk:
        seconds += sum(task.bytes for task in plan.tasks if task.kind == "update") / _HOST_MEMORY_PER_S
    return seconds


def candidates(question: Question) -> Iterator[Change]:
    """Changes to try, each by itself. A change that turns out to be impossible raises when its plan is made."""
    blocks = classes_of(blocks_of(question.model))
    by_block = by_class(*blocks) if blocks else None
    if question.policy is None and by_block is not None:
        yield Change(f"policy={by_block}", lambda q: q.but(policy=by_block) if q.policy is None else None)
    large = _large_beside_units(question)
    if large:
        base = question.policy or by_block
        policy = by_name(*large) if base is None else base | by_name(*large)
        yield Change(f"policy={policy}", lambda q: q.but(policy=policy))
    if question.prefetch:
        yield Change("prefetch=0", lambda q: q.but(prefetch=0) if q.prefetch else None, "gathers are not hidden")
    if question.reshard_after_forward is not True:
        yield Change(
            "reshard_after_forward=True",
            lambda q: None if q.reshard_after_forward is True else q.but(reshard_after_forward=True),
        )
    for stage in range(question.stage + 1, 4):
        yield Change(f"stage={stage}", lambda q, stage=stage: q.but(stage=stage) if q.stage < stage else None)
    if question.batch is not None and by_block is not None and question.recompute is None:
        yield Change('recompute="sqrt"', lambda q: q.but(recompute="sqrt") if q.recompute is None else None)
        yield Change(f"recompute={by_block}", lambda q: q.but(recompute=by_block) if q.recompute is None else None)
    if question.batch is not None and (size := batch_size(question.batch)) is not None and size % 2 == 0:
        yield Change(
            f"microbatches={2 * question.microbatches} of half the size",
            lambda q: q.afresh(batch=_halved(q.batch), microbatches=2 * q.microbatches),
        )
    if question.device != "cpu" and question.offload == Offload():
        for what, moved in (
            ("optimizer state", {"optimizer": "cpu"}),
            ("shards and optimizer state", {"params": "cpu", "optimizer": "cpu"}),
        ):
            words = ", ".join(f'{name}="{place}"' for name, place in moved.items())
            yield Change(
                f"offload=Offload({words})",
                lambda q, moved=moved: q.but(offload=Offload(**moved)) if q.offload == Offload() else None,
                f"{what} in host memory, updated there",
            )
    if question.precision.param_dtype is None:
        yield Change(
            'precision="bf16"',
            lambda q: q.but(precision=as_precision("bf16")) if q.precision.param_dtype is None else None,
            "computes in bf16",
        )
    for factor in (2, 4, 8):
        size = question.world_size * factor
        yield Change(f"world_size={size}", lambda q, factor=factor: _more_ranks(q, factor))


def _more_ranks(question: Question, factor: int) -> Question:
    replicas, shards = question.mesh
    return question.but(world_size=question.world_size * factor, mesh=(replicas, shards * factor))


def _large_beside_units(question: Question) -> list[str]:
    """Embeddings and heads that the root would hold full as long as it runs."""
    blueprint, _ = question.run()
    units = {user_name(unit.name) for unit in blueprint.partition.units}
    return [name for name in large_beside(question.model, blocks_of(question.model)) if name not in units]


def batch_size(batch: tuple[tuple, dict]) -> int | None:
    """The first dimension, if all tensors of the batch share it."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def _halved(batch: tuple[tuple, dict]) -> tuple[tuple, dict]:
    def half(tensor: torch.Tensor) -> Any:
        shape = (tensor.shape[0] // 2, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)

    if (size := batch_size(batch)) is None or size % 2:
        raise ConfigError("a batch of this size cannot be halved", found=str(size))
    return map_tensors(half, batch)
