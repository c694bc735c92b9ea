"""What happens around every ``optimizer.step()``, through torch's global optimizer hooks.

Inside ``step`` the users' parameters are exact ``nn.Parameter`` objects and their gradients plain tensors, so the
optimizer takes its fast paths and pays nothing. Before it, what cannot work on slices is refused; after it, the
units whose shards changed know.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .errors import GradientError, ParameterUseError, ShardedAccessError, WrapError
from .flat_param import FlatParameter, owner_of
from .gradient import PendingGrad, ShardedGrad, pending_error
from .local_slice import LocalSlice, as_local_slice, engine_access, info_of, read_grad
from .parameter import RestingLeaf, ShardedParameter
from .user_warning import warn_user

__all__ = ["WHOLE_TENSOR_OPTIMIZERS", "abandon_step", "exempt", "flip_again", "install", "refuse_sparse_updates", "restore"]

# They read a parameter's rows, columns or all of it at once; a slice would give other numbers in silence.
WHOLE_TENSOR_OPTIMIZERS = {"Adafactor", "Muon", "LBFGS", "Shampoo", "DistributedShampoo", "SOAP", "KFAC", "LARS", "LAMB", "Lamb", "Lars"}  # fmt: skip
_SPARSE_GRADIENT_OPTIMIZERS = {"SparseAdam"}

_checked: weakref.WeakSet = weakref.WeakSet()
_state_fits: weakref.WeakSet = weakref.WeakSet()  # looked at since it was loaded
_exempt: weakref.WeakSet = weakref.WeakSet()
_stepping: list[Any] = []
_flipped: list[torch.Tensor] = []


def install() -> None:
    """Register the hooks (once per process). Optimizers without wrapped parameters pay one scan of their groups."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def exempt(optimizer: Any) -> None:
    """An optimizer of the engine's own, which is given pieces of shards: nothing about it has to be checked."""
    _exempt.add(optimizer)


def _sharded(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if type(p) is ShardedParameter]


class _StepArguments(tuple):
    """The arguments of a step, which go when the step is over. One that raised never reaches its post hook."""

    def __del__(self) -> None:
        if _stepping:
            _forget_dead_steps()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    if optimizer in _exempt:
        return None
    _forget_dead_steps()
    if optimizer not in _checked:
        _refuse_full_tensors(optimizer)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if "_fsdp_ignored" in p.__dict__:
            ignored, index = p.__dict__["_fsdp_ignored"]
            ignored.refuse_pending(index)
    sharded = _sharded(optimizer)
    if not sharded:
        return None
    if optimizer not in _checked:
        _check_kind(optimizer, sharded[0])
        _warn_not_offloaded(optimizer, sharded[0])
        optimizer.register_state_dict_post_hook(_guard_saved_state)
        optimizer.register_load_state_dict_pre_hook(_accept_saved_state)
        optimizer.register_load_state_dict_post_hook(_state_fits.discard)
        _checked.add(optimizer)
    if optimizer not in _state_fits:
        if not hasattr(optimizer, "state_to_fill"):  # an offloaded optimizer checks what it is given
            _check_state(optimizer, sharded)
        _state_fits.add(optimizer)
    _check_gradients(sharded)
    _check_others(optimizer, sharded)
    _stepping.append(optimizer)
    _flip(sharded)
    return _StepArguments(args), kwargs


def _refuse_full_tensors(optimizer: Any) -> None:
    """Tensors shown by a forward or by ``full_params`` are not the parameters: updating them changes nothing."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if type(p) is ShardedParameter:
            continue
        if type(p) is RestingLeaf or "_fsdp_is_shown" in p.__dict__ or owner_of(p) is not None:
            raise GradientError(
                "the optimizer holds a full tensor that was shown for a while, not the parameter",
                cure="build the optimizer outside full_params and outside the forward",
            )


def _check_others(optimizer: Any, sharded: list[torch.Tensor]) -> None:
    """Parameters of a wrapped model that no unit owns would train on each rank by itself, or not at all."""
    others = [p for group in optimizer.param_groups for p in group["params"] if type(p) is not ShardedParameter]
    loose = {id(p): p for p in others if p.requires_grad and "_fsdp_ignored" not in p.__dict__}
    if not loose:
        return
    for module in {id(m): m for p in sharded if (m := info_of(p).flat.unit.schedule.root.module()) is not None}.values():
        for name, p in module.named_parameters():
            if id(p) in loose:
                raise WrapError(
                    "a parameter was added to the model after wrapping: each rank would train it by itself",
                    parameter=name,
                    cure="add modules before fsdp_wrap, wrap the new module, or name it in fsdp_wrap(..., ignored=...)",
                )


def _flip(sharded: list[torch.Tensor]) -> None:
    with engine_access():
        for p in sharded:
            gradient = read_grad(p)
            p.__class__ = nn.Parameter
            _flipped.append(p)
            if type(gradient) is ShardedGrad:
                gradient.__class__ = torch.Tensor
                _flipped.append(gradient)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _stepping and _stepping[-1] is optimizer:
        _stepping.pop()
        try:
            _mark_updated(optimizer)
        finally:
            _restore()


def _mark_updated(optimizer: Any) -> None:
    flats = {id(info.flat): info.flat for group in optimizer.param_groups for p in group["params"] if (info := info_of(p))}
    unlike = []
    for flat in flats.values():
        flat.mark_updated()
        unlike += _take_back(flat)
    for flat, index, value in unlike:
        slice_ = flat.masters.slices[index]
        raise ParameterUseError(
            "the optimizer set .data of a parameter to a tensor that is not like its slice; the shard keeps its values",
            expected=f"shape {tuple(slice_.shape)}, {slice_.dtype}",
            found=f"shape {tuple(value.shape)}, {value.dtype}",
            **flat.where(index),
            cure="update the parameter in place, element by element",
        )


def _take_back(flat: FlatParameter) -> list[tuple[FlatParameter, int, torch.Tensor]]:
    """``p.data = value`` inside a step: the value moves into the shard, of which the parameter is a view again.

    Returns:
        Values that cannot, with the index of their parameter.
    """
    if [user.data_ptr() for user in flat.users] == flat.masters.addresses:  # one look at all: each step pays for it
        return []
    unlike = []
    with engine_access(), torch.no_grad():
        for index, (user, slice_) in enumerate(zip(flat.users, flat.masters.slices)):
            if user.data_ptr() == slice_.data_ptr():
                continue
            value, user.data = user.data, slice_
            if (value.shape, value.dtype) == (slice_.shape, slice_.dtype):
                slice_.copy_(value)
            else:
                unlike.append((flat, index, value))
    return unlike


def abandon_step(optimizer: Any) -> None:
    """A step is about to raise: what its pre hook did is undone now. For optimizers whose ``step`` is the engine's own."""
    if _stepping and _stepping[-1] is optimizer:
        _stepping.pop()
        _restore()


def _forget_dead_steps() -> None:
    """A step that raised never reached its post hook: undo what its pre hook did, and count what it may have updated."""
    while _stepping and not _is_running(_stepping[-1]):
        _mark_updated(_stepping.pop())
    if not _stepping:
        _restore()


def _is_running(optimizer: Any) -> bool:
    """Whether torch's wrapper around this optimizer's ``step`` is on a stack (backward may run on another thread)."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_name == "wrapper" and (args := frame.f_locals.get("args")) and args[0] is optimizer:
                return True
            frame = frame.f_back
    return False


def restore() -> None:
    """Back to the guarded classes, for a forward: also for one inside ``step(closure)``, or after a step that raised."""
    if _stepping:
        _forget_dead_steps()
    _restore()


def _restore() -> None:
    while _flipped:
        tensor = _flipped.pop()
        tensor.__class__ = ShardedParameter if type(tensor) is nn.Parameter else ShardedGrad


def flip_again() -> None:
    """After a forward and backward inside ``step(closure)``: the rest of the step sees plain tensors again."""
    if _stepping:
        _forget_dead_steps()
    if _stepping:  # still
        _flip(_sharded(_stepping[-1]))


def _check_kind(optimizer: Any, parameter: torch.Tensor) -> None:
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if "ZeroRedundancyOptimizer" in names:
        raise ShardedAccessError(
            "ZeroRedundancyOptimizer divides parameters among ranks, and these are divided already",
            cure="use the optimizer that it was given; at stages 1 to 3 its state is sharded",
        )
    refused = names & WHOLE_TENSOR_OPTIMIZERS
    if refused:
        info = info_of(parameter)
        raise ShardedAccessError(
            f"{sorted(refused)[0]} reads whole tensors, and each rank holds slices",
            **info.where,
            cure="use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, Lion, ...), or update whole matrices "
            "inside `with fsdp.full_params(module, writeback=True):`",
        )
    refuse_sparse_updates(type(optimizer), **info_of(parameter).where)


def refuse_sparse_updates(optimizer_class: type, **where: Any) -> None:
    """Raise for an optimizer that takes sparse gradients only."""
    names = {cls.__name__ for cls in optimizer_class.__mro__} & _SPARSE_GRADIENT_OPTIMIZERS
    if names:
        raise ShardedAccessError(
            f"{sorted(names)[0]} updates by sparse gradients, and those of sharded parameters are dense",
            **where,
            cure="use Adam or AdamW; Embedding(sparse=True) saves nothing here and may go",
        )


def _guard_saved_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What ``state_dict()`` returns refuses to be written to a file, as the parameters' slices do.

    A file that one rank writes would hold its part of every moment, and load on all ranks as if it were theirs.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    guarded = {}
    for index, values in state_dict["state"].items():
        info = info_of(parameters[index]) if isinstance(index, int) else None
        if info is not None and isinstance(values, dict):
            numel = info.local_range[1] - info.local_range[0]
            values = {
                key: as_local_slice(value, info) if isinstance(value, torch.Tensor) and value.shape == (numel,) else value
                for key, value in values.items()
            }
        guarded[index] = values
    return {**state_dict, "state": guarded}


def _accept_saved_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The reverse, for ``load_state_dict()``: the optimizer works on plain tensors."""
    plain = {index: _plain(values) if isinstance(values, dict) else values for index, values in state_dict["state"].items()}
    return {**state_dict, "state": plain}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.as_subclass(torch.Tensor) if isinstance(value, LocalSlice) else value for key, value in values.items()
    }


def _check_state(optimizer: Any, sharded: list[torch.Tensor]) -> None:
    with engine_access():
        for p in sharded:
            if p in optimizer.state:
                optimizer.state[p].update(_plain(optimizer.state[p]))  # loaded before the hooks were there
            info = info_of(p)
            for key, value in optimizer.state.get(p, {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == p.shape:
                    continue
                if value.numel() != 1 or (info.full_shape.numel() == 1 and key != "step"):  # else a counter
                    raise ShardedAccessError(
                        f"the optimizer's state '{key}' was made before wrapping, or by another run, for the whole parameter",
                        expected=f"shape {tuple(p.shape)}, this rank's slice",
                        found=f"shape {tuple(value.shape)}",
                        **info.where,
                        cure="build the optimizer after fsdp_wrap, or before the first step was taken; to continue a "
                        "run load its optimizer state from a checkpoint after wrapping",
                    )


def _warn_not_offloaded(optimizer: Any, parameter: torch.Tensor) -> None:
    flat = info_of(parameter).flat
    offload = flat.unit.schedule.offload
    asked = offload.optimizer if offload is not None else None
    if asked is not None and not hasattr(optimizer, "state_to_fill") and flat.groups.rank == flat.groups.ranks[0]:
        name = type(optimizer).__name__
        warn_user(
            f"the model was wrapped with Offload(optimizer={asked!r}), and {name} keeps its state in memory all the same: "
            f"make it with fsdp.offloaded({name}, model, ...)"
        )


def _check_gradients(sharded: list[torch.Tensor]) -> None:
    flats = {id(info.flat): info.flat for p in sharded if (info := info_of(p))}
    for flat in flats.values():
        if flat.binding.shows_others:
            raise GradientError(
                "an optimizer step inside full_params would leave the full tensors stale",
                **flat.where(),
                cure="leave full_params before optimizer.step()",
            )
        if flat.gradient is not None:
            flat.gradient.refuse_pending()
        flat.resting.wait()
        flat.masters.check()
    with engine_access():
        for p in sharded:
            gradient = read_grad(p)
            if type(gradient) is PendingGrad:
                raise pending_error(info_of(p).flat)
            if gradient is not None and gradient.shape != p.shape:
                info = info_of(p)
                raise GradientError(
                    "a gradient does not have the shape of its slice",
                    expected=tuple(p.shape),
                    found=tuple(gradient.shape),
                    **info.where,
                    cure="assign gradients of this rank's slice only",
                )
