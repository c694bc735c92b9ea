"""What the tests of the memory levers share: a small transformer-like stack, a run with and without a lever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import gather, gather_state, here


class Layer(nn.Module):
    """A residual block of odd width, with dropout and two norms: several things to save, some of them random."""

    def __init__(self, width: int = 6, inner: int = 11, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    """`depth` layers and a head; `between` is applied to what each layer returns."""

    def __init__(self, depth: int = 5, width: int = 6, between: Callable[[Tensor], Tensor] | None = None, **layer: Any):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, **layer) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.between is not None:
                x = self.between(x)
        return self.head(x)


def build(make: Callable[[], nn.Module], *, policy: Any = "layers", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp.fsdp_wrap(make(), fsdp.by_class(Layer) if policy == "layers" else policy, **options)


def batch(step: int, width: int = 6, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + here.rank)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, 3, generator=generator)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    clip: float | None = None,
    scaler: Any = None,
) -> list[float]:
    """A user's loop; returns losses and, where it clips, norms."""
    seen = []
    for step in steps:
        for micro in range(accumulate):
            torch.manual_seed(1000 * step + 10 * micro + here.rank)  # dropout
            x, y = batch(10 * step + micro)
            quiet = no_sync and micro + 1 < accumulate
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = (model(x) - y).square().mean() / accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            seen.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            seen.append(model.clip_grad_norm_(clip).item())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return seen


def whole(model: nn.Module, optimizer: Any = None, keys: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Gathered parameters and optimizer state; every rank must call it."""
    found = dict(gather(model))
    for key in keys:
        found.update({f"{name}/{key}": v for name, v in gather_state(model, optimizer, key).items() if v is not None})
    return found


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    assert list(found) == list(expected), f"{what}: {list(found)} instead of {list(expected)}"
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), f"{what}: other bits in {name}"
