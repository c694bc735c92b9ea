"""What a recomputed block reads and changes besides its weights: the second run sees it as the first one did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdplite as fsdp
from tests.harness import for_each, run
from tests.memory.parts import assert_same_bits, batch, whole

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """`depth` blocks, called by `call(blocks, x)` if given."""

    def __init__(self, block: type[nn.Module], call: Callable[[Any, Tensor], Tensor] | None = None, depth: int = 5):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        if self.call is not None:
            return self.head(self.call(self.blocks, x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(block: type[nn.Module], call: Any, recompute: Any, options: dict, forwards: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Stack(block, call), fsdp.by_class(block), recompute=recompute, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):  # a budget is settled after the first
        losses = [(model(x) - y).square().mean() for x, y in (batch(10 * step + n) for n in range(forwards))]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**whole(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def same_as_without(block: type[nn.Module], call: Any = None, options: dict = {}, forwards: int = 1) -> None:
    expected = trained(block, call, None, options, forwards)
    for recompute in (fsdp.by_class(block), "sqrt", fsdp.recompute_within(1200), fsdp.recompute_within("1GiB")):
        found = trained(block, call, recompute, options, forwards)
        assert_same_bits(found, expected, f"{block.__name__}, {recompute}")


# ---- buffers


class Scaled(Block):
    """A running scale, written and then read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.mul_(0.5).add_(x.abs().amax(0) * 0.5)
        return torch.tanh(self.linear(x / self.largest)) + x


class ScaledByAnother(Scaled):
    """The same, in a new buffer each time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest = self.largest * 0.5 + x.abs().amax(0) * 0.5
        return torch.tanh(self.linear(x / self.largest)) + x


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.linear(x * (1 / self.count))) + x


class Lazy(Block):
    """Makes a buffer when it is called first."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", x.detach().mean(0))
            x = x * 2.0
        return torch.tanh(self.linear(x - self.shift))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class CumulativelyNormed(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)


class InstanceNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x.view(-1, 2, 3)).reshape(-1, WIDTH)))


class OwnStatistics(Block):
    """Statistics that are written without a trace: no version, no count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(F.batch_norm(x, self.mean, self.var, training=True)))


WITH_BUFFERS = (
    Scaled, ScaledByAnother, Counting, Lazy, Normed, CumulativelyNormed, InstanceNormed, OwnStatistics,
)  # fmt: skip


def body_of_buffers() -> None:
    for_each([(block, None, {}, 1 + (block in (ScaledByAnother, Counting, Normed))) for block in WITH_BUFFERS], same_as_without)
    low = fsdp.Precision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for_each([(block, None, {"precision": low}) for block in (Scaled, Counting)], same_as_without)


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_that_a_block_writes(world_size: int) -> None:
    run(world_size, body_of_buffers)
