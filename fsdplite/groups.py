"""Which ranks share what: the process groups behind one unit.

A unit is sharded over ``shard`` ranks and replicated over ``replicate`` ranks; a flat mesh has one replica. Stage 0
is nothing but a mesh whose shard dimension is one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import CollectiveError, ConfigError
from .keywords import known_keywords
from .liveness import register
from .stage import Stage

__all__ = ["Groups", "forgotten_group", "init_distributed", "next_number", "resolve_groups"]

_DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(eq=False)
class Groups:
    """Process groups of one unit. Fields are None where the group has one rank: nothing is sent then.

    Attributes:
        rank: This rank in the default process group (what messages call "rank").
        ranks: Global ranks of the whole mesh.
        shard, shard_rank, shard_size: Ranks that hold the slices of one replica.
        replicate, replicate_size: Ranks that hold the same slice.
        whole: All ranks of the mesh (initial broadcast).
        control: A gloo group over the same ranks as ``whole`` for messages of a few bytes between hosts, so that
            the order check never queues behind, or is taken for, a parameter collective.
        timeout: How long a collective of these groups may take.
        pid: The process that made them. One forked from it has the same sockets, and would speak into its conversations.
    """

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    shard: Any = None
    shard_rank: int = 0
    shard_size: int = 1
    replicate: Any = None
    replicate_size: int = 1
    whole: Any = None
    control: Any = None
    timeout: timedelta = _DEFAULT_TIMEOUT
    pid: int = field(default_factory=os.getpid)

    @property
    def size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.shard_size * self.replicate_size

    def __deepcopy__(self, memo: dict) -> Groups:
        return self  # process groups are shared by copies of a model


@known_keywords
def init_distributed(backend: str | None = None, timeout: float | timedelta | None = None) -> torch.device:
    """Join the process group that torchrun's environment variables describe, and return this rank's device.

    Without those variables (plain ``python``) nothing is initialised: world size is 1 and needs no group. Calling
    it again, or after ``torch.distributed.init_process_group``, only returns the device.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or None: NCCL beside gloo where CUDA is there, else gloo.
        timeout: Seconds (or a timedelta) that a collective may take before it becomes an error. Default 10 minutes.

    Returns:
        ``cuda:LOCAL_RANK`` where CUDA is used, else ``cpu``.

    Collective: initialises the default process group; every rank must call it.
    """
    if timeout is None:
        timeout = _DEFAULT_TIMEOUT
    elif not isinstance(timeout, timedelta):
        if not timeout > 0:
            raise ConfigError("timeout must be positive", expected="seconds or a timedelta", found=repr(timeout))
        timeout = timedelta(seconds=float(timeout))
    use_cuda = torch.cuda.is_available() and (backend is None or "nccl" in backend)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return device
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    store = _store_of_this_attempt(timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    return device


def _store_of_this_attempt(timeout: timedelta) -> dist.Store | None:
    """torchrun's store, in a corner of its own for each restart; None if nobody but the ranks holds one.

    The agent keeps one store over restarts (``--max-restarts``), and gloo would look for the new ranks at the addresses
    that the dead ones left there.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port, world_size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    store = dist.TCPStore(host, int(port), int(world_size), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"fsdplite/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def forgotten_group() -> ConfigError | None:
    """The error of a rank that torchrun has started beside others, and that has joined no process group; else None."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and world_size.isdecimal() and int(world_size) > 1):
        return None
    if dist.is_available() and dist.is_initialized():
        return None
    return ConfigError(
        f"no process group is initialised, and this is one of {world_size} ranks that a launcher has started: each "
        "would train a model of its own, and they would save over each other",
        expected="a process group of all ranks",
        found=f"RANK={rank} and WORLD_SIZE={world_size} in the environment, and no group",
        rank=int(rank),
        cure="call `device = fsdp.init_distributed()` on every rank before; for a world of one rank start with plain "
        "python, or remove RANK and WORLD_SIZE from the environment",
    )


def resolve_groups(mesh: Any, stage: Stage) -> Groups:
    """Groups for a mesh argument: None, a ProcessGroup, or a 1-D or 2-D DeviceMesh.

    Raises:
        ConfigError: The mesh cannot be used, or None was given and the ranks of a launcher have joined no group.

    Collective: creates the control group at its first use for a set of ranks; every rank of the mesh must call it.
    """
    if mesh is None:
        if (forgotten := forgotten_group()) is not None:
            raise forgotten
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return Groups(rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
        mesh = dist.group.WORLD
    if isinstance(mesh, dist.ProcessGroup):
        shard, replicate = mesh, None
        ranks = tuple(dist.get_process_group_ranks(mesh))
        whole = mesh
    elif hasattr(mesh, "get_group") and hasattr(mesh, "ndim"):
        if mesh.ndim == 1:
            shard, replicate = mesh.get_group(), None
        elif mesh.ndim == 2:
            replicate, shard = mesh.get_group(0), mesh.get_group(1)
        else:
            raise ConfigError(
                "a mesh has one dimension (shard) or two (replicate, shard)", found=f"{mesh.ndim} dimensions"
            )
        ranks = tuple(sorted(int(r) for r in mesh.mesh.flatten().tolist()))
        whole = shard if replicate is None else _group_over(ranks)
    else:
        raise ConfigError(
            "mesh is not something to shard over",
            expected="a 1-D or 2-D DeviceMesh, a ProcessGroup, or None for the default group",
            found=type(mesh).__name__,
        )
    rank = dist.get_rank()
    if rank not in ranks:
        raise ConfigError("this rank is not part of the mesh", expected=f"one of ranks {list(ranks)}", rank=rank)
    if not stage.shards_optimizer:  # stage 0: one shard, every rank a replica
        shard, replicate = None, whole
    shard, shard_size = _unless_alone(shard)
    replicate, replicate_size = _unless_alone(replicate)
    timeout = _timeout_of(whole)
    return Groups(
        rank=rank,
        ranks=ranks,
        shard=shard,
        shard_rank=dist.get_rank(shard) if shard is not None else 0,
        shard_size=shard_size,
        replicate=replicate,
        replicate_size=replicate_size,
        whole=whole if len(ranks) > 1 else None,
        control=_control_group(ranks, timeout) if len(ranks) > 1 else None,
        timeout=timeout,
    )


def _unless_alone(group: Any) -> tuple[Any, int]:
    size = 1 if group is None else dist.get_world_size(group)
    return (group, size) if size > 1 else (None, 1)


_numbers: dict[tuple[int, ...], int] = {}


def next_number(groups: Groups) -> int:
    """A number for a new model, the same on every rank: wrapping and copying are done by all ranks of a mesh alike.

    It is part of what ranks compare, so that two models of equal structure are not taken for each other.
    """
    _numbers[groups.ranks] = number = _numbers.get(groups.ranks, 0) + 1
    return number


# Groups made here, by their ranks; they belong to the default group that was there when they were made.
_made: dict[tuple[str, tuple[int, ...]], tuple[Any, Any]] = {}


def _make_once(kind: str, ranks: tuple[int, ...], make: Any) -> Any:
    world = dist.group.WORLD
    owner, group = _made.get((kind, ranks), (None, None))
    if owner is not world:
        group = make()
        _made[(kind, ranks)] = (world, group)
    return group


def _group_over(ranks: tuple[int, ...]) -> Any:
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return _make_once("whole", ranks, lambda: dist.new_group(list(ranks), use_local_synchronization=True))


def _control_group(ranks: tuple[int, ...], timeout: timedelta) -> Any:
    def make() -> Any:
        if dist.get_backend() == "fake":  # a fake world has nobody to talk to
            return dist.new_group(list(ranks), backend="fake", timeout=timeout)
        everyone = len(ranks) == dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        scope = "-".join(map(str, ranks)) if len(ranks) <= 8 else f"{min(ranks)}x{len(ranks)}"
        register(store, dist.get_rank())
        store.set(f"fsdplite/joins/{scope}/{dist.get_rank()}", "")
        try:
            return dist.new_group(
                None if everyone else list(ranks),
                backend="gloo",
                timeout=timeout,
                use_local_synchronization=not everyone,
            )
        except RuntimeError as failure:
            missing = [rank for rank in ranks if not store.check([f"fsdplite/joins/{scope}/{rank}"])]
            raise CollectiveError(
                f"not every rank of the mesh came to its first fsdp_wrap within {timeout.total_seconds():g} s",
                found=f"missing: ranks {missing}" if missing else "all ranks came, and could not connect",
                rank=dist.get_rank(),
                cure=f"call fsdp_wrap on every rank; look at the missing ranks' output first. Cause here: {failure}",
            ) from failure

    return _make_once("control", ranks, make)


def _timeout_of(group: Any) -> timedelta:
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue  # this group has no backend for that device, or it keeps its timeout elsewhere
    return _DEFAULT_TIMEOUT
