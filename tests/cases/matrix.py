"""The default matrix of the cases: not the full product, but every stage, every mesh, and pairs of the other axes."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WORLD_SIZES = (1, 2, 3, 4)
POLICIES = ("root", "block", "leaf")
PREFETCH = (0, 1, 2)
RESHARD = (None, True, False)
MESHES = {2: ((2, 1), (1, 2)), 4: ((2, 2),)}


@dataclass(frozen=True)
class Setup:
    """One point of the matrix."""

    stage: int = 3
    mesh: tuple[int, int] | None = None
    policy: str = "block"
    prefetch: int = 1
    reshard: bool | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `fsdp_wrap`, without the policy."""
        return {
            "stage": self.stage,
            "mesh": None if self.mesh is None else mesh_of(self.mesh),
            "prefetch": self.prefetch,
            "reshard_after_forward": self.reshard,
        }


# Every pair of values of two axes occurs: an orthogonal array of strength two.
PAIRS = tuple(
    Setup(policy=POLICIES[i], prefetch=PREFETCH[j], reshard=RESHARD[(i + j) % 3]) for i in range(3) for j in range(3)
)
# Every value of each axis occurs once in each, and every pair in one of them.
THIRDS = tuple(tuple(PAIRS[3 * i + (i + k) % 3] for i in range(3)) for k in range(3))


def layouts(world_size: int, *, every_stage: bool = False) -> list[Setup]:
    """Stage 3 and the meshes that fit the world size; the other stages at 1 and 2 ranks, or where the case says so."""
    stages = (0, 1, 2, 3) if world_size <= 2 or every_stage else (3,)
    flat = [Setup(stage=stage) for stage in stages]
    return flat + [Setup(mesh=mesh) for mesh in MESHES.get(world_size, ())]


def matrix(world_size: int, *, every_stage: bool = False) -> list[Setup]:
    """The default matrix: `layouts`, and the other axes at stage 3, in pairs at one rank.

    More ranks share two cores in the project's checks, so there each value of an axis occurs once in a test. Which
    values meet depends on the test's name: over the cases every pair occurs.
    """
    test = sys._getframe(1).f_code.co_name
    others = PAIRS if world_size == 1 else THIRDS[zlib.crc32(test.encode()) % 3]
    return [*(setup for setup in layouts(world_size, every_stage=every_stage) if setup != Setup()), *others]


_meshes: dict[tuple[int, int], Any] = {}


def mesh_of(shape: tuple[int, int]) -> Any:
    """The (dp_replicate, dp_shard) mesh of this shape; a rank makes each once."""
    if shape not in _meshes:
        assert dist.is_initialized()
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return _meshes[shape]


def wrap(model: nn.Module, setup: Setup, policies: dict[str, Any], **more: Any) -> nn.Module:
    """`fsdp_wrap` at one point of the matrix; `policies` maps "block" and "leaf" to policies (root only is None)."""
    import fsdplite as fsdp

    return fsdp.fsdp_wrap(model, policies.get(setup.policy), **{**setup.options(), **more})
