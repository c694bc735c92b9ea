"""What a flat parameter is made of, before it exists."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from .binding import Location

__all__ = ["FlatSpec"]


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
