"""The state that is saved: equal layers and AdamW's moments, sharded by fsdplite or by fully_shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdplite as fsdp
from fsdplite.checkpoint import snapshot
from fsdplite.checkpoint.world import world_of
from fsdplite.checkpoint.writer import Part

WIDTH = 2048
_LAYER_BYTES = 3 * 4 * (WIDTH + 1) * WIDTH  # fp32 weight and bias, and two moments of each


@dataclass
class State:
    """A model after one step, so that its optimizer has moments."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def layer_count(megabytes: int) -> int:
    """How many layers have so many megabytes of parameters and moments."""
    return max(1, round(megabytes * 1e6 / _LAYER_BYTES))


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def by_fsdplite(count: int) -> State:
    return _stepped(fsdp.fsdp_wrap(layers(count), fsdp.by_class(nn.Linear)))


def by_fully_shard(count: int) -> State:
    model = layers(count)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _stepped(model)


def _stepped(model: nn.Module) -> State:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return State(model, optimizer)


def parts_of(state: State) -> list[Part]:
    """What this rank of an fsdplite state writes: views of its slices."""
    taken: Any = snapshot.take(state.model, state.optimizer, extra=None, per_rank=None, trainable_only=False)
    return taken.parts(world_of(state.model))


def bytes_in(parts: list[Part]) -> int:
    return sum(part.data.numel() * part.data.element_size() for part in parts)
