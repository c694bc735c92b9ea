"""All tables."""

from __future__ import annotations

from .accelerate import ACCELERATE, TRAINERS
from .checkpoints import CHECKPOINTS
from .ddp import DDP, DDP_TOOLS, SCALERS, SHARED
from .deepspeed import DEEPSPEED
from .fsdp1 import CHECKPOINT_WRAPPER, FSDP1
from .fsdp2 import DTENSOR, FSDP2, OTHER_PARALLELISM
from .megatron_fsdp import MEGATRON_FSDP
from .others import FABRIC, OTHER_ENGINES
from .rule import Engine

__all__ = ["ENGINES"]

ENGINES: tuple[Engine, ...] = (
    DDP, DDP_TOOLS, SCALERS, FSDP1, CHECKPOINT_WRAPPER, FSDP2, DTENSOR, OTHER_PARALLELISM, CHECKPOINTS, DEEPSPEED,
    MEGATRON_FSDP, ACCELERATE, FABRIC, TRAINERS, OTHER_ENGINES, SHARED,
)  # fmt: skip
