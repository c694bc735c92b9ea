"""One fake step serves many policies, and tells of each what a step of its own would tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fsdplite as fsdp
from fsdplite.planning import recording
from fsdplite.planning.live_bytes import LiveBytes
from tests.planning.models import GPT, Block
from tests.planning.test_options import numbers, small


class Scaled(nn.Module):
    """A block that is given a table in fp32, which a low precision unit casts on its way in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.down(self.up(x * table.to(x.dtype)).relu())


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(48, 32))
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.head = nn.Linear(32, 500)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.table)
        return self.head(x)


def gpt() -> nn.Module:
    return GPT(3, 32, 500, 16, tied=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, inputs, precision, recordings",
    [(gpt, torch.zeros(2, 16, dtype=torch.long), None, 1), (gpt, torch.zeros(2, 16, dtype=torch.long), "bf16", 1),
     (Tables, torch.ones(48, 32), None, 1), (Tables, torch.ones(48, 32), "bf16", 2)],
    ids=["fp32", "bf16", "table in fp32", "table that units cast"],
)  # fmt: skip
def test_a_shared_fake_step_tells_what_one_of_its_own_does(
    build: object, inputs: Tensor, precision: str | None, recordings: int
) -> None:
    options = {"world_size": 4, "inputs": inputs, "precision": precision}
    choice = fsdp.auto(**options).choose(build)
    assert sum(map(len, choice.best.plan.question.memory.recordings.values())) == recordings
    compared = 0
    for candidate in choice.considered:
        if candidate.options["prefetch"] == 1 and candidate.options["reshard_after_forward"] is None:
            own = fsdp.plan(build, **options, **candidate.options)
            assert numbers(candidate.plan) == numbers(own), candidate.describe()
            assert [(t.flops, t.operators) for t in candidate.plan.tasks] == [(t.flops, t.operators) for t in own.tasks]
            compared += 1
    assert compared >= 4


@pytest.mark.slow
def test_recomputation_and_a_policy_of_its_own() -> None:
    inputs = torch.zeros(2, 16, dtype=torch.long)
    by_block = fsdp.by_class(Block)
    choice = fsdp.auto(world_size=2, inputs=inputs, budget=1000).choose(gpt)
    recomputed = [c for c in choice.considered if c.options["recompute"] is not None]
    assert {str(c.options["recompute"]) for c in recomputed} == {"sqrt", str(by_block)} or len(recomputed) >= 2
    for candidate in recomputed:
        own = fsdp.plan(gpt, world_size=2, inputs=inputs, **candidate.options)
        assert numbers(candidate.plan) == numbers(own), candidate.describe()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


class Odd(nn.Module):
    """What a cache of results could get wrong: views of views, writes through them, conjugates, lists, outputs that
    share storage, arguments equal in value and not in type, tensors that know their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("steps", torch.arange(16.0))

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = Squared.apply(layer(x)) * self.scale
        waves = torch.fft.rfft(x)
        x = torch.fft.irfft(waves * waves.conj().imag, n=16)
        y = x.clone().t().contiguous().t() + self.steps
        y[:, ::2] += 1.0
        y.unsqueeze_(0).squeeze_(0)
        left, right = y.masked_fill(y > 0.5, 0).chunk(2, -1)
        y = torch.cat([right, left.flip(0), *torch.split(y, [3, 13], -1)], -1)[:, :16]
        y = torch.index_select(y, 0, torch.tensor([1, 0])) * (x[:2].sum() + 1) * torch.tensor(3.0)
        y = torch.add(y, 1) + torch.add(y, 1.0) + torch.full((2,), True)[:, None] + torch.full((2,), 1)[:, None]
        with torch.no_grad():
            torch.mul(y, 2, out=torch.empty(0))
            y.new_empty(0).resize_(y.shape).set_(y)
        return x + y.mean() + checkpoint(lambda z: z.tanh().cumsum(-1), x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for layer in self.layers:
                x = self.block(layer, x)
        return x.logsumexp(-1).mean()


class Asked(LiveBytes):
    """Every operator asks torch."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()


def test_what_is_known_of_an_operator_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for build, inputs in ((Odd, torch.ones(4, 16)), (small, torch.zeros(2, 16, dtype=torch.long))):
        found = []
        for counter in (recording.RepeatedWork, Asked):
            monkeypatch.setattr(recording, "RepeatedWork", counter)
            plan = fsdp.plan(build, world_size=2, policy=fsdp.by_class(nn.Linear), inputs=inputs)
            ((recorded,),) = plan.question.memory.recordings.values()
            found.append(recorded)
            monkeypatch.undo()
        assert len(found[0].events) > 20 and found[0] == found[1]
