"""The small models of the cases, of any size and with any names inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Vec(nn.Module):
    """One parameter `w` of `n` elements, all `value`; its gradient on a rank is exactly `c`."""

    def __init__(self, n: int, value: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((n,), value, dtype=dtype))

    def forward(self, c: float | Tensor) -> Tensor:
        return (self.w * c).sum()


class MLP(nn.Sequential):
    """Linear(7,5), Tanh, Linear(5,3): 58 elements, a multiple of 2 but neither of 3 nor of 4."""

    def __init__(self, sizes: tuple[int, ...] = (7, 5, 3), dtype: torch.dtype = torch.float64) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(fan_in, fan_out, dtype=dtype), nn.Tanh()]
        super().__init__(*layers[:-1])


class Block(nn.Module):
    """Linear(width, width) and Tanh."""

    def __init__(self, width: int = 5, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """`blocks.0` to `blocks.n-1` (30 elements each at width 5); the root owns `head`, Linear(5,3)."""

    def __init__(self, n: int, width: int = 5, out: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(n))
        self.head = nn.Linear(width, out, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(build, *args, seed: int = 0, **kwargs):
    """`build(*args, **kwargs)` under `seed`: every rank and every reference starts from the same weights."""
    torch.manual_seed(seed)
    return build(*args, **kwargs)
