"""Timelines against hand arithmetic."""

from __future__ import annotations

import json

import pytest
import torch

import fsdplite as fsdp
from fsdplite.errors import ConfigError
from tests.planning.test_plan import tower

WIDTH, LAYERS, ROWS = 64, 4, 512
UNIT = 4 * WIDTH * WIDTH  # bytes of a layer in fp32
FORWARD = 2 * ROWS * WIDTH * WIDTH  # flops of a layer


def plan_of(**options: object) -> object:
    base = {"world_size": 8, "policy": fsdp.by_class("Linear"), "optimizer": None, "inputs": torch.ones(ROWS, WIDTH),
            "loss_of": lambda model, x: model(x).sum()}  # fmt: skip
    return fsdp.plan(tower(LAYERS, WIDTH), **base | options)


def only(**rates: object) -> fsdp.Topology:
    """Everything is free but what is given."""
    free = {"flops": 1e30, "memory_bandwidth": 1e30, "operator_s": 0.0, "intra": fsdp.Link(1e30, 0.0),
            "inter": fsdp.Link(1e30, 0.0), "launch_s": 0.0, "control_s": 0.0, "host_bandwidth": 1e30,
            "host_memory_bandwidth": 1e30, "disk_bandwidth": 1e30}  # fmt: skip
    return fsdp.Topology(**free | rates)


def test_computation_alone() -> None:
    """Forward 2, backward 4 flops a weight and row, less the input's gradient of the first layer."""
    timeline = fsdp.simulate(plan_of(), only(flops=1e9))
    flops = LAYERS * FORWARD * 3 - FORWARD
    assert timeline.step_s == pytest.approx(flops / 1e9, rel=1e-6)
    assert timeline.compute_s == pytest.approx(timeline.step_s) and timeline.exposed_s < 1e-12


def test_communication_alone() -> None:
    """Eight ranks of a node: 7/8 of every unit, gathered twice and reduced once, one after the other."""
    timeline = fsdp.simulate(plan_of(), only(intra=fsdp.Link(1e6, 0.0)))
    assert timeline.step_s == pytest.approx(LAYERS * 3 * UNIT * 7 / 8 / 1e6, rel=1e-6)
    assert timeline.exposed_s == pytest.approx(timeline.step_s) == pytest.approx(timeline.communication_s)


def test_communication_behind_computation_is_hidden() -> None:
    """With computation twice as long as gathers only the first gather shows in forward; without prefetch all do."""
    gather_s = UNIT * 7 / 8 / 1e6
    rates = only(intra=fsdp.Link(1e6, 0.0), flops=FORWARD / (2 * gather_s))

    def exposed_in_forward(prefetch: int) -> float:
        spans = fsdp.simulate(plan_of(prefetch=prefetch), rates).spans
        return sum(s.duration_s for s in spans if s.kind == "wait" and s.phase == "forward")

    assert exposed_in_forward(1) == pytest.approx(gather_s)
    assert exposed_in_forward(0) == pytest.approx(LAYERS * gather_s)


def test_no_overlap_is_the_sum() -> None:
    links = {"intra": fsdp.Link(1e6, 0.0), "flops": 1e9}
    alone = sum(fsdp.simulate(plan_of(), only(**{name: rate})).step_s for name, rate in links.items())
    assert fsdp.simulate(plan_of(), only(**links, overlaps=False)).step_s == pytest.approx(alone, rel=1e-6)
    assert fsdp.simulate(plan_of(), only(**links)).step_s < alone


def test_links_between_nodes() -> None:
    """Sixteen ranks of two nodes: half of every byte comes in through eight cards, and latency counts hops."""
    wide = only(inter=fsdp.Link(1e6, 0.0))
    assert wide.collective_s("all_gather", UNIT, 16) == pytest.approx(UNIT / 2 / 8e6)
    assert wide.collective_s("all_reduce", UNIT, 16) == pytest.approx(2 * UNIT / 2 / 8e6)
    assert wide.collective_s("all_gather", UNIT, 8) < 1e-20
    slow = only(intra=fsdp.Link(1e30, 1.0), inter=fsdp.Link(1e30, 100.0))
    assert slow.collective_s("all_gather", UNIT, 8) == 7
    assert slow.collective_s("all_gather", UNIT, 32) == 7 + 300
    assert slow.collective_s("all_gather", UNIT, 8 * 1024) == 7 + 2 * 10 * 100  # a tree is shorter than a ring
    # Replicas at a distance of a whole node meet through one card each.
    assert wide.collective_s("all_reduce", UNIT, 4, stride=8) == pytest.approx(2 * UNIT * 3 / 4 / 1e6)


def test_groups_that_nodes_do_not_hold_evenly() -> None:
    """The node with the fewest ranks gets all the rest through as few cards; of several groups the worst counts."""
    wide = only(inter=fsdp.Link(1e6, 0.0))
    assert wide.collective_s("all_gather", UNIT, 9) == pytest.approx(UNIT * 8 / 9 / 1e6)
    assert wide.collective_s("all_gather", UNIT, 12) == pytest.approx(UNIT * 8 / 12 / 4e6)
    # Two groups of six on nodes of eight: the second has two ranks on one node and four on the next.
    assert wide.collective_s("all_gather", UNIT, 6, groups=1) < 1e-20
    assert wide.collective_s("all_gather", UNIT, 6, groups=2) == pytest.approx(UNIT * 4 / 6 / 2e6)
    # Three replicas of four: 0, 4, 8 lie on two nodes, the third is alone.
    assert wide.collective_s("all_reduce", UNIT, 3, stride=4, groups=4) == pytest.approx(2 * UNIT * 2 / 3 / 1e6)


def test_averages_over_all_ranks_are_no_exchange_of_replicas() -> None:
    """An ignored parameter of one node's ranks stays within the node."""
    model = tower(2, WIDTH)
    plan = fsdp.plan(model, world_size=8, ignored=[model.layers[1]], optimizer=None, inputs=torch.ones(ROWS, WIDTH))
    timeline = fsdp.simulate(plan, only(intra=fsdp.Link(1e6, 0.0), inter=fsdp.Link(1.0, 0.0)))
    (average,) = [span for span in timeline.spans if span.kind == "all_reduce"]
    assert average.lane == "shard group" and average.duration_s == pytest.approx(2 * UNIT * 7 / 8 / 1e6)


def test_offloaded_shards_come_and_go_over_the_host_link() -> None:
    """A rank's eighth of every layer comes twice, and its gradient goes once; gathers cost nothing here."""
    for ranks in (8, 1):
        plan = plan_of(world_size=ranks, offload=fsdp.Offload(params="cpu"))
        one_by_one = fsdp.simulate(plan, only(host_bandwidth=1e6, overlaps=False))
        assert one_by_one.step_s == pytest.approx(LAYERS * 3 * UNIT / ranks / 1e6, rel=1e-6)
        assert one_by_one.exposed_s == pytest.approx(one_by_one.communication_s)
        both_ways = fsdp.simulate(plan, only(host_bandwidth=1e6)).step_s  # gradients leave beside what comes
        assert LAYERS * 2 * UNIT / ranks / 1e6 < both_ways < one_by_one.step_s


def test_updates_on_the_host_and_from_files() -> None:
    """SGD reads two numbers an element and writes one; weights and gradients go there and weights come back."""
    shard = LAYERS * UNIT // 8
    plan = plan_of(optimizer="SGD", offload=fsdp.Offload(optimizer="cpu"))
    assert (plan.to_host_bytes, plan.to_device_bytes) == (2 * shard, shard)
    assert fsdp.simulate(plan, only(host_bandwidth=1e6)).step_s == pytest.approx(3 * shard / 1e6)
    assert fsdp.simulate(plan, only(host_memory_bandwidth=1e6)).step_s == pytest.approx(3 * shard / 1e6)
    files = fsdp.Offload(optimizer="nvme", path=".")
    plan = plan_of(optimizer="Adam", offload=files)
    read_and_written = 2 * (2 * shard + LAYERS * 4)  # two moments, and a step counter each
    assert fsdp.simulate(plan, only(disk_bandwidth=1e6)).step_s == pytest.approx(read_and_written / 1e6)
    here = plan_of(optimizer="Adam", offload=files, device="cpu")
    assert fsdp.simulate(here, only(disk_bandwidth=1e6)).step_s == pytest.approx(read_and_written / 1e6)


def test_hybrid_meshes_keep_gathers_inside_the_node() -> None:
    rates = only(inter=fsdp.Link(1e6, 0.0))
    flat = fsdp.simulate(plan_of(world_size=32), rates).step_s
    hybrid = fsdp.simulate(plan_of(world_size=None, mesh=(4, 8)), rates).step_s
    assert flat == pytest.approx(LAYERS * 3 * UNIT * 3 / 4 / 8e6, rel=1e-6)
    assert hybrid == pytest.approx(LAYERS * 2 * (UNIT / 8) * 3 / 4 / 1e6, rel=1e-6)


def test_the_slowest_rank_sets_the_pace() -> None:
    base = fsdp.simulate(plan_of(), only(flops=1e9)).step_s
    assert fsdp.simulate(plan_of(), only(flops=1e9, straggler=0.25)).step_s == pytest.approx(1.25 * base)
    small, large = (fsdp.simulate(plan_of(world_size=n), only(flops=1e9, jitter=0.02)).step_s for n in (2, 1024))
    assert base < small < large < 1.1 * base


def test_calibration_meets_what_was_measured() -> None:
    plan = plan_of(optimizer="AdamW")
    found = fsdp.Topology(operator_s=1e-5).calibrated(plan, compute_s=0.5, update_s=0.01)
    timeline = fsdp.simulate(plan, found)
    assert sum(s.duration_s for s in timeline.spans if s.kind == "compute") == pytest.approx(0.5, rel=1e-3)
    (update,) = [task for task in plan.tasks if task.kind == "update"]
    assert update.bytes / found.memory_bandwidth == pytest.approx(0.01)


def test_sixteen_thousand_ranks_and_text_and_json() -> None:
    plan = plan_of(world_size=16_384)
    timeline = fsdp.simulate(plan)
    assert max(map(len, str(timeline).splitlines())) <= 80 and "16384 ranks" in str(timeline)
    values = json.loads(json.dumps(timeline.to_dict()))
    assert values["step_s"] == timeline.step_s > 0 and values["peak_bytes"] == plan.peak_bytes
    for lane in {span.lane for span in timeline.spans}:  # nothing on a lane overlaps
        spans = [span for span in timeline.spans if span.lane == lane]
        assert all(a.stop_s <= b.start_s + 1e-12 for a, b in zip(spans, spans[1:]))


def test_topologies_that_cannot_be() -> None:
    nan = float("nan")
    for wrong in ({"flops": 0}, {"ranks_per_node": 0}, {"jitter": -1.0}, {"ranks_per_node": 2.5}, {"flops": "4e14"},
                  {"intra": 5e10}, {"overlaps": 1}, {"straggler": nan}):  # fmt: skip
        with pytest.raises(ConfigError):
            fsdp.Topology(**wrong)
    for bandwidth, latency in ((0, 1e-6), (nan, 0.0), ("50GB", 0.0), (1e9, -1.0)):
        with pytest.raises(ConfigError):
            fsdp.Link(bandwidth, latency)
    with pytest.raises(ConfigError, match="Topology"):
        fsdp.simulate(plan_of(), 8)
