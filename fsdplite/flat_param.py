"""One flat parameter: the resting shard, the full buffer, and what modules see of them.

The shard (the master) owns the storage the optimizer updates: each user parameter is a view of it. The full buffer
is one storage per flat parameter, created once and resized to nothing while resharded. Autograd keeps views into it
and the storage object stays, so a gather in backward refills what autograd saved. The engine writes into it through
``.data`` handles, whose version counters are their own, or autograd would report an in-place change.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import events
from .binding import Binding, Replaced
from .collectives import Pending, all_gather
from .errors import ParameterUseError
from .flat_spec import FlatSpec
from .gradient import PendingGrad, ShardedGrad
from .gradient_part import GradientPart
from .gradient_buffer import GradientBuffer
from .gradient_hooks import PostAccumulateHooks, leaf_hook
from .groups import Groups
from .offload.resting import OnDevice
from .local_slice import ParameterInfo, engine_access, read_grad, write_grad
from .masters import Masters
from .parameter import ShardedParameter
from .stage import Stage
from .streams import lane_for
from .watchdog import Waiting

if TYPE_CHECKING:
    from .unit import UnitState

__all__ = ["FlatParameter", "owner_of"]

# Which flat parameter a full buffer's storage belongs to: answers "is this tensor a gathered weight?".
# Weak: asking must not keep a model alive.
OWNERS: dict[int, weakref.ref[FlatParameter]] = {}


def owner_of(tensor: torch.Tensor) -> FlatParameter | None:
    """The flat parameter whose full buffer a tensor lies in."""
    try:
        ref = OWNERS.get(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return None
    return ref() if ref is not None else None


class FlatParameter:
    """See the module docstring. Created by ``wrap``; afterwards only its unit and the schedule touch it."""

    def __init__(
        self, spec: FlatSpec, *, groups: Groups, stage: Stage, device: torch.device, unit_name: str, resting: OnDevice
    ) -> None:
        self.groups = groups
        self.stage = stage
        self.device = device
        self.unit_name = unit_name
        self.dtype = spec.dtype
        self.compute_dtype = spec.compute_dtype
        self.wire_dtype = spec.wire_dtype
        self.trainable = spec.trainable
        self.all_names = list(spec.names)
        self.users: list[nn.Parameter] = list(spec.parameters)
        self.layout = spec.layout(groups.shard_size)
        self.resting = resting
        self.masters = self.new_masters()
        self.unit: UnitState | None = None
        self.gather_lane = lane_for(device, "gather")
        self.generation = 0  # how often the shard has been changed
        self.gathered_generation = -1  # the generation that the full buffer holds
        self.unfilled: set[int] = set(range(len(self.users)))  # nobody has given these values yet
        self.was_lost = False  # with the file that held the masters
        self._pending: Pending | None = None
        self._is_arriving = False
        self.post_accumulate_hooks = PostAccumulateHooks()
        self.binding = Binding(spec.locations)
        self._create_full()
        self.gradient = GradientBuffer(self) if self.trainable else None

    # ------------------------------------------------------------------ full buffer and its views

    @property
    def names(self) -> list[str]:
        """Canonical dotted names."""
        return [names[0] for names in self.all_names]

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def padded_numel(self) -> int:
        return self.layout.padded_numel

    @property
    def shard_numel(self) -> int:
        return self.layout.shard_numel

    @property
    def requires_grad(self) -> bool:
        return self.trainable

    @property
    def aliases_shard(self) -> bool:
        """Replicated and not cast: the full buffer is the shard itself and never moves."""
        return not self.stage.shards_optimizer and self.dtype == self.compute_dtype

    @property
    def rests_full(self) -> bool:
        """Stages 1 and 2: the gathered parameters stay, until the shard changes."""
        return self.aliases_shard or (self.stage.shards_optimizer and not self.stage.shards_parameters)

    @property
    def full_bytes(self) -> int:
        return self.layout.padded_numel * self.compute_dtype.itemsize

    @torch.inference_mode(False)
    @torch.no_grad()
    def _create_full(self) -> None:
        if self.aliases_shard:
            full = self.masters.vector.data  # updates of the shard are no writes in forward: a version counter of its own
        else:
            full = torch.empty(self.layout.padded_numel, dtype=self.compute_dtype, device=self.device)
        self._storage = full.untyped_storage()
        self._full = full.data  # a handle with a version counter of its own
        start, stop = self.layout.shard_range(self.groups.shard_rank)
        self._own_slot = self._full[start:stop]
        self.leaves = [
            nn.Parameter(full[slot.offset : slot.stop].view(slot.shape), requires_grad=self.trainable)
            for slot in self.layout.slots
        ]
        self.is_unsharded = self.aliases_shard
        if not self.aliases_shard:
            self._storage.resize_(0)
        self._owner_key = self._storage._cdata
        OWNERS[self._owner_key] = weakref.ref(self)
        self.arrived_in = [-1] * len(self.leaves)  # per leaf: the backward that brought its gradient last
        self._version = self.leaves[0]._version if self.leaves else 0
        if self.trainable:
            ref = weakref.ref(self)
            for index, leaf in enumerate(self.leaves):
                leaf.register_post_accumulate_grad_hook(leaf_hook(ref, index))
        for index, leaf in enumerate(self.leaves):
            leaf._fsdp_info = ParameterInfo(self, index)
        self.binding.connect(self.users, self.leaves)

    def __del__(self) -> None:
        OWNERS.pop(getattr(self, "_owner_key", 0), None)

    @property
    def needs_gather(self) -> bool:
        """Whether :meth:`unshard` would send something (or has: gathered ahead for this use)."""
        if self.aliases_shard:
            return False
        return self._is_arriving or not self.is_unsharded or self.gathered_generation != self.generation

    def unshard(self, waiting: Waiting) -> bool:
        """Start to gather. True if there was anything to do.

        Collective: all-gather of ``layout.padded_numel`` elements over the shard group, in place: the shard is cast
        straight into this rank's own slot. Memory: ``full_bytes``, until :meth:`reshard`.
        """
        if self.is_unsharded and (self.gathered_generation == self.generation or self.aliases_shard):
            return False
        with self.gather_lane:
            if not self.is_unsharded:
                self._storage.resize_(self.full_bytes)
            self.resting.fetch(self._own_slot, self, self.gather_lane)
            if self.resting.is_elsewhere and events.active is not None:
                events.active.emit("from_host", self.unit_name, self._own_slot.numel() * self._own_slot.element_size())
            if self.groups.shard is not None:
                if events.active is not None:
                    events.active.emit("all_gather", self.unit_name, self.full_bytes, self.layout.padded_numel)
                self._pending = all_gather(self._full, self._own_slot, self.groups, waiting)
            elif events.active is not None:
                events.active.emit("cast", self.unit_name, self.full_bytes)
        self.is_unsharded = self._is_arriving = True
        self.gathered_generation = self.generation
        return True

    def wait_unsharded(self) -> None:
        """The computation may read the full buffer after this."""
        if not self._is_arriving:
            return
        pending = self._pending
        if pending is not None:
            pending.wait()
            self._pending = None
        self.gather_lane.compute_waits()
        self._is_arriving = False

    def settle(self) -> None:
        """After an error: let a gather under way end, well or not; what it brought is not trusted."""
        if self._pending is not None:
            self._pending.drain()
            self._pending = None
            self._is_arriving = False
            self.gathered_generation = -1

    @property
    def is_arriving(self) -> bool:
        """A gather, or a cast on its lane, has been started and not been waited for."""
        return self._is_arriving

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def reshard(self) -> None:
        """Free the full buffer. Views that autograd saved stay valid objects over an empty storage."""
        if not self.is_unsharded or self.rests_full:
            self.wait_unsharded()
            return
        self.wait_unsharded()
        # The memory goes back to the pool of the lane that allocated it, whose next writes come after what the
        # computation has been given so far. (Not inside the lane: there the current stream is the lane itself.)
        self.gather_lane.wait_for_compute()
        self._storage.resize_(0)
        self.is_unsharded = False
        if events.active is not None:
            events.active.emit("reshard", self.unit_name, self.full_bytes)

    # ------------------------------------------------------------------ what modules hold

    def bind_full(self) -> None:
        """Modules see full-size leaves. Raises if a module no longer holds the user's parameter."""
        try:
            self.binding.bind_full()
        except Replaced as problem:
            raise self.replaced(problem.index, problem.found) from None

    def bind_users(self) -> None:
        """Modules hold the users' sharded parameters again."""
        self.binding.bind_users()

    def where(self, index: int = 0) -> dict[str, Any]:
        """Unit, parameter and rank, for an error about one of its parameters."""
        return {"unit": self.unit_name, "parameter": self.names[index], "rank": self.groups.rank}

    def replaced(self, index: int, found: Any) -> ParameterUseError:
        return ParameterUseError(
            f"the weight '{self.names[index]}' was replaced after wrapping",
            expected="the Parameter object that was there when the module was wrapped",
            found="nothing" if found is None else f"another {type(found).__name__}",
            **self.where(index),
            cure="write into the weight inside `with fsdp.full_params(module, writeback=True):` instead of replacing "
            "it; torch.func.functional_call and re-tying do not work on a wrapped model, do them before wrapping",
        )

    def changed(self, use: str) -> ParameterUseError:
        """For a backward that finds another generation than its forward did."""
        return ParameterUseError(
            f"a weight changed between the forward and the backward that {use}",
            **self.where(),
            cure="call backward() before optimizer.step(), or run the forward again after it",
        )

    def check_unwritten(self) -> None:
        """Raise if the forward wrote into a gathered weight: the change would be lost with the full buffer."""
        if self.leaves and self.leaves[0]._version != self._version:
            found, self._version = self.leaves[0]._version, self.leaves[0]._version
            raise ParameterUseError(
                "a weight was written in place while its unit ran, and resharding would lose the change",
                found=f"version {found} of one of {', '.join(self.names[:6])}",
                **self.where(),
                cure="do it outside the forward, inside `with fsdp.full_params(module, writeback=True):`",
            )

    # ------------------------------------------------------------------ the shard

    @torch.inference_mode(False)
    def new_masters(self) -> Masters:
        """A shard without values, at the place of rest."""
        vector = self.resting.zeros(self.layout.shard_numel, self.dtype)
        return Masters.in_vector(vector, self.layout, self.groups.shard_rank)

    @torch.no_grad()
    @torch.inference_mode(False)
    def move_masters(self, masters: Masters) -> None:
        """Masters rest there from here on, with the values that are there."""
        self.masters = masters
        with engine_access():
            for user, slice_ in zip(self.users, self.masters.slices):
                user.data = slice_

    def check_values(self) -> None:
        """Raise if the shard's values are lost, or cannot be reached."""
        self.masters.check()
        if self.was_lost and self.unfilled:
            self.unit.schedule.unfilled.refuse_lost(self.names, self.groups.rank)

    def mark_updated(self) -> None:
        """The shard was changed: whatever holds gathered values is stale."""
        self.generation += 1

    def mark_filled(self, index: int) -> None:
        """A parameter that came from the meta device has its values now."""
        if index in self.unfilled:
            self.unfilled.discard(index)
            self.unit.schedule.unfilled.pop(self.names[index], None)

    @torch.no_grad()
    def place(self, index: int, value: torch.Tensor) -> None:
        """Write this rank's part of a whole parameter into the shard (cast to the master dtype)."""
        low, high = self.layout.local_range(index, self.groups.shard_rank)
        if high > low:
            self.masters.check()
            self.masters.slices[index].copy_(value.detach().reshape(-1)[low:high])
        self.unfilled.discard(index)
        self.generation += 1

    @torch.no_grad()
    def gather_master(self, waiting: Waiting, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All shards end to end, in the master dtype or another, in memory of its own.

        Collective: all-gather of ``layout.padded_numel`` elements over the shard group.
        """
        self.check_values()
        with torch.inference_mode(False):
            whole = torch.empty(self.layout.padded_numel, dtype=dtype or self.dtype, device=self.device)
        start, stop = self.layout.shard_range(self.groups.shard_rank)
        self.masters.copy_to(whole[start:stop])
        if self.groups.shard is not None:
            all_gather(whole, whole[start:stop], self.groups, waiting).wait()
        return whole

    def adopt(self, index: int) -> None:
        """Make the user's parameter this rank's slice, keeping the object."""
        user = self.users[index]
        with engine_access(), torch.no_grad(), torch.inference_mode(False):
            if user.is_meta or user.is_inference():  # .data of such cannot be set; swapping contents keeps the object
                real = nn.Parameter(self.masters.slices[index], requires_grad=user.requires_grad)
                torch.utils.swap_tensors(user, real)
            user.data = self.masters.slices[index]
            hooks = getattr(user, "_post_accumulate_grad_hooks", None)
            if hooks:
                self.post_accumulate_hooks.adopt(index, hooks)
                user._post_accumulate_grad_hooks = None
            if user._backward_hooks and self.trainable:
                self.leaves[index]._backward_hooks = user._backward_hooks  # the same dict: handles go on working
        for key, value in user.__dict__.items():
            if not key.startswith("_fsdp"):
                setattr(self.leaves[index], key, value)  # marks that forward may read
        user._fsdp_info = ParameterInfo(self, index)
        if type(user) is nn.Parameter:
            user.__class__ = ShardedParameter

    def set_user_gradient(self, index: int, value: torch.Tensor | None) -> None:
        """``p.grad = value``: None, or a tensor of this rank's slice."""
        user = self.users[index]
        with engine_access():
            if type(value) in (torch.Tensor, GradientPart) and value.shape == torch.Tensor.size(user):
                gradient = value.as_subclass(ShardedGrad)
                gradient._fsdp_ref = weakref.ref(self)
                gradient._fsdp_index = index
                gradient._fsdp_shard = None
                value = gradient
            write_grad(user, value)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the users' gradients and what is pending, also while modules see other tensors (``full_params``)."""
        if self.gradient is not None and self.gradient.is_pending:
            self.gradient.drop_all()
        with engine_access():
            for user in self.users:
                gradient = read_grad(user)
                if gradient is not None and (set_to_none or type(gradient) is PendingGrad):
                    write_grad(user, None)
                elif gradient is not None:
                    gradient.zero_()

    def sync_requires_grad(self) -> bool:
        """Follow the users' flags. True if a frozen flat parameter has to be split (see ``regroup``).

        To be called under ``engine_access()``.
        """
        changed = False
        if not self.trainable:
            return any(user.requires_grad for user in self.users)
        for user, leaf in zip(self.users, self.leaves):
            wanted = user.requires_grad
            if wanted is not leaf.requires_grad:
                leaf.requires_grad_(wanted)
                changed = True
        if changed and self.unit is not None:
            self.unit.count_trainable()
        return False

    def rename(self, prefix: str) -> None:
        """Names become relative to an enclosing root."""
        self.all_names = [tuple(prefix + name for name in names) for names in self.all_names]
        self.unit_name = (prefix + self.unit_name).rstrip(".")

    # ------------------------------------------------------------------ copies

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict) -> FlatParameter:
        """A flat parameter with storage, leaves and hooks of its own; its users' copies go into the memo."""
        if id(self) in memo:
            return memo[id(self)]
        copy = FlatParameter.__new__(FlatParameter)
        memo[id(self)] = copy
        for name in (
            "groups", "stage", "device", "unit_name", "dtype", "compute_dtype", "wire_dtype", "trainable", "layout",
            "gather_lane",
        ):  # fmt: skip
            setattr(copy, name, getattr(self, name))
        copy.all_names = list(self.all_names)
        copy.resting = self.resting.twin()
        copy.masters = copy.new_masters()
        self.masters.copy_to(copy.masters.vector)
        copy.unit = None
        copy.generation = 0
        copy.gathered_generation = -1
        copy.unfilled = set(self.unfilled)
        copy.was_lost = self.was_lost
        copy._pending = None
        copy._is_arriving = False
        copy.post_accumulate_hooks = self.post_accumulate_hooks.copy()
        copy.binding = Binding([])
        copy.users = []
        for index, user in enumerate(self.users):
            with engine_access(), torch.inference_mode(False), torch.no_grad():
                twin = nn.Parameter(copy.masters.slices[index], requires_grad=user.requires_grad)
                for key, value in user.__dict__.items():
                    if not key.startswith("_fsdp"):
                        setattr(twin, key, value)
            twin._fsdp_info = ParameterInfo(copy, index)
            twin.__class__ = ShardedParameter
            memo[id(user)] = twin
            copy.users.append(twin)
        copy._create_full()
        for twin, leaf in zip(copy.users, copy.leaves):
            with engine_access():
                leaf.requires_grad_(twin.requires_grad)
        copy.gradient = GradientBuffer(copy) if copy.trainable else None
        return copy

    def locate(self, original: FlatParameter, memo: dict) -> None:
        """After a deep copy of the modules: find the copied places of the original's users."""
        self.binding = original.binding.copy_for(memo)
        self.binding.connect(self.users, self.leaves)
