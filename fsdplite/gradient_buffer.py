"""The unsharded gradient of one flat parameter, on its way to the shard.

Gradients are copied (first) or added (later) into one buffer as autograd completes them, the cast fused into the
copy; the buffer is reduced in one collective and freed. Sums are taken in fp32 (or the master's dtype, if wider),
whatever the wire carries, and the one division happens on the fp32 sum.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from . import events
from .collectives import Pending, all_reduce, reduce_scatter
from .gradient import PendingGrad, ShardedGrad, pending_error
from .local_slice import engine_access, read_grad, write_grad
from .streams import lane_for
from .watchdog import Waiting

if TYPE_CHECKING:
    from .flat_param import FlatParameter

__all__ = [
    "CHANGED", "DROPPED", "HAD", "KEPT", "LACKED", "UNCHANGED", "USED", "WAITING_FRACTION", "GradientBuffer",
    "GradientShard",
]  # fmt: skip

# What a rank tells the others about a parameter: it contributes a gradient; the backward found a reduced gradient there,
# or none; what an unsynchronised backward had left was still there, or was dropped; the shard has changed since the last
# comparison, or it has not.
USED, HAD, LACKED, KEPT, DROPPED, CHANGED, UNCHANGED = 1, 2, 4, 8, 16, 32, 64

WAITING_FRACTION = 8  # the buffer is allocated when more than 1/8 of it has arrived


class GradientShard:
    """The reduced gradient. Alive as long as one of the users' ``.grad`` views is: nobody else holds it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class GradientBuffer:
    """See the module docstring.

    Attributes:
        filled: Per parameter: whether the buffer holds a gradient of it.
        used: Per parameter: whether this rank contributed to what was reduced in this backward.
        is_pending: The last backward ran without synchronisation; the buffer waits for the next one.
    """

    def __init__(self, flat: FlatParameter) -> None:
        self._flat = weakref.ref(flat)
        layout = flat.layout
        self._dtype = torch.promote_types(flat.dtype, torch.float32)
        self.lane = lane_for(flat.device, "reduce")
        count = len(layout.slots)
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = torch.empty(layout.padded_numel, dtype=self._dtype, device=flat.device)
            self._storage = self._buffer.untyped_storage()
            self._views = [self._buffer[s.offset : s.stop].view(s.shape) for s in layout.slots]
            self._gaps = [self._buffer[start:stop] for start, stop in layout.gaps()]
            self._storage.resize_(0)
        self._numel = layout.padded_numel
        self._bytes = self._numel * self._dtype.itemsize
        self._allocated = False
        self.filled = bytearray(count)
        self.used = bytearray(count)
        self.is_pending = False
        self._is_taking = False  # this backward has brought gradients since the last reduction
        self._is_resumed = False  # this backward adds to what an unsynchronised one left
        self._compared_generation: int | None = None  # of the shard, at the last comparison with the other ranks
        self._generation = 0
        self._left = bytearray(count)  # per parameter: KEPT or DROPPED since the last, unsynchronised, backward
        self._waiting: dict[int, torch.Tensor] = {}  # gradients that are not in the buffer yet
        self._waiting_numel = 0
        self._reducing: tuple[Pending | None, torch.Tensor] | None = None
        self._result: torch.Tensor | None = None
        self._shard: Any = lambda: None
        self._chunks, self._chunk_of = _chunks(flat)

    # ------------------------------------------------------------------ filling

    @property
    def allocated_bytes(self) -> int:
        waiting = sum(gradient.numel() * gradient.element_size() for gradient in self._waiting.values())
        return waiting + (self._bytes if self._allocated else 0)

    @property
    def is_reducing(self) -> bool:
        return self._reducing is not None

    @property
    def has_unreduced(self) -> bool:
        return 1 in self.filled

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Take one complete local gradient (compute dtype, full shape). Owns it from here on.

        Allocating the buffer is put off while what has arrived is small beside it. The first gradients often are: a
        bias, or the last norm of a root whose large embedding gradient comes at the end of backward.
        """
        if not self._is_taking:
            self._start_taking()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.filled[index]:
            if not self._allocated:
                self._allocate()
            self._views[index].add_(gradient)
            return
        self.filled[index] = 1
        if not self._allocated:
            self._waiting_numel += gradient.numel()
            if self._waiting_numel * WAITING_FRACTION <= self._numel:
                self._waiting[index] = gradient
                return
            self._allocate()
        self._views[index].copy_(gradient)

    def _start_taking(self) -> None:
        """The first gradient since the last reduction, or since the last backward."""
        self.resume()
        if self._reducing is not None:  # at most one full gradient beside gloo's own copy
            self._flat().unit.schedule.finish_reductions()
        self._is_taking = True

    def _allocate(self) -> None:
        """Allocate the buffer, and copy into it what waits."""
        flat = self._flat()
        if flat.stage.shards_gradients and flat.device.type != "cuda":
            flat.unit.schedule.finish_reductions()  # with streams the one in flight overlaps the next
        self._storage.resize_(self._bytes)
        self._allocated = True
        for index, gradient in self._waiting.items():
            if self.filled[index]:
                self._views[index].copy_(gradient)
        self._waiting.clear()
        self._waiting_numel = 0

    def begin(self) -> None:
        """A backward begins: what has changed the shard so far, all ranks must have done."""
        self._generation = self._flat().generation

    def resume(self) -> None:
        """A backward begins to add to what an unsynchronised one left, unless ``zero_grad`` came in between."""
        if self.is_pending and not self._is_resumed:
            self._is_resumed = True
            self.drop_forgotten()
            for index, is_filled in enumerate(self.filled):
                if is_filled:
                    self._left[index] |= KEPT

    def drop_forgotten(self) -> None:
        """``zero_grad()`` after an unsynchronised backward set ``.grad`` to None: what was pending goes too."""
        with engine_access():
            for index, user in enumerate(self._flat().users):
                if self.filled[index] and read_grad(user) is None:
                    self._forget(index)
        if 1 not in self.filled:
            self.release()

    def refuse_pending(self) -> None:
        """Raise if a gradient waits for a synchronised backward (and ``zero_grad`` has not dropped it)."""
        if self.is_pending:
            self.drop_forgotten()
        if self.is_pending:
            raise pending_error(self._flat())

    def drop(self, index: int) -> None:
        """Drop the pending part of one parameter."""
        self._forget(index)
        user = self._flat().users[index]
        with engine_access():
            if type(read_grad(user)) is PendingGrad:
                write_grad(user, None)
        if 1 not in self.filled:
            self.release()

    def drop_all(self) -> None:
        """Drop what is pending of every parameter."""
        for index, is_filled in enumerate(self.filled):
            if is_filled:
                self._forget(index)
        self.release()

    def _forget(self, index: int) -> None:
        self.filled[index] = 0
        self._left[index] |= DROPPED

    def release(self) -> None:
        """Free the full-size buffer and forget what is in it."""
        if self._allocated:
            self.lane.compute_waits()
            self._storage.resize_(0)
            self._allocated = False
        self.filled = bytearray(len(self.filled))
        self._waiting.clear()
        self._waiting_numel = 0
        self._is_taking = self.is_pending = self._is_resumed = False

    # ------------------------------------------------------------------ reducing

    def start_reduce(self, waiting: Waiting) -> None:
        """Send the buffer.

        Collective: reduce-scatter of ``padded_numel`` elements over the shard group, then (in ``finish_reduce``)
        an all-reduce of the shard over the replicas; with a shard group of one only an all-reduce.
        """
        flat = self._flat()
        if not self._allocated:
            self._allocate()
        for gap in self._gaps:
            gap.zero_()
        for index, is_filled in enumerate(self.filled):
            if is_filled:
                self.used[index] = 1
            else:
                self._views[index].zero_()
        self.filled = bytearray(len(self.filled))
        self._is_taking = self.is_pending = self._is_resumed = False  # later gradients have to wait for the sum
        groups = flat.groups
        self.lane.wait_for_compute()
        pending = None
        with self.lane:
            wire = self._buffer if flat.wire_dtype == self._dtype else self._buffer.to(flat.wire_dtype)
            reduced = torch.empty(flat.layout.shard_numel, dtype=wire.dtype, device=flat.device)
            if groups.shard is not None:
                if events.active is not None:
                    events.active.emit(
                        "reduce_scatter", flat.unit_name, wire.numel() * wire.element_size(), wire.numel()
                    )
                pending = reduce_scatter(reduced, wire, groups, waiting)
            else:
                reduced.copy_(wire)
                if groups.replicate is not None:
                    pending = self._all_reduce(flat, reduced, waiting)
        self._reducing = (pending, reduced, wire, waiting)

    def _all_reduce(self, flat: FlatParameter, reduced: torch.Tensor, waiting: Waiting) -> Pending:
        if events.active is not None:
            events.active.emit(
                "all_reduce", flat.unit_name, reduced.numel() * reduced.element_size(), reduced.numel()
            )
        return all_reduce(reduced, flat.groups.replicate, flat.groups, waiting)

    def finish_reduce(self, divisor: float) -> None:
        """Wait for the sum, divide it, add it to what this backward or earlier ones reduced; free the buffer."""
        flat = self._flat()
        pending, reduced, _, waiting = self._reducing
        with self.lane:
            if pending is not None:
                pending.wait()
                if flat.groups.shard is not None and flat.groups.replicate is not None:
                    self._all_reduce(flat, reduced, waiting).wait()
            if reduced.dtype != self._dtype:
                reduced = reduced.to(self._dtype)
            if divisor != 1:
                reduced.div_(divisor)
            reduced = flat.resting.bring(reduced, self.lane)
            if self._result is not None:
                flat.resting.wait()
                self._result.add_(reduced)
            else:
                shard = self._live_shard(flat)
                if shard is None:
                    self._result = reduced
                else:
                    flat.resting.wait()
                    shard.tensor.add_(reduced)
        self._reducing = None
        if events.active is not None:
            count = reduced.numel() * reduced.element_size()
            if flat.resting.is_elsewhere:
                events.active.emit("to_host", flat.unit_name, count)
            events.active.emit("reduced", flat.unit_name, count)
        self.release()

    def _live_shard(self, flat: FlatParameter) -> GradientShard | None:
        """The shard of earlier backwards, if the users still hold it; parts they dropped are zeroed first."""
        shard = self._shard()
        if shard is None:
            return None
        dropped = []
        with engine_access():
            for index, user in enumerate(flat.users):
                gradient = read_grad(user)
                if gradient is None or type(gradient) is PendingGrad:
                    dropped.append(index)
                elif getattr(gradient, "_fsdp_shard", None) is not shard:
                    return None  # the user put a tensor of their own there: it is added to when gradients are bound
        if len(dropped) == len(flat.users):
            return None
        for index in dropped:
            start, stop = flat.layout.shard_slice(index, flat.groups.shard_rank)
            shard.tensor[start:stop].zero_()
        return shard

    # ------------------------------------------------------------------ binding

    def take_final(self) -> torch.Tensor | None:
        """Hand over the reduced gradient, for an update before the end of backward; ``.grad`` stays None then.

        None if it has to be bound as usual: another rank decides whether a parameter has a gradient, there is one of an
        earlier backward, or a hook waits for it. On its way still: see :meth:`wait`.
        """
        flat = self._flat()
        if self._result is None or 0 in self.used or flat.post_accumulate_hooks:
            return None
        with engine_access():
            if any(read_grad(user) is not None for user in flat.users):
                return None
        result, self._result = self._result, None
        self._shard = lambda: None  # of an earlier backward, if somebody keeps it
        return result

    def wait(self) -> None:
        """Until what was reduced is at its place of rest. Blocks the host."""
        self.lane.synchronize()
        self._flat().resting.wait()

    def flags(self) -> bytearray:
        """Per parameter, what the other ranks have to know of it. Nothing of earlier gradients where no element is here:
        a program may leave such slices out of its optimizer, and of ``zero_grad``."""
        flags = bytearray(self.used)
        known, self._compared_generation = self._compared_generation, self._generation
        changed = 0 if known is None else UNCHANGED if known == self._generation else CHANGED
        with engine_access():
            for index, user in enumerate(self._flat().users):
                gradient = read_grad(user)
                if self._chunk_of[index] >= 0:
                    flags[index] |= changed | (LACKED if gradient is None or type(gradient) is PendingGrad else HAD)
                flags[index] |= self._left[index]
        return flags

    def bind(self, used: bytes | bytearray) -> list[int]:
        """Give the users their gradients. ``used`` says which parameters any rank had a gradient for.

        Returns the indices whose ``.grad`` is final. What nobody used stays None.
        """
        flat = self._flat()
        bound = [index for index, flag in enumerate(used) if flag]
        self.used = bytearray(len(self.used))
        self._left = bytearray(len(self._left))
        result, self._result = self._result, None
        if result is not None:
            flat.resting.wait()
            if result.dtype != flat.dtype:
                result = result.to(flat.dtype)
            shard = GradientShard(result)
        else:
            shard = self._shard()
        if shard is None or not bound:
            return []
        views = self._views_of(flat, shard, bound)
        with engine_access():
            for index, view in zip(bound, views):
                user = flat.users[index]
                gradient = read_grad(user)
                if gradient is None or type(gradient) is PendingGrad:
                    write_grad(user, view)
                elif result is not None:
                    gradient.add_(view)
        self._shard = weakref.ref(shard)
        return bound

    def _views_of(self, flat: FlatParameter, shard: GradientShard, indices: list[int]) -> list[ShardedGrad]:
        with torch.no_grad():
            chunks = shard.tensor.split_with_sizes(self._chunks)
        views = []
        for index in indices:
            position = self._chunk_of[index]
            view = chunks[position] if position >= 0 else shard.tensor[:0]
            if type(view) is torch.Tensor:  # a fake one would not survive it
                view.__class__ = ShardedGrad
            view._fsdp_ref = self._flat
            view._fsdp_index = index
            view._fsdp_shard = shard
            views.append(view)
        return views

    def bound_parts(self) -> list[torch.Tensor]:
        """The gradients the users hold: the whole shard where it is theirs untouched, else each of them."""
        flat = self._flat()
        gradients = [g for user in flat.users if (g := read_grad(user)) is not None]
        shard = self._shard()
        if shard is not None and gradients and all(getattr(g, "_fsdp_shard", None) is shard for g in gradients):
            dropped = len(gradients) != len(flat.users)
            if not dropped:
                return [shard.tensor]
        return [g.as_subclass(torch.Tensor) for g in gradients]

    def bind_pending(self) -> None:
        """After an unsynchronised backward: ``.grad`` shows that something is there, and refuses to be used."""
        self.is_pending = True
        self._is_taking = self._is_resumed = False
        self._left = bytearray(len(self._left))
        flat = self._flat()
        with engine_access():
            for index, user in enumerate(flat.users):
                if self.filled[index] and read_grad(user) is None:
                    placeholder = torch.zeros((), dtype=user.dtype, device=user.device).expand(user.shape)
                    placeholder = placeholder.as_subclass(PendingGrad)
                    placeholder._fsdp_ref = self._flat
                    placeholder._fsdp_index = index
                    placeholder._fsdp_shard = None
                    write_grad(user, placeholder)

    def abandon(self) -> None:
        """A backward died: wait for what is in flight, forget what it brought."""
        if self._reducing is not None:
            pending = self._reducing[0]
            if pending is not None:
                pending.drain()
            self._reducing = None
        self._result = None
        self.used = bytearray(len(self.used))
        self._left = bytearray(len(self._left))
        self.release()


def _chunks(flat: FlatParameter) -> tuple[list[int], list[int]]:
    """Sizes that split a shard at the borders of the users' slices, and each user's place among them (-1: empty)."""
    sizes: list[int] = []
    place = []
    end = 0
    for index in range(len(flat.layout.slots)):
        start, stop = flat.layout.shard_slice(index, flat.groups.shard_rank)
        if start == stop:
            place.append(-1)
            continue
        if start > end:
            sizes.append(start - end)
        place.append(len(sizes))
        sizes.append(stop - start)
        end = stop
    if end < flat.layout.shard_numel:
        sizes.append(flat.layout.shard_numel - end)
    return sizes or [flat.layout.shard_numel], place
