"""The global gradient norm, taken over flat shards, and clipping by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from .errors import ConfigError
from .gradient import combine_norms, local_norm, norm_dtype
from .local_slice import engine_access

if TYPE_CHECKING:
    from .groups import Groups
    from .unit import UnitState

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    root: UnitState, units: list[UnitState], ignored: list[nn.Parameter], max_norm: float, norm_type: float
) -> torch.Tensor:
    """See ``FSDPUnit.clip_grad_norm_``. Each gradient is scaled in its own dtype."""
    if math.isnan(norm_type) or norm_type <= 0:
        raise ConfigError("norm_type must be positive", expected="a number > 0, or inf", found=norm_type)
    if (updates := root.schedule.updates()) is not None:
        raise updates.refusal("clip_grad_norm_", root.name)
    root.schedule.agreement.agree_on_extra("gradient norm", root)
    entries: list[tuple[Groups | None, torch.Tensor]] = []
    gradients: list[torch.Tensor] = []
    with engine_access(), torch.no_grad():
        for unit in units:
            for flat in unit.flats:
                if flat.gradient is None:
                    continue
                flat.gradient.refuse_pending()
                parts = flat.gradient.bound_parts()
                if not parts:
                    # This rank may hold nothing of what others do; it takes part with a norm of zero.
                    entries.append((flat.groups, torch.zeros((), device=flat.device)))
                for part in parts:
                    entries.append((flat.groups, local_norm(part, norm_type)))
                gradients.extend(parts)
        for parameter in ignored:
            if parameter.grad is not None:
                entries.append((None, local_norm(parameter.grad, norm_type)))
                gradients.append(parameter.grad)
        dtype = norm_dtype([flat.dtype for unit in units for flat in unit.flats if flat.trainable])
        device = next((flat.device for unit in units for flat in unit.flats), torch.device("cpu"))
        total = combine_norms(entries, norm_type, dtype, device)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        scales = {rest: scale.to(rest) for rest in {gradient.device for gradient in gradients}}
        for gradient in gradients:
            scale = scales[gradient.device]
            if gradient.dtype == scale.dtype:
                gradient.mul_(scale)
            else:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                gradient.copy_(gradient.to(wide) * scale.to(wide))
    return total


