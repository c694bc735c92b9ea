"""What a flat parameter is made of, before it exists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .binding import Location
from .layout import FlatLayout
from .modules import user_name
from .partition import ParamSpec
from .precision import Precision

__all__ = ["FlatSpec", "group_parameters"]


@dataclass
class FlatSpec:
    """What a flat parameter is made of.

    Attributes:
        parameters: The users' parameters, in ``named_parameters`` order, one dtype and one ``requires_grad``.
        names: For each, all its dotted names; the first is canonical.
        locations: For each, the places that hold it: (module or its dict of parameters, attribute name).
        dtype: Of the shard (the master) and of the gradient that the optimizer sees.
        compute_dtype: Of gathered weights.
        wire_dtype: Of the gradient reduction.
        trainable: Whether it has gradients at all.
    """

    parameters: list[nn.Parameter]
    names: list[tuple[str, ...]]
    locations: list[list[Location]]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype
    trainable: bool
    shapes: list[torch.Size] = field(default_factory=list)

    def layout(self, world_size: int) -> FlatLayout:
        """Every parameter starts on 16 bytes, in the shard and among the gathered weights."""
        alignment = max(1, 16 // min(self.dtype.itemsize, self.compute_dtype.itemsize))
        shapes = self.shapes or [p.shape for p in self.parameters]
        return FlatLayout(shapes, world_size=world_size, alignment=alignment)


def group_parameters(params: Iterable[ParamSpec], precision: Precision, kept: set[int]) -> list[FlatSpec]:
    """One flat parameter per dtype, compute dtype and requires_grad, in order of first appearance.

    Args:
        params: What one unit owns.
        precision: Says which dtypes a parameter has.
        kept: Identities of the modules that stay in fp32.
    """
    found: dict[Any, FlatSpec] = {}
    for param in params:
        p = param.parameter
        is_kept = any(id(holder) in kept for holder, _ in param.locations)
        compute = precision.compute_dtype(p.dtype, is_kept)
        master = precision.master_dtype(p.dtype)
        key = (p.dtype, compute, p.requires_grad)
        if key not in found:
            found[key] = FlatSpec([], [], [], master, compute, precision.wire_dtype(master), p.requires_grad)
        group = found[key]
        group.parameters.append(p)
        group.names.append(tuple(user_name(name) for name in param.names))
        group.locations.append(param.locations)
    return list(found.values())
