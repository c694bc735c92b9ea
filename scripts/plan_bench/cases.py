"""What is run and simulated: models, and ways to wrap them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fsdplite as fsdp
from engine_bench.models import GPT, Block


@dataclass(frozen=True)
class Model:
    """A model and one rank's batch."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


@dataclass(frozen=True)
class Wrapping:
    """Options of ``fsdp_wrap``."""

    title: str
    options: dict[str, Any] = field(default_factory=dict)


def _tokens(vocabulary: int, rows: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


MODELS = {
    "small": Model("6 blocks of width 256, 8 x 64 tokens", lambda: GPT(6, 256, 4, 512, 64), _tokens(512, 8, 64)),
    "wide": Model("4 blocks of width 512, 4 x 64 tokens", lambda: GPT(4, 512, 8, 256, 64), _tokens(256, 4, 64)),
    "long": Model("3 blocks of width 256, 4 x 256 tokens", lambda: GPT(3, 256, 4, 256, 256), _tokens(256, 4, 256)),
}
WRAPPINGS = {
    "by block": Wrapping("stage 3, a unit a block", {"policy": fsdp.by_class(Block)}),
    "one unit": Wrapping("stage 3, one unit", {"policy": None}),
    "stage 2": Wrapping("stage 2, a unit a block", {"policy": fsdp.by_class(Block), "stage": 2}),
    "stage 0": Wrapping("stage 0, a unit a block", {"policy": fsdp.by_class(Block), "stage": 0}),
    "recompute": Wrapping(
        "stage 3, blocks recomputed", {"policy": fsdp.by_class(Block), "recompute": fsdp.by_class(Block)}
    ),
}
