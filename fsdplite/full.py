"""Whole parameters and gradients outside forward: reading, editing, exporting.

The tensors shown here have memory of their own, not the units' full buffers: they live as long as somebody, or
autograd, holds them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .arguments import expect_module
from .collectives import all_gather, broadcast
from .errors import ConfigError, FSDPError, did_you_mean
from .flat_param import FlatParameter, owner_of
from .fsdp_unit import state_of
from .keywords import known_keywords
from .local_slice import engine_access, info_of, read_grad
from .parameter import ShardedParameter
from .watchdog import Waiting

__all__ = ["full_grad", "full_params", "full_state_dict"]


@known_keywords
@contextlib.contextmanager
def full_params(module: nn.Module, writeback: bool = False, rank0_writes: bool = False) -> Iterator[None]:
    """Inside this context the parameters below ``module`` are full tensors, usable in autograd.

    Gradients that reach them arrive in the shards, also when ``backward()`` runs after the context was left. All
    parameters below ``module`` are whole at the same time: open it on as small a module as will do.

    Args:
        module: A unit, or any module inside one or around several.
        writeback: Show the masters (fp32 under a precision policy) and keep what is written into them. Otherwise
            the compute dtype is shown and edits are lost.
        rank0_writes: With ``writeback``: the first rank's edits win on every rank.

    Collective: one all-gather per flat parameter; with ``rank0_writes`` one broadcast each on leaving. Every rank
    must enter and leave together.
    """
    expect_module(module, 'fsdp.full_params(module); a module by its name is model.get_submodule("layers.0")')
    if rank0_writes and not writeback:
        raise ConfigError(
            "rank0_writes=True without writeback=True would throw the first rank's edits away",
            cure="pass writeback=True as well",
        )
    wanted = _flats_below(module)
    for schedule in {id(flat.unit.schedule): flat.unit.schedule for flat, _ in wanted}.values():
        schedule.follow_requires_grad()
    wanted = _flats_below(module)  # what was unfrozen is in another one now
    if not wanted:
        if not any(owner_of(p) is not None or hasattr(p, "_fsdp_is_shown") for p in module.parameters()):
            raise FSDPError(
                f"no parameter of this {type(module).__name__} belongs to a unit",
                cure="give full_params a module that was wrapped, or one inside or around it",
            )
        yield
        return
    shown: list[tuple[FlatParameter, torch.Tensor, dict[int, nn.Parameter]]] = []
    try:
        for flat, indices in wanted:
            if any(flat.binding.shows(index) for index in indices):
                if writeback:
                    raise ConfigError(
                        "weights cannot be edited while their unit runs, or inside another full_params",
                        unit=flat.unit_name,
                        rank=flat.groups.rank,
                        cure="open full_params(..., writeback=True) outside the forward and on its own",
                    )
                indices = [index for index in indices if not flat.binding.shows(index)]
            if indices:  # none where the unit's own forward runs: the weights are whole already
                shown.append(_show(flat, indices, writeback))
        yield
        if writeback:
            for flat, whole, leaves in shown:
                _write_back(flat, whole, leaves, rank0_writes)
    finally:
        for flat, _, leaves in shown:
            flat.binding.hide(leaves)


def _flats_below(module: nn.Module) -> list[tuple[FlatParameter, list[int]]]:
    """Every flat parameter that owns something below ``module``, and which of its parameters that is."""
    flats = [flat for m in module.modules() if (state := state_of(m)) is not None for flat in state.flats]
    found: dict[FlatParameter, list[int]] = {flat: list(range(len(flat.users))) for flat in flats}
    for parameter in module.parameters():
        info = info_of(parameter)
        if info is not None and type(parameter) is ShardedParameter and info.flat not in flats:
            found.setdefault(info.flat, []).append(info.index)
    return list(found.items())


def _show(
    flat: FlatParameter, indices: list[int], writeback: bool
) -> tuple[FlatParameter, torch.Tensor, dict[int, nn.Parameter]]:
    dtype = flat.dtype if writeback else flat.compute_dtype
    waiting = Waiting(flat.unit_name, "all-gather in full_params", flat.unit.schedule.step)
    flat.unit.schedule.agreement.agree_on_extra("full_params", flat.unit)
    whole = flat.gather_master(waiting, dtype)
    leaves: dict[int, nn.Parameter] = {}
    with torch.inference_mode(False), torch.no_grad():
        for index in indices:
            slot = flat.layout.slots[index]
            view = whole[slot.offset : slot.stop].view(slot.shape)
            with engine_access():
                leaf = nn.Parameter(view, requires_grad=flat.users[index].requires_grad)
            if leaf.requires_grad and flat.trainable:  # a member of a trainable one may be frozen
                leaf.register_post_accumulate_grad_hook(_gradient_of_shown(weakref.ref(flat), index))
                for hook in (flat.leaves[index]._backward_hooks or {}).values():
                    leaf.register_hook(hook)
            leaf._fsdp_is_shown = True
            leaves[index] = leaf
    flat.binding.show(leaves)
    return flat, whole, leaves


def _gradient_of_shown(ref: weakref.ref, index: int) -> Any:
    def on_gradient(leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        flat = ref()
        if flat is not None and gradient is not None:
            flat.unit.on_outside_gradient(flat, index, gradient)

    return on_gradient


@torch.no_grad()
def _write_back(flat: FlatParameter, whole: torch.Tensor, leaves: dict[int, nn.Parameter], rank0: bool) -> None:
    for index in leaves:
        slot = flat.layout.slots[index]
        value = whole[slot.offset : slot.stop]
        shown = flat.binding.shown(index)
        if shown is not leaves[index]:
            raise flat.replaced(index, shown)
        if leaves[index].data_ptr() != value.data_ptr() and slot.numel:
            value = leaves[index].detach().to(flat.dtype).reshape(-1).contiguous()  # .data was set to another tensor
        if rank0:
            broadcast(value, flat.groups, Waiting(flat.unit_name, "broadcast of rank 0's edits", 0))
        flat.place(index, value)
        flat.mark_filled(index)


@known_keywords
def full_grad(model: nn.Module, name: str) -> torch.Tensor | None:
    """The whole reduced gradient of one parameter, on every rank; None if it has none.

    Args:
        model: A wrapped model.
        name: Dotted name, as ``named_parameters()`` gives it.

    Returns:
        A tensor of ``full_shape`` in the dtype of the parameter (fp32 under a precision policy).

    Collective: one all-gather of the flat parameter's size over the shard group. Every rank must call it.
    """
    expect_module(model, 'fsdp.full_grad(model, "layers.0.weight")')
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise ConfigError("there is no such parameter", found=f"'{name}'" + did_you_mean(name, parameters))
    parameter = parameters[name]
    info = info_of(parameter)
    if info is None:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    flat = info.flat
    if flat.gradient is None:
        return None
    flat.gradient.refuse_pending()
    flat.unit.schedule.agreement.agree_on_extra("full_grad", flat.unit)
    with engine_access(), torch.no_grad():
        gradient = read_grad(flat.users[info.index])
        if gradient is None:
            return None
        start, stop = flat.layout.shard_slice(info.index, flat.groups.shard_rank)
        whole = torch.zeros(flat.layout.padded_numel, dtype=gradient.dtype, device=flat.device)
        first, last = flat.layout.shard_range(flat.groups.shard_rank)
        whole[first + start : first + stop].copy_(gradient.as_subclass(torch.Tensor))
        if flat.groups.shard is not None:
            waiting = Waiting(flat.unit_name, "all-gather in full_grad", flat.unit.schedule.step)
            all_gather(whole, whole[first:last], flat.groups, waiting).wait()
        slot = flat.layout.slots[info.index]
        return whole[slot.offset : slot.stop].view(slot.shape).clone()


@known_keywords
def full_state_dict(
    model: nn.Module, rank0_only: bool = True, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The whole model's ``state_dict()``, gathered unit by unit into host memory.

    Args:
        model: A wrapped model, or one that holds wrapped modules.
        rank0_only: Only the first rank gets it; the others get an empty dict.
        dtype: Cast floating tensors to this. None: the masters' dtype.

    Returns:
        Names to CPU tensors, in the order of ``state_dict()``; tied names share one tensor.

    Collective: one all-gather per flat parameter. Every rank must call it. Memory: one flat parameter on the device
    at a time.
    """
    expect_module(model, "fsdp.full_state_dict(model)")
    keeps = True
    values: dict[tuple[int, int], torch.Tensor] = {}
    for m in model.modules():
        state = state_of(m)
        for flat in state.flats if state is not None else ():
            keeps = not rank0_only or flat.groups.rank == flat.groups.ranks[0]
            waiting = Waiting(flat.unit_name, "all-gather in full_state_dict", flat.unit.schedule.step)
            flat.unit.schedule.agreement.agree_on_extra("full_state_dict", flat.unit)
            whole = flat.gather_master(waiting)
            if not keeps:
                continue
            for index, slot in enumerate(flat.layout.slots):
                values[id(flat), index] = _to_host(whole[slot.offset : slot.stop].view(slot.shape), dtype)
            del whole
    result: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not keeps:
            break
        if not isinstance(value, torch.Tensor):
            result[name] = value  # a module's extra state
            continue
        info = info_of(value)
        if info is not None and (id(info.flat), info.index) in values:
            result[name] = values[id(info.flat), info.index]
        elif info is None:
            result[name] = _to_host(value.detach(), dtype)
    return result


def _to_host(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.to("cpu", copy=True)
