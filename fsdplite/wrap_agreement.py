"""Before anything is wrapped: do all ranks wrap the same model with the same options?"""

from __future__ import annotations

import hashlib
import json

from .control import WRAP, exchange, exchange_texts
from .errors import RankMismatchError
from .groups import Groups
from .partition import Partition
from .watchdog import Waiting

__all__ = ["check_ranks_agree", "describe"]


def describe(plan: Partition) -> list[str]:
    """One line per unit and parameter, equal on all ranks if they wrap the same model."""
    lines = []
    for spec in plan.units:
        lines.append(f"unit '{spec.name}' is a {type(spec.module).__name__}")
        for param in spec.params:
            p = param.parameter
            lines.append(
                f"parameter '{'|'.join(param.names)}' {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
            )
        lines += [f"buffer '{b.name}' {tuple(b.module._buffers[b.key].shape)} {b.module._buffers[b.key].dtype}"
                  for b in spec.buffers]  # fmt: skip
    lines += [f"unit '{name}' from before" for name, _ in plan.nested]
    lines += [f"ignored '{spec.name}' {tuple(spec.parameter.shape)}" for spec in plan.ignored_params]
    return lines


def check_ranks_agree(groups: Groups, description: list[str] | None, failure: Exception | None) -> None:
    """Raise here what any rank found wrong, and where ranks differ, on all of them.

    Collective: one message on the control group.
    """
    if groups.control is None:
        if failure is not None:
            raise failure
        return
    waiting = Waiting("", "comparison of models in fsdp_wrap", 0)
    digest = hashlib.sha256(json.dumps(description).encode()).digest()
    merged = exchange(groups, WRAP, int.from_bytes(digest[:7], "little"), bytes([failure is not None]), waiting)
    if merged is not None and not merged[0]:
        return
    texts = exchange_texts(groups, [description, str(failure) if failure is not None else None], waiting)
    if failure is not None:
        raise failure
    _raise_difference(groups, texts)


def _raise_difference(groups: Groups, texts: list) -> None:
    for rank, (_, failed) in zip(groups.ranks, texts):
        if failed is not None:
            raise RankMismatchError(f"fsdp_wrap failed on rank {rank}", found=failed, rank=rank)
    descriptions = [lines for lines, _ in texts]
    for position in range(max(len(lines) for lines in descriptions)):
        column = [lines[position] if position < len(lines) else "nothing" for lines in descriptions]
        if len(set(column)) > 1:
            raise RankMismatchError(
                "ranks wrap different models or use different options",
                expected=f"rank {groups.ranks[0]}: {column[0]}",
                found="; ".join(f"rank {r}: {c}" for r, c in zip(groups.ranks, column) if c != column[0]),
                rank=groups.rank,
                cure="build the same model with the same options on every rank",
            )
    raise AssertionError("descriptions differ in their hash only")
