"""The only caller of torch.distributed operations on parameters, gradients and control messages.

Every function returns a :class:`Pending`; ``wait()`` raises a :class:`~fsdplite.errors.CollectiveError` that names
the unit, the phase, the step and the missing ranks if the collective fails or does not finish in time.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

from .errors import CollectiveError
from .groups import Groups
from .patience import is_waiting, waits_no_more
from .watchdog import Waiting, diagnose, watch

__all__ = ["Pending", "all_gather", "all_reduce", "broadcast", "control_all_gather", "reduce_scatter"]

# torch 2.13 renamed these two and warns on every call of the old names. The name is looked up at each call, so
# that whoever wraps torch.distributed to count or to log sees the calls.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


_CARRIED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip


class Pending:
    """A collective under way."""

    __slots__ = ("_groups", "_waiting", "_work")

    def __init__(self, work: Any, groups: Groups, group: Any, waiting: Waiting, on_device: bool) -> None:
        self._work = work
        self._groups = groups
        self._waiting = waiting
        if on_device:
            watch(work, groups, group, waiting)

    def wait(self) -> None:
        """On CPU until it is done; on CUDA the current stream waits."""
        work, self._work = self._work, None
        if work is None:
            return
        is_waiting(self._groups, self._waiting)
        try:
            work.wait()
        except RuntimeError as failure:
            raise diagnose(self._groups, self._waiting, failure) from failure
        finally:
            waits_no_more()

    def drain(self) -> None:
        """Wait without a report, for clean-up after an error: the memory may be freed afterwards."""
        work, self._work = self._work, None
        if work is not None:
            with contextlib.suppress(RuntimeError):
                work.wait()


def _start(name: str, *tensors: Any, group: Any, groups: Groups, waiting: Waiting, **options: Any) -> Pending:
    """Call ``torch.distributed``'s function of this name. The last of ``tensors`` is one, and on their device."""
    if groups.pid != os.getpid():
        raise CollectiveError(
            f"a process forked from rank {groups.rank} takes part in no collective: {waiting}",
            unit=waiting.unit,
            rank=groups.rank,
            cure="call the model in the process of the rank only; a worker (of a DataLoader, say) that needs a model is "
            "given a plain one, filled from fsdp.full_state_dict(model)",
        )
    try:
        work = getattr(dist, name)(*tensors, group=group, async_op=True, **options)
    except RuntimeError as failure:
        if isinstance(failure, CollectiveError):
            raise
        raise diagnose(groups, waiting, failure) from failure
    return Pending(work, groups, group, waiting, on_device=tensors[-1].is_cuda)


def _as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype that every backend carries (fp8, 16-bit integers and bool have none of their own)."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


def all_gather(full: torch.Tensor, shard: torch.Tensor, groups: Groups, waiting: Waiting) -> Pending:
    """Gather equal shards into ``full``. ``shard`` may be this rank's own slot of ``full`` (in place)."""
    full, shard = _as_carried(full), _as_carried(shard)
    return _start(_ALL_GATHER, full, shard, group=groups.shard, groups=groups, waiting=waiting)


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, groups: Groups, waiting: Waiting) -> Pending:
    """Sum ``full`` over the shard group; this rank's slot of the sum goes to ``shard``."""
    return _start(
        _REDUCE_SCATTER, shard, full, op=dist.ReduceOp.SUM, group=groups.shard, groups=groups, waiting=waiting
    )


def all_reduce(
    tensor: torch.Tensor, group: Any, groups: Groups, waiting: Waiting, op: Any = dist.ReduceOp.SUM
) -> Pending:
    """Reduce ``tensor`` over ``group`` (one of ``groups``' own), in place."""
    return _start("all_reduce", tensor, op=op, group=group, groups=groups, waiting=waiting)


def broadcast(tensor: torch.Tensor, groups: Groups, waiting: Waiting) -> None:
    """Overwrite ``tensor`` with that of the mesh's first rank."""
    if groups.whole is None or tensor.numel() == 0:
        return
    tensor = _as_carried(tensor)
    _start("broadcast", tensor, src=groups.ranks[0], group=groups.whole, groups=groups, waiting=waiting).wait()


def control_all_gather(row: torch.Tensor, groups: Groups, waiting: Waiting) -> list[torch.Tensor]:
    """Every rank's row of bytes over the control group, in rank order of the mesh. Blocks the host."""
    rows = [torch.empty_like(row) for _ in groups.ranks]
    _start("all_gather", rows, row, group=groups.control, groups=groups, waiting=waiting).wait()
    return rows
