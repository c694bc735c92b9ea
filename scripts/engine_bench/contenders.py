"""The same model under fsdplite, `fully_shard`, `FullyShardedDataParallel` and DDP, each with its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdplite as fsdp

from .models import Case

REFERENCE = "fully_shard"
NAMES = ("fsdplite", REFERENCE, "FSDP1", "DDP")
# DDP has no mode with low-precision compute and fp32 masters of its own.
LOW_PRECISION_NAMES = ("fsdplite", REFERENCE, "FSDP1")


@dataclass
class Contender:
    """A wrapped model with its optimizer."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def forward_backward(self, batch: Tensor) -> Tensor:
        loss = self.model(batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(name: str, case: Case, precision: str, optimizer_kind: str, seed: int = 0) -> Contender:
    """One contender. Every rank calls it; ranks hold the same weights. ``"plain"`` is the model unwrapped.

    Args:
        name: One of ``NAMES``, or ``"plain"``.
        case: What to build.
        precision: ``"fp32"`` or ``"bf16"``: compute in bf16, gradients reduced in fp32, fp32 masters.
        optimizer_kind: How AdamW goes over parameters: ``"foreach"``, ``"fused"`` or ``"default"``.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    model = _WRAPPERS[name](case.make_model(), case, precision)
    options = {} if optimizer_kind == "default" else {optimizer_kind: True}
    return Contender(name, model, torch.optim.AdamW(model.parameters(), lr=1e-4, **options))


def _plain(model: nn.Module, case: Case, precision: str) -> nn.Module:
    return model.to(torch.bfloat16) if precision == "bf16" else model


def _fsdplite(model: nn.Module, case: Case, precision: str) -> nn.Module:
    return fsdp.fsdp_wrap(model, fsdp.by_class(case.unit_class), precision=precision)


def _fully_shard(model: nn.Module, case: Case, precision: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, case.unit_class):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def _fsdp1(model: nn.Module, case: Case, precision: str) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({case.unit_class}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        mixed_precision=low if precision == "bf16" else None,
    )


def _ddp(model: nn.Module, case: Case, precision: str) -> nn.Module:
    assert precision == "fp32"
    return nn.parallel.DistributedDataParallel(model)


_WRAPPERS = {"plain": _plain, "fsdplite": _fsdplite, REFERENCE: _fully_shard, "FSDP1": _fsdp1, "DDP": _ddp}
