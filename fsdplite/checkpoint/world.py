"""The ranks that take part in a save or a load."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from ..errors import ConfigError
from ..fsdp_unit import state_of
from ..groups import _timeout_of

__all__ = ["World", "alone", "is_wrapped", "world_of"]


@dataclass(frozen=True)
class World:
    """The ranks that take part.

    Attributes:
        index: This rank's place among them.
        ranks: Their ranks in the default process group.
        timeout_s: How long a rank may make no progress.
        is_alone: This rank loads for itself, what others do at the same time is their own.
    """

    index: int = 0
    ranks: tuple[int, ...] = (0,)
    timeout_s: float = 600.0
    is_alone: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks[self.index]

    @property
    def is_first(self) -> bool:
        return self.index == 0


def alone() -> World:
    """A world of this rank only."""
    return World(ranks=(dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,), is_alone=True)


def world_of(model: nn.Module) -> World:
    """The ranks over which a model is wrapped; for a plain model all ranks of the default group."""
    groups = {g.ranks: g for m in model.modules() if (state := state_of(m)) is not None for g in [state.groups]}
    if len(groups) > 1:
        raise ConfigError(
            "units of one model are wrapped over different ranks",
            found=[list(ranks) for ranks in groups],
            cure="save each part on its own",
        )
    for ranks, group in groups.items():
        index = ranks.index(group.rank) if group.rank in ranks else 0
        return World(index, ranks, group.timeout.total_seconds())
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    timeout_s = _timeout_of(dist.group.WORLD).total_seconds()
    return World(dist.get_rank(), tuple(range(dist.get_world_size())), timeout_s)


def is_wrapped(model: nn.Module) -> bool:
    """Whether any module of it is a unit."""
    return any(state_of(module) is not None for module in model.modules())
