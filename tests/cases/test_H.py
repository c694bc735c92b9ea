"""H. Groups, meshes, backends: what is averaged, over whom, and that the mesh changes nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdplite as fsdp
from tests.cases.matrix import mesh_of
from tests.harness import (
    Stack,
    Vec,
    adamw,
    all_gather_objects,
    assert_all,
    assert_close,
    assert_parity,
    assert_rested,
    for_each,
    gather,
    gather_grads,
    here,
    plain,
    run,
    seeded,
    sgd,
    stack_batch,
    train_rank,
    train_ref,
)


def mean_gradient(n: int, stage: int, dtype: torch.dtype) -> None:
    model = fsdp.fsdp_wrap(Vec(n, 1.0, dtype), stage=stage)
    model(2 * here.rank + 1).backward()
    assert_all(gather_grads(model), here.world_size)
    assert_rested(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_H1_the_mean_over_ranks_on_every_backend(world_size: int) -> None:
    combinations = [(1, stage, torch.float64) for stage in range(4)]
    combinations += [(5, stage, torch.float32) for stage in range(4)]
    run(world_size, for_each, combinations, mean_gradient)


def one_step(mesh: DeviceMesh | dist.ProcessGroup | None, n: int, stage: int) -> None:
    world_size = here.world_size
    model = fsdp.fsdp_wrap(Vec(n, 1.0), mesh=mesh, stage=stage)
    optimizer = sgd(model)
    model(2 * here.rank + 1).backward()
    # Read on each rank for itself: a replica that averaged over less than everybody shows here.
    assert_all({"mean": fsdp.full_grad(model, "w")}, world_size)
    assert_all(gather_grads(model), world_size)
    optimizer.step()
    assert_all(gather(model), 1 - 0.1 * world_size, tolerance=1e-12)
    assert_rested(model)


def meshes_of_size_one(shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        mesh = mesh_of(shape) if len(shape) == 2 else init_device_mesh("cpu", shape)
        for_each([(mesh, n, stage) for n in (1, 3) for stage in (3, 0, 1, 2)], one_step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [[(1, 1), (1,)], [(2, 1), (1, 2), (2,)], [(3, 1), (1, 3)], [(2, 2), (4, 1), (1, 4)]],
    ids=["W1", "W2", "W3", "W4"],
)
def test_H2_meshes_with_a_dimension_of_size_one(shapes: list[tuple[int, ...]]) -> None:
    world_size = shapes[0][0] * shapes[0][-1] if len(shapes[0]) == 2 else shapes[0][0]
    run(world_size, meshes_of_size_one, shapes)


def a_process_group() -> None:
    one_step(dist.new_group(list(range(here.world_size))), 3, 3)
    one_step(dist.group.WORLD, 1, 3)


def test_H2_a_process_group_is_a_flat_mesh() -> None:
    run(2, a_process_group)


def disjoint_groups() -> None:
    """Two models in halves of the world: each averages over its own half only."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = here.rank // 2
    model = fsdp.fsdp_wrap(Vec(3, 1.0), mesh=halves[half])
    model(2 * here.rank + 1).backward()
    assert_all({"half": fsdp.full_grad(model, "w")}, 4 * half + 2)
    assert_rested(model)


def test_H2_a_group_smaller_than_the_world() -> None:
    run(4, disjoint_groups)


def a_mesh_trains(stage: int) -> None:
    world_size = here.world_size
    reference = seeded(Stack, 2)
    train_ref(reference, adamw(reference), range(5), stack_batch, world_size)
    shapes = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1), (1, 4)]}[world_size]
    results = []
    for shape in [*shapes, None]:
        mesh = None if shape is None else mesh_of(shape)
        model = fsdp.fsdp_wrap(seeded(Stack, 2), fsdp.by_class("Block"), mesh=mesh, stage=stage)
        train_rank(model, adamw(model), range(5), stack_batch, here.rank)
        assert_parity(model, reference)  # and replicas hold equal bits
        assert_rested(model)
        results.append(gather(model))
        if shape is not None and stage == 3:
            assert_replicas_are_equal(model, shape)
    for other in results[1:]:
        for name, value in results[0].items():
            assert_close(other[name], value, what=name)


def assert_replicas_are_equal(model: torch.nn.Module, shape: tuple[int, ...]) -> None:
    """Ranks with the same place in their shard group hold the same slices, bit for bit."""
    slices = all_gather_objects([plain(p) for p in model.parameters()])
    for rank, found in enumerate(slices):
        for a, b in zip(found, slices[rank % shape[1]], strict=True):
            assert torch.equal(a, b), (shape, rank)


@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_H4_a_two_dimensional_mesh_trains_as_a_flat_one(stage: int) -> None:
    run(4, a_mesh_trains, stage)


def test_H4_two_ranks() -> None:
    run(2, a_mesh_trains, 3)
