"""``fsdp_wrap``: from a plain module to units, in place."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import optimizer_hooks
from .arguments import expect_module
from .collectives import broadcast
from .control import FLAGS, exchange
from .dynamo import hide_from_dynamo
from .errors import ConfigError, WrapError
from .flat_param import FlatParameter
from .flat_spec import FlatSpec, group_parameters
from .fsdp_unit import become_unit, state_of
from .groups import Groups, next_number, resolve_groups
from .keywords import known_keywords
from .low_precision import keep_in_fp32, kept_modules
from .materialize import Materializer, refuse_gradients, warn_low_precision
from .module_tree import checked_methods, refuse_suspended
from .modules import user_name
from .offload.options import Offload, as_offload
from .offload.resting import OnDevice, OnHost
from .local_slice import info_of
from .partition import Partition, UnitSpec, blocks_worth_wrapping, partition
from .policy import as_policy
from .precision import Precision, as_precision
from .recompute.blocks import find_blocks
from .recompute.matching import recompute_matching
from .recompute.plan import as_segmented, recompute_in_segments
from .regroup import split_frozen
from .schedule import Schedule
from .stage import Stage, stage_of
from .unit import UnitState
from .user_warning import warn_user
from .watchdog import Waiting
from .whole_values import accept_whole_values
from .wrap_agreement import check_ranks_agree, describe

__all__ = ["fsdp_wrap"]


@known_keywords
def fsdp_wrap(
    module: nn.Module,
    policy: Any = None,
    *,
    stage: int = 3,
    mesh: Any = None,
    precision: Any = None,
    reshard_after_forward: bool | None = None,
    prefetch: int = 1,
    offload: Any = None,
    recompute: Any = None,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    sync_params: bool = True,
    forward_methods: tuple[str, ...] = (),
) -> nn.Module:
    """Shard a module over ranks, in place, and return it.

    Args:
        module: Becomes the outermost unit; it and every module that ``policy`` matches become ``FSDPUnit``.
        policy: Which modules inside become units of their own (``by_class("Block")``, ...). None: none.
        stage: ZeRO stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        mesh: A 1-D or 2-D ``DeviceMesh`` (2-D: replicate, shard), a ``ProcessGroup``, or None: the default group.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a ``Precision``. The optimizer sees fp32 masters.
        reshard_after_forward: Free full parameters after forward. None: every unit but the root.
        prefetch: How many units are gathered ahead.
        offload: None, or an ``Offload``: what rests in host memory or on a disk.
        recompute: None; a policy: modules it matches are computed again in backward; ``"sqrt"`` or a
            ``recompute_within(bytes)``: blocks are, in segments.
        ignored: Modules or parameters to leave whole; gradients of trainable ones are averaged all the same.
        sync_params: Every rank starts from rank 0's parameters and buffers.
        forward_methods: Names of methods that, as ``forward`` does, need full weights.

    Returns:
        The same object.

    Raises:
        ConfigError, PolicyError, WrapError: An argument or the module cannot be used; says what can.
        RankMismatchError: Ranks were given different models or options; says which differ where.

    Collective: every rank of the mesh must call it. One small check, then, with ``sync_params``, one broadcast per
    parameter and buffer. Memory: this rank's shards, plus one module's parameters at a time.
    """
    expect_module(module, "fsdp.fsdp_wrap(model, policy)")
    row = stage_of(stage)
    groups = resolve_groups(mesh, row)
    failure = None
    plan = None
    try:
        precision = as_precision(precision)
        policy = as_policy(policy)
        if policy is not None:
            mesh = groups.replicate_size, groups.shard_size
            policy = policy.knowing(stage=stage, mesh=mesh, precision=precision)
        offload = as_offload(offload, row)
        _check_options(prefetch, reshard_after_forward)
        methods = checked_methods(module, forward_methods)
        segments = as_segmented(recompute)
        blocks = find_blocks(module) if segments is not None else []
        if recompute is not None and segments is None:
            recompute_matching(module, recompute)
        plan = partition(
            module,
            policy,
            ignored=ignored,
            is_unit=lambda m: state_of(m) is not None,
            is_owned=lambda p: info_of(p) is not None,
            entry_points=methods,
        )
        for spec in plan.units:
            for param in spec.params:
                refuse_gradients(param.parameter, user_name(param.name), groups.rank)
                _refuse_subclass(param.parameter, user_name(param.name))
            refuse_suspended(spec.module, user_name(spec.name))
        below = {id(m) for m in module.modules()}
        for name, nested in plan.nested:
            root = state_of(nested).schedule.root.module()
            if root is not None and id(root) not in below:
                raise WrapError(
                    f"a unit inside the model belongs to another wrapped model, a {type(root).__name__}",
                    unit=user_name(name),
                    cure="wrap one module that holds both models (other entry points go into forward_methods), or wrap "
                    "the shared unit and the other parts each by itself and nothing around them",
                )
            if state_of(nested).groups.ranks != groups.ranks:
                raise WrapError(
                    "a unit inside the model is sharded over other ranks than the model",
                    expected=f"ranks {list(groups.ranks)}",
                    found=f"ranks {list(state_of(nested).groups.ranks)}",
                    unit=user_name(name),
                    cure="wrap both over the same ranks (a 2-D mesh may shard them differently), or leave the inner "
                    "one out of the outer model",
                )
    except Exception as error:  # also what a user's predicate raises: the other ranks must hear of it
        failure = error
    description = None
    if failure is None:
        options = {
            "stage": stage,
            "policy": policy.describe() if policy else None,
            "precision": precision.describe(),
            "reshard_after_forward": reshard_after_forward,
            "prefetch": prefetch,
            "sync_params": sync_params,
            "recompute": segments or (recompute.describe() if recompute is not None else None),
            "offload": offload.describe(),
            "forward_methods": methods,
        }
        description = [f"{name}={value}" for name, value in options.items()] + describe(plan)
    check_ranks_agree(groups, description, failure)
    _install()
    wrapped = _Wrapping(
        module=module,
        plan=plan,
        stage=row,
        groups=groups,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        sync=sync_params,
        methods=methods,
        offload=offload,
    ).finish()
    if segments is not None:
        recompute_in_segments(segments, blocks, groups)
    return wrapped


@functools.cache
def _install() -> None:
    """What a process needs once."""
    optimizer_hooks.install()
    hide_from_dynamo(__package__)


@dataclass
class _Wrapping:
    """One call of ``fsdp_wrap``, after everything has been checked."""

    module: nn.Module
    plan: Partition
    stage: Stage
    groups: Groups
    precision: Precision
    reshard_after_forward: bool | None
    prefetch: int
    sync: bool
    methods: tuple[str, ...]
    offload: Offload

    def __post_init__(self) -> None:
        self.device = _compute_device(self.plan, self.groups)
        self.kept, self.kept_outermost = kept_modules(self.module, self.precision)

    def finish(self) -> nn.Module:
        owners: dict[int, tuple[FlatParameter, int]] = {}
        states = []
        for spec in self.plan.units:
            grouped = group_parameters(spec.params, self.precision, self.kept)
            flats = [self._flat(spec, flat_spec) for flat_spec in grouped]
            for flat in flats:
                owners.update({id(user): (flat, index) for index, user in enumerate(flat.users)})
            states.append((spec, self._state(spec, flats)))
        self._warn(states)
        materializer = self._materialize(owners)
        schedule = self._schedule(states)
        schedule.unfilled.update(materializer.unfilled)
        nested = {id(m) for _, m in self.plan.nested for m in m.modules()}
        for kept in self.kept_outermost:
            if id(kept) not in nested:
                keep_in_fp32(kept, self.precision.param_dtype)
        for spec, state in states:
            become_unit(spec.module, state, self.methods)
        return self.module

    def _flat(self, spec: UnitSpec, flat_spec: FlatSpec) -> FlatParameter:
        return FlatParameter(
            flat_spec,
            groups=self.groups,
            stage=self.stage,
            device=self.device,
            unit_name=user_name(spec.name),
            resting=self._resting(flat_spec),
        )

    def _resting(self, spec: FlatSpec) -> OnDevice:
        if self.offload.params is None:
            return OnDevice(self.device)
        return OnHost(self.device, self.offload.pin, None if spec.compute_dtype == spec.dtype else spec.compute_dtype)

    def _state(self, spec: UnitSpec, flats: list[FlatParameter]) -> UnitState:
        modules = {id(holder): holder for param in spec.params for holder, _ in param.locations}
        for holder in modules.values():
            accept_whole_values(holder)
        modules[id(spec.module)] = spec.module
        return UnitState(
            spec.module,
            user_name(spec.name),
            flats,
            groups=self.groups,
            stage=self.stage,
            precision=self.precision,
            reshard_after_forward=self.reshard_after_forward,
            prefetch=self.prefetch,
            buffers=[(b.module._buffers, b.key) for b in spec.buffers if id(b.module) not in self.kept],
            hook_dicts=[nn.modules.module._global_backward_hooks, *(m._backward_hooks for m in modules.values())],
        )

    def _materialize(self, owners: dict[int, tuple[FlatParameter, int]]) -> Materializer:
        plan = self.plan
        buffers = {(id(b.module), b.key): b for spec in plan.units for b in spec.buffers}
        here = [param.parameter.is_meta for spec in plan.units for param in spec.params]
        here += [b.module._buffers[b.key].is_meta for b in buffers.values()]
        names = [user_name(param.name) for spec in plan.units for param in spec.params]
        names += [b.name for b in buffers.values()]
        is_first = self.groups.rank == self.groups.ranks[0]
        flags = bytes(int(is_first and not meta) for meta in here)
        waiting = Waiting("", "exchange of which tensors rank 0 holds", 0)
        flags = exchange(self.groups, FLAGS, 0, flags, waiting)
        assert flags is not None, "ranks agreed on the model and now mean different things"
        materializer = Materializer(
            owners,
            self.groups,
            sync=self.sync,
            first_has={name for name, has in zip(names, flags) if has},
            device=self.device,
        )
        # Modules of units that were there before, and ignored ones, are left alone.
        skip = {id(m) for _, unit in plan.nested for m in unit.modules()}
        materializer.fill(self.module, buffers, skip)
        if self.sync:
            for spec in plan.ignored_params:
                p = spec.parameter
                if p.is_floating_point() and not p.is_meta and p.device.type == self.device.type:
                    value = p.data.contiguous()
                    broadcast(value, self.groups, Waiting("", f"broadcast of {spec.name}", 0))
                    p.data.copy_(value)
        return materializer

    def _schedule(self, states: list[tuple[UnitSpec, UnitState]]) -> Schedule:
        schedule = Schedule(states[0][1], next_number(self.groups), on_cpu=self.device.type == "cpu")
        schedule.regroup = split_frozen
        schedule.trusts_replicas = self.sync
        schedule.offload = self.offload
        by_module = {id(spec.module): state for spec, state in states}
        nested = {id(m): name for name, m in self.plan.nested}
        absorbed: dict[int, tuple[Schedule, str]] = {}
        for name, m in self.module.named_modules():
            if id(m) in by_module:
                schedule.add(by_module[id(m)])
            elif id(m) in nested:
                state = state_of(m)
                old = state.schedule
                if id(old) not in absorbed:
                    absorbed[id(old)] = (old, user_name(name) + "." if name else "")
                    old.rest_all()
                prefix = absorbed[id(old)][1]
                state.name = (prefix + state.name).rstrip(".")
                for flat in state.flats:
                    flat.rename(prefix)
                schedule.add(state)
        for old, prefix in absorbed.values():
            schedule.trusts_replicas &= old.trusts_replicas
            schedule.unfilled.update({prefix + name: place for name, place in old.unfilled.items()})
            for name, parameter in old.ignored.release():
                schedule.ignored.add(prefix + name, parameter)
        for spec in self.plan.ignored_params:
            if spec.parameter.is_floating_point():
                schedule.ignored.add(spec.name, spec.parameter)
        return schedule

    def _warn(self, states: list[tuple[UnitSpec, UnitState]]) -> None:
        if self.groups.rank != self.groups.ranks[0]:
            return
        for text in self.plan.warnings:
            warn_user(text)
        if self.stage.shards_parameters and len(states) == 1 and not self.plan.nested:
            advice = blocks_worth_wrapping(self.module, more_than=1 + self.prefetch)
            if advice is not None:
                warn_user(f"the whole model is one unit, so the peak is the whole model: {advice}")
        for _, state in states:
            low = [n for flat in state.flats if flat.trainable and flat.dtype.itemsize == 2 for n in flat.names]
            if low:
                warn_low_precision(low, state.name)


def _refuse_subclass(parameter: nn.Parameter, name: str) -> None:
    """A subclass has behaviour of its own that a slice would break in silence. (Fake tensors are none of a user's.)"""
    cls = type(parameter)
    if cls.__name__ == "DTensor":
        raise WrapError(
            "a parameter is sharded already: it is a DTensor",
            parameter=name,
            cure="wrap the plain module: neither fully_shard nor parallelize_module before fsdp_wrap",
        )
    if cls is not nn.Parameter and not cls.__module__.startswith("torch."):
        raise WrapError(
            f"a parameter is of class {cls.__name__}, a subclass of nn.Parameter",
            parameter=name,
            cure="make it a plain nn.Parameter, or leave it whole with fsdp_wrap(..., ignored=(parameter,))",
        )


def _check_options(prefetch: Any, reshard_after_forward: Any) -> None:
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ConfigError("prefetch is a number of units", expected="an int >= 0", found=repr(prefetch))
    if reshard_after_forward not in (None, True, False):
        raise ConfigError(
            "reshard_after_forward takes None, True or False",
            expected="None (all but the root), True or False",
            found=repr(reshard_after_forward),
        )


def _compute_device(plan: Partition, groups: Groups) -> torch.device:
    """The accelerator if the group communicates on one, else where the parameters are."""
    if torch.cuda.is_available() and (groups.whole is None or _has_cuda(groups.whole)):
        if groups.whole is not None or any(p.parameter.is_cuda for spec in plan.units for p in spec.params):
            return torch.device("cuda", torch.cuda.current_device())
    for spec in plan.units:
        for param in spec.params:
            if not param.parameter.is_meta:
                return param.parameter.device
    return torch.device("cpu")


def _has_cuda(group: Any) -> bool:
    """Whether the group communicates on the device; a plain gloo group takes CUDA tensors, but through the host."""
    try:
        return group._get_backend(torch.device("cuda")).name() != "gloo"
    except RuntimeError:
        return False
