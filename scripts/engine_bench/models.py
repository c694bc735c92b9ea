"""The models that are measured, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planning.models import Block


class GPT(nn.Module):
    """A GPT with a tied head; the root owns embeddings and last norm. ``forward`` returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class SmallUnit(nn.Sequential):
    """Six small Linears: twelve parameters and next to no arithmetic, so that what is left is host time."""

    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(6)))


class SmallUnits(nn.Module):
    """A chain of small units; the root owns nothing. ``forward`` returns the loss."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SmallUnit(width) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the class whose instances become units.

    Attributes:
        title: What the table calls it.
        world_size: Ranks it runs on.
        units: Number of modules that become units, the root aside.
        unit_class: Class of the modules that each contender shards by themselves.
        make_model: Builds the model; the caller seeds.
        make_batch: From a generator to one local batch.
        rounds, quick_rounds: Measured steps of each contender.
        has_peak: Whether live bytes are counted too.
    """

    title: str
    world_size: int
    units: int
    unit_class: type[nn.Module]
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Tensor]
    rounds: int
    quick_rounds: int
    has_peak: bool


def _gpt(title: str, layers: int, vocabulary: int) -> Case:
    return Case(
        title=title,
        world_size=2,
        units=layers,
        unit_class=Block,
        make_model=lambda: GPT(layers, width=512, heads=8, vocabulary=vocabulary, length=64),
        make_batch=lambda generator: torch.randint(vocabulary, (2, 64), generator=generator),
        rounds=24,
        quick_rounds=4,
        has_peak=True,
    )


def _small(title: str, world_size: int, quick_rounds: int) -> Case:
    return Case(
        title=title,
        world_size=world_size,
        units=50,
        unit_class=SmallUnit,
        make_model=lambda: SmallUnits(units=50, width=16),
        make_batch=lambda generator: torch.randn(4, 16, generator=generator),
        rounds=60,
        quick_rounds=quick_rounds,
        has_peak=False,
    )


CASES = {
    "gpt": _gpt("GPT, 30M parameters, 2 ranks", layers=8, vocabulary=8192),
    "bytes": _gpt("byte-level GPT, 29M parameters, 2 ranks", layers=9, vocabulary=256),
    "units": _small("50 units of six Linear(16,16), 2 ranks", world_size=2, quick_rounds=12),
    "host": _small("50 units of six Linear(16,16), 1 rank", world_size=1, quick_rounds=20),
}
