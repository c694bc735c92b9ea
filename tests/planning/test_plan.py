"""Plans against hand arithmetic: layout, states by stage, transients, traffic."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.errors import ConfigError, PolicyError, UnknownOptionError
from tests.planning.interpreter import run_python
from tests.planning.models import GPT, Block


class Tower(nn.Module):
    """`n` Linear layers of one width, without bias."""

    def __init__(self, n: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tower(n: int = 4, width: int = 64) -> nn.Module:
    with torch.device("meta"):
        return Tower(n, width)


@pytest.mark.parametrize("inputs", [None, torch.ones(2, 64)], ids=["structure only", "with inputs"])
def test_L2_the_plan_says_what_the_unit_boundaries_save(inputs: Tensor | None) -> None:
    by_block = fsdp.by_class(nn.Linear)
    for policy, prefetch, expected in ((None, 1, 65_536), (by_block, 1, 32_768), (by_block, 0, 16_384)):
        plan = fsdp.plan(tower(), world_size=2, policy=policy, prefetch=prefetch, inputs=inputs)
        assert plan.full_peak_bytes == expected, (policy, prefetch, plan.full_peak_bytes)
        assert plan.resting.parameters == 32_768


@pytest.mark.parametrize("stage, full, sharded", [(0, 16, 0), (1, 2, 16), (2, 2, 16), (3, 0, 16)])
def test_states_by_stage_in_mixed_precision(stage: int, full: int, sharded: int) -> None:
    """bf16 weights gathered, fp32 masters, gradients and two moments: 2 + 4 + 4 + 8 bytes a parameter."""
    numel, ranks = 4 * 64 * 64, 8
    plan = fsdp.plan(tower(), world_size=ranks, stage=stage, policy=fsdp.by_class(nn.Linear), precision="bf16")
    counters = 4 * 4  # one step counter of four bytes a parameter
    assert plan.resting.total == full * numel + sharded * numel // ranks + counters
    assert plan.padding_numel == 0


@pytest.mark.parametrize(
    "optimizer, per_element", [(torch.optim.SGD, 0), ("sgd", 0), ("Adam", 8), (torch.optim.RMSprop, 4), (None, 0)]
)
def test_state_of_the_optimizer_is_measured(optimizer: object, per_element: int) -> None:
    plan = fsdp.plan(tower(), world_size=2, optimizer=optimizer)
    assert abs(plan.resting.optimizer - per_element * 4 * 64 * 64 // 2) <= 4 * 4


def test_an_update_of_all_tensors_at_once_moves_what_one_of_each_moves() -> None:
    """SGD reads weight and gradient and writes the weight; on a device its operators take all parameters at once."""
    for layers in (4, 40):
        for device, operators in (("cpu", 2 + layers), ("cuda", 3)):
            plan = fsdp.plan(tower(layers), world_size=1, optimizer="SGD", device=device)
            (update,) = [task for task in plan.tasks if task.kind == "update"]
            assert (update.bytes, update.operators) == (3 * plan.resting.parameters, operators), (device, layers)


def test_momentum_given_by_a_function() -> None:
    plan = fsdp.plan(tower(), world_size=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert plan.resting.optimizer == 4 * 4 * 64 * 64 // 2


def test_padding_is_that_of_the_layout() -> None:
    """58 elements: 35 + 5 + 15 + 3, each on 16 bytes (the last one ends at 63), padded to a multiple of the ranks."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    for ranks, padded in ((2, 64), (3, 63), (5, 65), (64, 64), (100, 100)):
        plan = fsdp.plan(model, world_size=ranks)
        assert plan.numel == 58 and plan.padding_numel == padded - 58, ranks


def test_traffic_by_stage_in_elements() -> None:
    """Per step: 2P at stages 0 to 2 and 3P at 3; the all-reduce of stage 0 counts once here and is two passes."""
    numel, by_block = 4 * 64 * 64, fsdp.by_class(nn.Linear)
    for stage, kinds in (
        (0, {"all_reduce": numel}),
        (1, {"all_gather": numel, "reduce_scatter": numel}),
        (2, {"all_gather": numel, "reduce_scatter": numel}),
        (3, {"all_gather": 2 * numel, "reduce_scatter": numel}),
    ):
        plan = fsdp.plan(tower(), world_size=4, stage=stage, policy=by_block, precision="bf16")
        assert {kind: plan.traffic.numel(kind) for kind in plan.traffic.kinds if kind != "control"} == kinds
        wire = sum(count * {"all_gather": 2}.get(kind, 4) for kind, count in kinds.items())
        assert plan.traffic.bytes() == wire
        weights = {"all_gather": 2, "reduce_scatter": 4, "all_reduce": 8}
        passes = sum(count * weights[kind] for kind, count in kinds.items())
        assert plan.traffic.sent_bytes == pytest.approx(passes * 3 / 4 + 2 * 1024 * 3 / 4)


@pytest.mark.parametrize("no_sync, reductions", [(False, 3), (True, 1)])
def test_traffic_of_microbatches(no_sync: bool, reductions: int) -> None:
    numel = 4 * 64 * 64
    options = {"policy": fsdp.by_class(nn.Linear), "microbatches": 3, "no_sync": no_sync}
    plan = fsdp.plan(tower(), world_size=2, inputs=torch.ones(2, 64), **options)
    assert plan.traffic.numel("all_gather") == 3 * 2 * numel
    assert plan.traffic.numel("reduce_scatter") == reductions * numel
    assert plan.traffic.count("control") == reductions


def test_kept_units_are_gathered_once() -> None:
    plan = fsdp.plan(tower(), world_size=2, policy=fsdp.by_class(nn.Linear), reshard_after_forward=False)
    assert plan.traffic.numel("all_gather") == 4 * 64 * 64
    assert plan.full_peak_bytes == 4 * 4 * 64 * 64


def test_hybrid_mesh_shards_inside_and_reduces_between() -> None:
    numel = 4 * 64 * 64
    plan = fsdp.plan(tower(), mesh=(4, 8), policy=fsdp.by_class(nn.Linear))
    assert plan.resting.parameters == 4 * numel // 8
    assert {call.ranks for call in plan.traffic.calls if call.kind == "all_gather"} == {8}
    between = [call for call in plan.traffic.calls if call.kind == "all_reduce"]
    assert [call.numel for call in between] == [64 * 64 // 8] * 4 and {call.ranks for call in between} == {4}


def test_one_rank_sends_nothing() -> None:
    plan = fsdp.plan(tower(), world_size=1, policy=fsdp.by_class(nn.Linear))
    assert plan.traffic.calls == () and plan.traffic.sent_bytes == 0


def test_activations_and_recomputation() -> None:
    """Each of 8 layers keeps one tensor of 32 x 64 fp32: tanh's output, or what a recomputed layer starts from."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    by_layer = fsdp.by_name("?")
    options = {"world_size": 64, "policy": by_layer, "optimizer": None, "inputs": torch.ones(32, 64),
               "loss_of": lambda model, x: model(x).sum()}  # fmt: skip
    plain = fsdp.plan(model, **options).peaks["forward"].parts["activations"]
    recomputed = fsdp.plan(model, recompute=by_layer, **options).peaks["forward"].parts["activations"]
    row = 4 * 32 * 64
    # Two more while a layer runs: what its Linear returns, and the layer's own output.
    assert 8 * row <= plain <= 10 * row
    assert 7 * row <= recomputed <= 10 * row
    wide = fsdp.plan(lambda: GPT(8, 64, 256, 64, tied=True), world_size=2, policy=fsdp.by_class(Block),
                     inputs=torch.zeros(4, 64, dtype=torch.long))  # fmt: skip
    thin = wide.but(recompute=fsdp.by_class(Block))
    segments = wide.but(recompute="sqrt")
    assert thin.peak_bytes < wide.peak_bytes and segments.peak_bytes < wide.peak_bytes
    assert thin.traffic.numel() == segments.traffic.numel() == wide.traffic.numel()


LEAVES_NO_TRACE = """
import random, torch, rich.console
from torch import nn
import fsdplite as fsdp
before = random.getstate(), torch.get_rng_state()
def build():
    torch.rand(1, device="cpu"), random.random()
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout())
with torch.inference_mode():
    fsdp.plan(build, world_size=2, inputs=torch.ones(2, 8)).fits("1GiB")
assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
print("null")
"""


@pytest.mark.slow
def test_the_first_plan_of_a_process_leaves_no_trace_in_random_generators() -> None:
    run_python("-W", "ignore", "-c", LEAVES_NO_TRACE)


def test_the_model_is_left_alone_and_nothing_is_allocated() -> None:
    model = Tower(2, 8)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    fsdp.plan(model, world_size=2, policy=fsdp.by_class(nn.Linear), recompute=fsdp.by_class(nn.Linear),
              precision="bf16", inputs=torch.ones(2, 8))  # fmt: skip
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]) and p.grad is None
    assert type(model) is Tower and type(model.layers[0]) is nn.Linear
    huge = fsdp.plan(lambda: Tower(2, 100_000), world_size=8, inputs=torch.empty(4, 100_000, device="meta"))
    assert huge.numel == 2 * 10**10


def test_fp32_islands_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    plan = fsdp.plan(model, world_size=2, precision="bf16", inputs=torch.ones(4, 8), optimizer="SGD")
    kinds = {(flat.compute_dtype, flat.trainable) for flat in plan.units[0].flats}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)}
    trainable = [flat for flat in plan.units[0].flats if flat.trainable]
    assert plan.resting.gradients == sum(4 * flat.layout.shard_numel for flat in trainable)
    assert plan.resting.buffers == 8 * 4 + 8 * 4 + 8


def test_ignored_parameters_are_whole_and_averaged() -> None:
    model = tower(2)
    plan = fsdp.plan(model, world_size=4, ignored=[model.layers[1]], inputs=torch.ones(2, 64), optimizer="SGD")
    assert plan.resting.ignored == 4 * 64 * 64 and plan.numel == 64 * 64
    assert [call.numel for call in plan.traffic.calls if call.kind == "all_reduce"] == [64 * 64]


def test_offloaded_shards_and_state() -> None:
    """A device holds neither shards nor state; bf16 halves the way to it, and costs a mirror of two bytes."""
    numel, shard, by_block = 4 * 64 * 64, 4 * 64 * 64 // 2, fsdp.by_class(nn.Linear)
    base = {"world_size": 2, "policy": by_block, "precision": "bf16", "inputs": torch.ones(2, 64)}
    plain = fsdp.plan(tower(), **base)
    host = fsdp.plan(tower(), **base, offload=fsdp.Offload(params="cpu", optimizer="cpu"))
    counters = 4 * 4
    assert plain.resting.total == 16 * shard + counters and plain.resting.host == 0
    assert host.resting.total == 0 and host.resting.host == (4 + 4 + 8 + 2) * shard + counters
    assert host.to_device_bytes == 2 * 2 * shard and host.to_host_bytes == 4 * shard and host.disk_bytes == 0
    assert host.peak_bytes <= plain.peak_bytes - 12 * shard
    assert host.traffic.numel() == plain.traffic.numel() == 3 * numel
    files = fsdp.Offload(optimizer="nvme", path=".", buffers=3, buffer_bytes=4096)
    disk = fsdp.plan(tower(), **base, offload=files)
    assert disk.resting.disk == 8 * shard + counters and disk.disk_bytes == 2 * disk.resting.disk
    assert disk.resting.total == 8 * shard and disk.resting.host == 3 * 4096 * 2
    assert "offloaded to disk" in str(disk)
    both = fsdp.plan(tower(), **base, offload=fsdp.Offload("cpu", "nvme", ".", buffers=3, buffer_bytes=4096))
    assert both.resting.disk == (4 + 8) * shard + counters and both.disk_bytes == 2 * both.resting.disk
    assert both.resting.total == 0 and both.resting.host == (4 + 2) * shard + 3 * 4096 * 3  # gradients, mirrors, buffers
    with pytest.raises(ConfigError, match="stage 0"):
        fsdp.plan(tower(), **base | {"stage": 0}, offload=fsdp.Offload(params="cpu"))


def test_table_fits_in_eighty_columns_and_json_holds_everything() -> None:
    plan = fsdp.plan(lambda: GPT(12, 64, 256, 32, tied=True), world_size=16, policy=fsdp.by_class(Block),
                     inputs=torch.zeros(2, 32, dtype=torch.long))  # fmt: skip
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert "blocks.0 to 11, each" in text and "all-gather" in text and "together" in text
    assert text.startswith("planned for 16 ranks, stage 3, fp32, AdamW, on cuda\n")
    assert "in 13 units, planned for 16 ranks, stage 3, fp32, AdamW, on cuda. At most" in plan.to_html()
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["peak_bytes"] == plan.peak_bytes and len(values["units"]) == 13
    assert sum(values["peaks"]["backward"]["parts"].values()) == values["peaks"]["backward"]["bytes"]


def test_what_a_factory_may_return() -> None:
    def build() -> tuple:
        return Tower(2, 16), lambda step, rank, world_size: torch.ones(3, 16), lambda model, x: model(x).square().sum()

    plan = fsdp.plan(build, world_size=2)
    assert plan.has_activations and plan.input_bytes == 3 * 16 * 4


def reads_a_value() -> nn.Module:
    class Reader(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    return Reader(1, 8)


def test_errors_say_what_can_be_done() -> None:
    for error, needle, call in (
        (UnknownOptionError, "prefetch", lambda: fsdp.plan(tower(), world_size=2, prefech=1)),
        (ConfigError, "world_size", lambda: fsdp.plan(tower(), world_size=0)),
        (ConfigError, "disagree", lambda: fsdp.plan(tower(), world_size=3, mesh=(2, 2))),
        (ConfigError, "ZeRO", lambda: fsdp.plan(tower(), world_size=2, stage=4)),
        (ConfigError, "Muon", lambda: fsdp.plan(tower(), world_size=2, optimizer=torch.optim.Muon)),
        (ConfigError, "adamw", lambda: fsdp.plan(tower(), world_size=2, optimizer="adamm")),
        (PolicyError, "Linear", lambda: fsdp.plan(tower(), world_size=2, policy=fsdp.by_class("Linera"))),
        (ConfigError, "inputs", lambda: fsdp.plan(reads_a_value, world_size=2, inputs=torch.ones(1, 8))),
        (ConfigError, "inputs", lambda: fsdp.plan(tower(), world_size=2, inputs=torch.ones(1, 8))),
        (ConfigError, "rank", lambda: fsdp.plan(tower(), world_size=2, rank=2)),
        (ConfigError, "Offload", lambda: fsdp.plan(tower(), world_size=2, offload="cpu")),
    ):
        with pytest.raises(error, match=needle):
            call()
    wrapped = fsdp.fsdp_wrap(Tower(1, 4))
    with pytest.raises(ConfigError, match="before fsdp_wrap"):
        fsdp.plan(wrapped, world_size=2)
