"""`check_parity`: it finds no difference where there is none, and every kind of difference where there is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.errors import ConfigError
from fsdplite.parity import ParityReport, check_parity
from tests.harness import MLP, Block, for_each, here, run, sgd


class Noisy(nn.Module):
    """Dropout, a frozen weight, one that is never used, a tied one, and a module with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(Block(5, torch.float32) for _ in range(2))
        self.drop = nn.Dropout(0.25)
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].linear.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = x + self.drop(block(x))
        return {"logits": scale * self.head(x), "tokens": tokens}


def noisy_batch(step: int, rank: int, world_size: int) -> tuple[tuple, dict]:
    return (torch.randint(11, (3, 4)),), {"scale": 1.0 + rank / world_size}


def noisy() -> tuple:
    return Noisy(), noisy_batch


def with_loss() -> tuple:
    def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return (model(x) - target).square().mean()

    return MLP(), lambda step, rank, world_size: (torch.randn(4, 7).double(), torch.randn(4, 3).double()), loss_of


def both_exact(stage: int, precision: str) -> None:
    policy = fsdp.by_class("Block") | fsdp.by_name("norm")
    report = check_parity(noisy, stage=stage, precision=precision, policy=policy, bitwise=True)
    assert report.passed, [row for row in report.differences if not row.passed]
    if here.rank == 0:
        assert {row.kind for row in report.differences} == {"parameter", "gradient"}
        assert len(report.losses) == 3 and all(a == b for a, b in report.losses)
    else:
        assert not report.differences


@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_bits_on_one_and_two_ranks(world_size: int) -> None:
    run(world_size, for_each, [(stage, precision) for stage in (0, 2, 3) for precision in ("fp32", "bf16")], both_exact)


def three_ranks() -> None:
    assert check_parity(with_loss, make_optimizer=lambda parameters: sgd(parameters)).passed


def test_three_ranks_within_the_tolerance_of_fp64() -> None:
    run(3, three_ranks)


class Unequal(nn.Linear):
    """Computes something else once it is wrapped."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.001 if isinstance(self, fsdp.FSDPUnit) else 1.0)


def unequal() -> nn.Module:
    return nn.Sequential(Unequal(7, 5), nn.Linear(5, 3))


def finds_the_difference() -> ParityReport:
    return check_parity(unequal, policy=fsdp.by_class(Unequal))


def test_a_difference_is_found_on_every_rank() -> None:
    first, second = run(2, finds_the_difference)
    assert not first.passed and not second.passed
    assert {row.name for row in first.differences if not row.passed} >= {"0.weight", "1.weight"}
    assert all(0 < row.difference < 1 for row in first.differences if not row.passed)


def test_tolerance_and_equal_bits() -> None:
    assert check_parity(unequal, policy=fsdp.by_class(Unequal), tolerance=0.1).passed
    report = check_parity(unequal, policy=fsdp.by_class(Unequal), bitwise=True)
    assert not report.passed and all(row.tolerance == 0 for row in report.differences)


class LosesGradient(nn.Sequential):
    """Detaches what its second layer would learn from, once it is wrapped."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self
        y = second(x)
        return first(x) + (y.detach() if isinstance(self, fsdp.FSDPUnit) else y)


def test_a_gradient_on_one_side_only_is_infinitely_far() -> None:
    report = check_parity(lambda: LosesGradient(nn.Linear(3, 2), nn.Linear(3, 2)))
    far = {(row.kind, row.name) for row in report.differences if math.isinf(row.difference)}
    assert far == {("gradient", "1.weight"), ("gradient", "1.bias")}


class Explodes(nn.Linear):
    """Gives no number once it is wrapped."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (math.nan if isinstance(self, fsdp.FSDPUnit) else 1.0)


def test_no_number_on_one_side_only_does_not_pass() -> None:
    report = check_parity(lambda: Explodes(3, 2), tolerance=1e9)
    assert not report.passed and all(math.isinf(row.difference) for row in report.differences)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU()),
        lambda: nn.Linear(3, 2, dtype=torch.float64),
    ],
    ids=["linear", "embedding", "convolution", "double"],
)
def test_batches_are_guessed(make) -> None:
    assert check_parity(make, steps=2, bitwise=True).passed


def unseeded() -> nn.Module:
    torch.seed()
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    "make, needle",
    [
        (lambda: 3, "found: int"),
        (lambda: (nn.Linear(3, 2), torch.ones(3)), "lambda step, rank, world_size: batch"),
        (lambda: nn.LayerNorm(3), "make_batch"),
        (unseeded, "same seed"),
    ],
    ids=["no-module", "no-callable", "no-guess", "unseeded"],
)
def test_factories_that_cannot_be_used(make, needle: str) -> None:
    with pytest.raises(ConfigError, match=needle):
        check_parity(make)
