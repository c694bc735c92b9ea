"""Do replicas start from the same parameters? With ``sync_params=False`` nobody has made them equal.

Gradients are averaged over replicas, so different ones would stay apart for ever, each with gradients of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .control import exchange_texts
from .errors import RankMismatchError
from .groups import Groups
from .watchdog import Waiting

if TYPE_CHECKING:
    from .flat_param import FlatParameter
    from .ignored import IgnoredGradients

__all__ = ["refuse_unequal_replicas"]

_CHUNK_NUMEL = 1 << 20
_MASK = (1 << 61) - 1


def refuse_unequal_replicas(groups: Groups, flats: Iterable[FlatParameter], ignored: IgnoredGradients) -> None:
    """Raise on every rank where ranks that hold the same slice of a parameter hold other values.

    Collective: one small message per rank on the control group. Reads every shard once.
    """
    if groups.control is None:
        return
    slices = [part for flat in flats if flat.groups.replicate_size > 1 for part in _slices(flat)]
    slices += [(name, 0, p) for name, p in zip(ignored.names, ignored.parameters) if p.requires_grad]
    own = [[shard_rank, _checksum(values)] for _, shard_rank, values in slices]
    told = exchange_texts(groups, own, Waiting("", "comparison of replicas before the first forward", 0))
    for position, (name, _, _) in enumerate(slices):
        firsts: dict[int, tuple[int, int]] = {}
        for rank, answers in zip(groups.ranks, told):
            shard_rank, checksum = answers[position]
            first, expected = firsts.setdefault(shard_rank, (rank, checksum))
            if checksum != expected:
                raise RankMismatchError(
                    "replicas hold different parameters, and sync_params=False leaves them so",
                    expected=f"the values of rank {first}",
                    found=f"others on rank {rank}",
                    parameter=name,
                    rank=groups.rank,
                    cure="leave out sync_params=False, or load the same weights on every rank before the first forward",
                )


def _slices(flat: FlatParameter) -> list[tuple[str, int, torch.Tensor]]:
    """Of each parameter its name, which slice of it is here, and that slice."""
    flat.resting.wait()
    return [(name, flat.groups.shard_rank, values) for name, values in zip(flat.names, flat.masters.slices)]


def _checksum(values: torch.Tensor) -> int:
    """A number that changes with any bit and any exchange of elements."""
    bits = values.detach().reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(values.element_size(), torch.int64))
    total = 0
    for chunk in bits.split(_CHUNK_NUMEL):
        places = torch.arange(1, chunk.numel() + 1, device=chunk.device)
        total = (total * 1_000_003 + int((chunk.to(torch.int64) * places).sum())) & _MASK
    return total
