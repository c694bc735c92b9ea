"""The user's parameters while they are sharded.

After wrapping, a user's ``nn.Parameter`` holds this rank's slice. Its class becomes :class:`ShardedParameter`, which
answers metadata and element-wise updates and refuses everything that would need the whole tensor. Inside
``optimizer.step()`` the class is the exact ``nn.Parameter`` (see ``optimizer_hooks``), so foreach and fused updates
stay the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .errors import ShardedAccessError
from .local_slice import (
    ELEMENTWISE,
    FILLING,
    ParameterInfo,
    as_local_slice,
    engine_access,
    instances_in,
    is_initialiser,
    matches,
    read_grad,
    refusal,
    write_grad,
)

__all__ = ["RestingLeaf", "ShardedParameter"]

_UNREADABLE_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}
_METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr",
    "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned",
    "is_shared", "get_device", "requires_grad_", "retain_grad", "has_names", "is_same_size", "is_set_to",
    "__hash__", "is_tensor", "_is_view", "is_conj", "is_neg", "__dlpack_device__", "_has_compatible_shallow_copy_type",
}  # fmt: skip
_MAKERS = {
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "new_tensor", "clone",
}  # fmt: skip
_CASTS = {"to", "cuda", "cpu", "float", "double", "half", "bfloat16", "type", "contiguous"}


class ShardedParameter(nn.Parameter):
    """A parameter that holds this rank's slice of a flat parameter.

    ``shape``, ``numel()``, ``data`` and ``detach()`` are the local slice, one-dimensional; ``ndim`` and ``dim()``
    are the original rank and ``full_shape`` the original shape.
    """

    @property
    def full_shape(self) -> torch.Size:
        return self.__dict__["_fsdp_info"].full_shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self.dim()

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """This rank's slice of the reduced gradient, or None."""
        with engine_access():
            return read_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            with engine_access():
                write_grad(self, None)
        else:
            info = self.__dict__["_fsdp_info"]
            info.flat.set_user_gradient(info.index, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def dim(self) -> int:
        """Number of dimensions of the original parameter."""
        if is_initialiser(sys._getframe(1)):
            raise refusal(self, sys._getframe(1).f_code.co_name)
        return len(self.full_shape)

    ndimension = dim

    def __repr__(self, **kwargs: Any) -> str:
        info = self.__dict__["_fsdp_info"]
        with engine_access():
            numel = self.numel()
        return (
            f"ShardedParameter({info.name!r}, full_shape={tuple(info.full_shape)}, "
            f"slice of {numel} elements on rank {info.flat.groups.rank}, dtype={info.flat.dtype})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: int) -> Any:
        with engine_access():
            local = as_local_slice(self.detach(), self.__dict__["_fsdp_info"])
        raise local._refuse("pickling")

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) not in memo:
            # The flat parameter copies all its users into the memo, before any module asks for the next one.
            info = self.__dict__["_fsdp_info"]
            info.flat.__deepcopy__(memo)
        return memo[id(self)]

    def register_hook(self, hook: Any) -> Any:
        """The hook sees this rank's full local gradient, in the compute dtype, before the reduction."""
        info = self.__dict__["_fsdp_info"]
        with engine_access():
            return info.flat.leaves[info.index].register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """The hook is called once per synchronised backward, after the reduction, with this parameter."""
        info = self.__dict__["_fsdp_info"]
        return info.flat.post_accumulate_hooks.add(info.index, hook)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with engine_access():
            if name in ("__get__", "__set__", "__delete__"):
                return _property(func, name, args)
            if name in _METADATA:
                return _metadata(func, name, args, kwargs)
            if name in ("detach", "clone"):
                args[0].__dict__["_fsdp_info"].flat.check_values()
                return as_local_slice(func(*args, **kwargs), args[0].__dict__["_fsdp_info"])
            if name in _MAKERS:
                return func(*args, **kwargs)
            if name in _CASTS:
                return _cast(func, name, args, kwargs)
            if name in ELEMENTWISE or _is_foreach_update(name):
                return _update(func, name, args, kwargs)
        owner = next(_sharded_in((args, kwargs)))
        if name == "backward" or func is torch.autograd.grad:
            raise _refuse_gradients_of(owner)
        raise refusal(owner, name)


def _refuse_gradients_of(parameter: torch.Tensor) -> ShardedAccessError:
    info: ParameterInfo = parameter.__dict__["_fsdp_info"]
    return ShardedAccessError(
        "torch.autograd.grad(loss, parameters) and backward(inputs=parameters) do not know sharded parameters",
        **info.where,
        cure="call loss.backward(): the slice is in parameter.grad, the whole in fsdp.full_grad(model, name); what "
        "should have no gradient is frozen by requires_grad_(False). Both calls work with respect to inputs",
    )


class RestingLeaf(nn.Parameter):
    """A full-size leaf while its unit does not compute: somebody kept it past the forward; its memory may be gone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        with engine_access():
            if name in _METADATA or (
                name in ("__get__", "__set__") and func.__self__.__name__ not in ("data", *_UNREADABLE_PROPERTIES)
            ):
                return func(*args, **(kwargs or {}))
        leaf = next(instances_in((args, kwargs or {}), RestingLeaf))
        info: ParameterInfo = leaf.__dict__["_fsdp_info"]
        raise ShardedAccessError(
            f"the full weight '{info.name}' was kept past its unit's forward and used by {name or 'an operation'}",
            **info.where,
            cure="keep a copy (weight.detach().clone()), or open `with fsdp.full_params(module):` where it is used",
        )

    def __repr__(self, **kwargs: Any) -> str:
        return f"RestingLeaf({self.__dict__['_fsdp_info'].name!r})"

    def __reduce_ex__(self, protocol: int) -> Any:
        raise ShardedAccessError("a full weight kept past its unit's forward cannot be pickled or copied")


def _is_foreach_update(name: str) -> bool:
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


def _sharded_in(value: Any) -> Iterator[torch.Tensor]:
    return instances_in(value, ShardedParameter)


def _property(func: Any, access: str, args: tuple) -> Any:
    name = func.__self__.__name__
    parameter = args[0]
    if access == "__get__":
        if name in _UNREADABLE_PROPERTIES:
            raise refusal(parameter, name)
        if name == "shape" and is_initialiser(sys._getframe(2)):
            raise refusal(parameter, sys._getframe(2).f_code.co_name)
        if name != "data":
            return func(*args)
        parameter.__dict__["_fsdp_info"].flat.check_values()
        return as_local_slice(func(*args), parameter.__dict__["_fsdp_info"])
    info: ParameterInfo = parameter.__dict__["_fsdp_info"]
    if access == "__set__" and name == "data":
        return _write_data(parameter, info, args[1])
    return func(*args)


def _write_data(parameter: torch.Tensor, info: ParameterInfo, value: torch.Tensor) -> None:
    """``p.data = value`` writes into the flat parameter; the storage stays the engine's."""
    if value is parameter:
        return
    if value.shape == parameter.shape and value.device == parameter.device:
        if value.dtype != parameter.dtype:
            raise refusal(parameter, "assigning .data of another dtype")
        parameter.detach().copy_(value)
        info.flat.mark_updated()
        return
    raise refusal(parameter, "assigning .data")


def _metadata(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    if name == "size" and (len(args) > 1 or kwargs):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim is not None and len(args[0].__dict__["_fsdp_info"].full_shape) != 1:
            raise refusal(args[0], "size")
    return func(*args, **kwargs)


def _cast(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """A cast or a move that changes nothing returns the parameter itself; any other would leave the unit behind."""
    parameter = args[0]
    probe = func(parameter.detach()[:0], *args[1:], **kwargs)
    if not isinstance(probe, torch.Tensor):  # p.type() asks for a name
        return func(*args, **kwargs)
    if probe.dtype == parameter.dtype and probe.device == parameter.device:
        return parameter
    raise ShardedAccessError(
        f"a wrapped model cannot change to {probe.dtype} on {probe.device}",
        found=f"{parameter.dtype} on {parameter.device}",
        **parameter.__dict__["_fsdp_info"].where,
        cure='move or cast the model before fsdp_wrap, or ask for fsdp_wrap(..., precision="bf16")',
    )


def _update(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """An element-wise update in place: right on slices, if every operand is a slice or a scalar."""
    target = args[0] if args else next(_sharded_in(kwargs))  # initialisers pass theirs by keyword
    targets = list(target) if isinstance(target, (list, tuple)) else [target]
    if not name.startswith("_"):
        for operand in (*args[1:], *(v for v in kwargs.values() if v is not target)):
            if isinstance(operand, torch.Tensor) and not matches(operand, target):
                raise refusal(next(_sharded_in((args, kwargs))), name)
    written = {id(tensor) for tensor in targets}
    for tensor in _sharded_in((args, kwargs)):
        flat = tensor.__dict__["_fsdp_info"].flat
        if id(tensor) in written:
            flat.resting.wait()
            flat.masters.check()
        else:
            flat.check_values()
    result = func(*args, **kwargs)
    for tensor in targets:
        if isinstance(tensor, ShardedParameter):
            info = tensor.__dict__["_fsdp_info"]
            info.flat.mark_updated()
            if name in FILLING:
                info.flat.mark_filled(info.index)
    return result
