"""Options of a plan: each does what it does in a run, and a wrong one is named."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.errors import ConfigError, DoesNotFitError, PolicyError, UnknownOptionError, WrapError
from fsdplite.planning.prediction import Plan
from tests.planning.models import GPT, Block
from tests.planning.test_plan import tower

TOKENS = torch.zeros(2, 16, dtype=torch.long)
BY_BLOCK = fsdp.by_class(Block)


def small() -> GPT:
    return GPT(2, 16, 64, 16, tied=False)


def numbers(plan: Plan) -> tuple:
    return plan.peaks, plan.resting, plan.traffic.calls, [(task.kind, task.unit, task.bytes) for task in plan.tasks]


@pytest.mark.parametrize(
    "changes",
    [{"precision": "bf16"}, {"world_size": 8}, {"mesh": (2, 2)}, {"stage": 1}, {"optimizer": "sgd"}, {"policy": None},
     {"recompute": "sqrt"}, {"device": "cpu"}, {"prefetch": 0, "reshard_after_forward": True},
     {"inputs": torch.zeros(6, 8, dtype=torch.long), "microbatches": 2}, {"rank": 1},
     {"loss_of": lambda model, tokens: 2 * model(tokens)}],
    ids=lambda changes: ",".join(changes),
)  # fmt: skip
def test_a_plan_with_options_changed_is_the_plan_made_with_them(changes: dict) -> None:
    base = {"world_size": 2, "policy": BY_BLOCK, "inputs": TOKENS}
    changed = fsdp.plan(small, **base).but(**changes)
    options = base | changes
    if "mesh" in changes:
        del options["world_size"]
    again = fsdp.plan(small, **options)
    assert numbers(changed) == numbers(again) and changed.question.world_size == again.question.world_size


def test_two_functions_are_two_policies() -> None:
    plan = fsdp.plan(small, world_size=2, policy=fsdp.by_predicate(lambda name, module: name == "blocks.0"))
    other = plan.but(policy=fsdp.by_predicate(lambda name, module: name == "blocks.1"))
    assert [unit.name for unit in plan.units] == ["", "blocks.0"]
    assert [unit.name for unit in other.units] == ["", "blocks.1"]


class Encoder(GPT):
    """An entry point beside ``forward``, and a method that nobody is told about."""

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Encodes(Encoder):
    forward = Encoder.encode


def test_an_entry_point_counts_as_a_forward() -> None:
    options = {"world_size": 2, "policy": BY_BLOCK, "inputs": TOKENS}
    shape = (2, 16, 64, 16)
    called = fsdp.plan(lambda: Encodes(*shape, tied=False), **options, loss_of=lambda m, x: m(x).sum())
    named = fsdp.plan(lambda: Encoder(*shape, tied=False), **options, loss_of=lambda m, x: m.encode(x).sum(),
                      forward_methods=("encode",))  # fmt: skip
    assert numbers(named) == numbers(called)
    with pytest.raises(ConfigError, match="forward_methods"):
        fsdp.plan(lambda: Encoder(*shape, tied=False), **options, loss_of=lambda m, x: m.encode(x).sum())
    with pytest.raises(PolicyError, match="did you mean 'encode'"):
        fsdp.plan(lambda: Encoder(*shape, tied=False), **options, forward_methods=("encod",))


class Recurrent(nn.Module):
    """RNNs keep a list of their weights beside the dict of parameters."""

    def __init__(self, kind: type = nn.GRU) -> None:
        super().__init__()
        self.rnn = kind(8, 8, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def test_weights_that_a_module_lists_elsewhere_too() -> None:
    plan = fsdp.plan(Recurrent, world_size=1, precision="bf16", optimizer="SGD", inputs=torch.ones(3, 2, 8))
    numel = 2 * (2 * 3 * 8 * 8 + 2 * 3 * 8)
    assert plan.resting.gradients == 4 * numel and plan.resting.parameters == 4 * numel


def test_a_batch_takes_the_memory_that_it_takes() -> None:
    """Tokens that are labels too are there once, and so is the row that an expanded batch repeats."""

    def bytes_of(*inputs: Tensor) -> int:
        loss_of = lambda model, first, second: model(first + second).square().mean()  # noqa: E731
        return fsdp.plan(lambda: nn.Linear(32, 4), world_size=2, inputs=inputs, loss_of=loss_of).input_bytes

    batch = torch.ones(8, 32)
    assert bytes_of(batch, batch) == 4 * 8 * 32 and bytes_of(batch, batch.clone()) == 2 * 4 * 8 * 32
    assert bytes_of(batch[:1].expand(8, 32), batch) == 4 * 32 + 4 * 8 * 32


def test_the_default_device_changes_nothing() -> None:
    plan = fsdp.plan(small, world_size=2, inputs=TOKENS)
    with torch.device("meta"):
        assert numbers(fsdp.plan(small, world_size=2, inputs=TOKENS)) == numbers(plan)


def test_what_is_not_counted_is_said() -> None:
    """The LSTM kernel of a CPU returns a workspace for backward, whose size only it knows; the GRU there has none."""
    options = {"world_size": 2, "inputs": torch.ones(3, 2, 8)}
    plan = fsdp.plan(lambda: Recurrent(nn.LSTM), device="cpu", **options)
    assert "kernels keep from forward for backward in 'rnn' (LSTM)" in plan.notes[0]
    with pytest.raises(DoesNotFitError) as refused:
        plan.fits(1024)
    for text in (str(plan), str(plan.to_dict()["notes"]), plan.to_html(), str(refused.value)):
        assert "from forward for backward in" in " ".join(text.split()) and "(LSTM)" in text
    assert fsdp.plan(Recurrent, device="cpu", **options).notes == ()
    assert "(GRU)" in fsdp.plan(Recurrent, **options).notes[0]
    assert "no inputs were given" in " ".join(str(plan.but(inputs=None)).split())


@pytest.mark.parametrize("inputs", [None, torch.ones(2, 8)], ids=["structure only", "with inputs"])
def test_ignored_parameters_train_too(inputs: Tensor | None) -> None:
    """64 fp64 elements that no unit owns: gradients and two moments of eight bytes, averaged in fp64."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].double()
    model[1].forward = functools.partial(lambda inner, x: nn.functional.linear(x.double(), inner.weight), model[1])
    plan = fsdp.plan(model, world_size=4, ignored=[model[1]], inputs=inputs)
    shard = 64 // 4
    assert plan.resting.gradients == 4 * shard + 8 * 64
    assert plan.resting.optimizer == 8 * shard + 16 * 64 + 2 * 4
    (call,) = [call for call in plan.traffic.calls if call.kind == "all_reduce"]
    assert (call.numel, call.dtype, call.ranks) == (64, torch.float64, 4)


@pytest.mark.slow
def test_auto_is_told_what_the_plan_is_for() -> None:
    """Far apart one unit is best, and on one rank nothing is far; so the choice depends on the plan's world."""
    far = fsdp.Topology(ranks_per_node=1, operator_s=0.0, inter=fsdp.Link(5e10, 1e-1))
    told, inputs = {"topology": far}, torch.ones(2, 64)
    for options in ({"world_size": 64}, {"mesh": (8, 8), "precision": "bf16", "stage": 2}):
        chosen = fsdp.auto(inputs=inputs, **told, **options).choose(tower())
        plan = fsdp.plan(tower(), policy=fsdp.auto(**told), inputs=inputs, **options)
        assert [unit.name for unit in plan.units] == [unit.name for unit in chosen.best.plan.units] == [""]
    alone = fsdp.plan(tower(), world_size=1, policy=fsdp.auto(**told), inputs=inputs)
    assert len(alone.units) > 1
    assert len(alone.but(world_size=64).units) == 1


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))


def test_wrong_options_are_named() -> None:
    plan = fsdp.plan(linear, world_size=2)
    model = linear()
    made = torch.optim.SGD(model.parameters())
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    for error, needle, call in (
        (UnknownOptionError, "did you mean 'stage'", lambda: plan.but(stgae=2)),
        (UnknownOptionError, "did you mean 'world_size'", lambda: fsdp.plan(linear, wordl_size=2)),
        (ConfigError, "replicas", lambda: plan.but(mesh=(2, 2)).but(world_size=8)),
        (ConfigError, "disagree", lambda: plan.but(world_size=4, mesh=(3, 2))),
        (ConfigError, "there is no such rank", lambda: plan.but(rank=2)),
        (PolicyError, "by_class", lambda: plan.but(policy=nn.Linear)),
        (ConfigError, "did you mean 'bf16'", lambda: plan.but(precision="bf61")),
        (ConfigError, "mesh is not a shape", lambda: fsdp.plan(linear, mesh=4)),
        (ConfigError, "mesh is not a shape", lambda: fsdp.plan(linear, mesh="2x4")),
        (ConfigError, "reshard_after_forward", lambda: fsdp.plan(linear, world_size=2, reshard_after_forward="no")),
        (ConfigError, "recompute takes", lambda: fsdp.plan(linear, world_size=2, recompute=True)),
        (ConfigError, "several modules", lambda: fsdp.plan(model, world_size=2, ignored=model[0])),
        (ConfigError, "not in the model", lambda: fsdp.plan(linear, world_size=2, ignored=[model[0]])),
        (ConfigError, "made already", lambda: fsdp.plan(linear, world_size=2, optimizer=made)),
        (ConfigError, "did you mean 'adamw'", lambda: fsdp.plan(linear, world_size=2, optimizer="adamww")),
        (ConfigError, "Adafactor", lambda: fsdp.plan(linear, world_size=2, optimizer=adafactor)),
        (ConfigError, "dense", lambda: fsdp.plan(linear, world_size=2, optimizer="SparseAdam")),
        (ConfigError, "small tensors", lambda: fsdp.plan(linear, world_size=2, optimizer=lambda p: None)),
        (WrapError, "lazy", lambda: fsdp.plan(nn.Sequential(nn.LazyLinear(4)), world_size=2)),
        (UnknownOptionError, "did you mean 'budget'", lambda: fsdp.auto(bugdet="1GiB")),
        (UnknownOptionError, "auto chooses policy", lambda: fsdp.auto(policy=BY_BLOCK)),
        (ConfigError, "a link has", lambda: fsdp.auto(bandwidth="50GB")),
        (ConfigError, "Topology", lambda: fsdp.auto(topology=8)),
        (ConfigError, "or topology", lambda: fsdp.auto(topology=fsdp.Topology(), bandwidth=1e9)),
        (ConfigError, "loss_of is not a function", lambda: fsdp.plan(linear, world_size=2, loss_of=5)),
        (ConfigError, "loss_of is not a function", lambda: plan.but(loss_of=5)),
        (ConfigError, "nested", lambda: fsdp.plan(linear, world_size=2, inputs=nested)),
        (ConfigError, "copy.deepcopy cannot", lambda: fsdp.plan(locked, world_size=2)),
        (ConfigError, "needs arguments", lambda: fsdp.plan(nn.Linear, world_size=2)),
        (ConfigError, r"found: \(Sequential, int\)", lambda: fsdp.plan(lambda: (model, 5), world_size=2)),
        (ConfigError, "make_batch", lambda: fsdp.plan(lambda: (model, lambda step: None), world_size=2)),
        (ConfigError, "lambda step, rank, world_size: batch", lambda: fsdp.plan(lambda: (model, 5), world_size=2)),
        (ConfigError, "compare takes", lambda: plan.compare(None)),
        (ConfigError, "compare takes", lambda: plan.compare(model, 5)),
        (ConfigError, "warm_up", lambda: plan.compare(model, print, warm_up=-1)),
        (UnknownOptionError, "did you mean 'warm_up'", lambda: plan.compare(model, warmup=1)),
        (UnknownOptionError, "did you mean 'timeline'", lambda: plan.to_html(timelin=None)),
        (ConfigError, r"timeline is not a Timeline\n.*simulate", lambda: plan.to_html(timeline=5)),
        (ConfigError, r"comparison is not a Comparison\n.*compare", lambda: plan.to_html(comparison=plan)),
        (ConfigError, r"trace is not a Trace\n.*fsdp.trace", lambda: plan.to_html(trace="trace.json")),
        (ConfigError, "Topology.straggler", lambda: fsdp.Topology(straggler=float("inf"))),
        (ConfigError, "compute_s is a measured time", lambda: fsdp.Topology().calibrated(plan, compute_s=0)),
        (ConfigError, "update_s is a measured time", lambda: fsdp.Topology().calibrated(plan, 1.0, update_s="1")),
        (ConfigError, "no computation", lambda: fsdp.Topology().calibrated(plan, 1.0)),
        (ConfigError, "simulate takes a plan", lambda: fsdp.simulate(model)),
    ):
        with pytest.raises(error, match=needle):
            call()


def locked() -> nn.Module:
    model = linear()
    model.lock = threading.Lock()
    return model


adafactor = functools.partial(torch.optim.Adafactor)


def test_a_forward_that_fails_says_in_which_module(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"in '1\.0' \(Linear\)"):
        fsdp.plan(nn.Sequential(nn.Linear(8, 7), nn.Sequential(nn.Linear(8, 8))), world_size=2, inputs=torch.ones(2, 8))
    assert "Traceback" not in capfd.readouterr().err
