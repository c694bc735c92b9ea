"""Small module trees, and what to read off a partition of them."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

from fsdplite.errors import FSDPError, WrapError
from fsdplite.partition import Partition, partition


class Tied(nn.Module):
    """Case T1: the head reads the embedding's weight."""

    def __init__(self, vocabulary: int = 11, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mid = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(ids)))


class Bag(nn.Module):
    """Any children, parameters and buffers, by name."""

    def __init__(self, **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Other(Bag):
    """A second class that means the same."""


def linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def units(found: Partition) -> list[str]:
    return [unit.name for unit in found.units]


def owners(found: Partition) -> dict[str, list[str]]:
    return {unit.name: [spec.name for spec in unit.params] for unit in found.units}


def is_in(*modules: nn.Module) -> Callable[[nn.Module], bool]:
    return lambda module: any(module is other for other in modules)


def refused(*args: Any, error: type[FSDPError] = WrapError, **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        partition(*args, **kwargs)
    return str(caught.value)
