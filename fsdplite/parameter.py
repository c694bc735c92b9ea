"""The user's parameters while they are sharded.

After wrapping, a user's ``nn.Parameter`` holds this rank's slice. Its class becomes :class:`ShardedParameter`, which
answers metadata and element-wise updates and refuses everything that would need the whole tensor. Inside
``optimizer.step()`` the class is the exact ``nn.Parameter`` (see ``optimizer_hooks``), so foreach and fused updates
stay the defaults.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any, Iterator

import torch
from torch import nn

from .errors import ShardedAccessError

if TYPE_CHECKING:
    from .flat_param import FlatParameter

__all__ = ["LocalSlice", "ParameterInfo", "RestingLeaf", "ShardedParameter", "as_local_slice", "engine_access", "info_of", "read_grad", "write_grad"]

# Plain access to .grad, past the property below; to be used under engine_access().
read_grad = torch._C.TensorBase.grad.__get__
write_grad = torch._C.TensorBase.grad.__set__
engine_access = torch._C.DisableTorchFunctionSubclass  # the engine's own reads and writes skip the checks below


class ParameterInfo:
    """What a user's parameter knows about its place: the flat parameter that owns it and its index there."""

    __slots__ = ("flat", "index")

    def __init__(self, flat: FlatParameter, index: int) -> None:
        self.flat = flat
        self.index = index

    @property
    def name(self) -> str:
        return self.flat.names[self.index]

    @property
    def full_shape(self) -> torch.Size:
        return torch.Size(self.flat.layout.slots[self.index].shape)

    @property
    def local_range(self) -> tuple[int, int]:
        return self.flat.layout.local_range(self.index, self.flat.groups.shard_rank)


def info_of(parameter: torch.Tensor) -> ParameterInfo | None:
    """The info of a parameter that a unit owns, else None."""
    return parameter.__dict__.get("_fsdp_info") if isinstance(parameter, torch.Tensor) else None


# Still this rank's part of a parameter or gradient: it stays refused where a part would be taken for the whole.
COPIES = {
    "clone", "detach", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "contiguous", "abs", "view", "reshape",
    "flatten",
}  # fmt: skip
NORMS = {
    "linalg_vector_norm", "vector_norm", "norm", "linalg_norm", "linalg_matrix_norm", "matrix_norm", "nuclear_norm",
    "frobenius_norm", "dist", "renorm", "renorm_", "normalize", "cdist", "_foreach_norm",
}  # fmt: skip


class LocalSlice(torch.Tensor):
    """A plain tensor in element-wise arithmetic. It refuses norms, and to be written to a file as if it were whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in NORMS:
            owner = next(_instances_in((args, kwargs or {}), LocalSlice))
            raise owner._refuse_norm(name)
        with engine_access():
            result = func(*args, **(kwargs or {}))
        if name in COPIES and isinstance(result, torch.Tensor) and isinstance(args[0], LocalSlice):
            return as_local_slice(result, args[0]._fsdp_info) if result.numel() == args[0].numel() else result
        return result

    def _refuse_norm(self, call: str) -> ShardedAccessError:
        info: ParameterInfo = self._fsdp_info
        with engine_access():
            numel = self.numel()
        return ShardedAccessError(
            f"'{call}' of a parameter's slice would be the number of one rank's part",
            expected=f"the full tensor of shape {tuple(info.full_shape)}",
            found=f"this rank's slice of {numel} of {info.full_shape.numel()} elements",
            unit=info.flat.unit_name,
            parameter=info.name,
            rank=info.flat.groups.rank,
            cure="open `with fsdp.full_params(module):`, where the parameter is whole; for the slice alone take "
            "p.detach().as_subclass(torch.Tensor)",
        )

    def _refuse(self, call: str) -> ShardedAccessError:
        info = self.__dict__.get("_fsdp_info")
        return ShardedAccessError(
            f"{call} of a rank's slice would write a part as if it were the whole",
            found=f"{self.numel()} elements" + (f" of {info.full_shape.numel()}" if info else ""),
            unit=info.flat.unit_name if info else None,
            parameter=info.name if info else None,
            rank=info.flat.groups.rank if info else None,
            cure="use fsdp.save_checkpoint(root, model, optimizer, ...) for a checkpoint, or write what "
            "fsdp.full_state_dict(model) returns",
        )

    def __reduce_ex__(self, protocol: int) -> Any:
        raise self._refuse("pickling")

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copied = self.clone()
        memo[id(self)] = copied
        return copied

    def untyped_storage(self) -> Any:
        raise self._refuse("reading the storage")

    def storage(self) -> Any:
        raise self._refuse("reading the storage")

    def data_ptr(self) -> int:
        raise self._refuse("reading the memory")


def as_local_slice(tensor: torch.Tensor, info: ParameterInfo) -> LocalSlice:
    """A tensor of one element per element of this rank's slice, guarded."""
    local = tensor.as_subclass(LocalSlice)
    local._fsdp_info = info
    return local


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
_ELEMENTWISE = {
    "zero_", "fill_", "copy_", "add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_",
    "addcmul_", "addcdiv_", "lerp_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "neg_", "negative_", "abs_",
    "sqrt_", "rsqrt_", "square_", "reciprocal_", "pow_", "exp_", "log_", "sign_", "nan_to_num_", "round_", "floor_",
    "ceil_", "trunc_", "tanh_", "sigmoid_", "relu_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__",
    "constant_", "ones_", "zeros_",
}  # fmt: skip
_WRITES = {"__setitem__"} | {
    f"__i{operator}__"
    for operator in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
_FILLING = {"zero_", "fill_", "copy_", "constant_", "ones_", "zeros_"}
_RANDOM = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_",
    "trunc_normal_",
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
        if _is_initialiser(sys._getframe(1)):
            raise _refusal(self, sys._getframe(1).f_code.co_name)
        return len(self.full_shape)

    def ndimension(self) -> int:
        if _is_initialiser(sys._getframe(1)):
            raise _refusal(self, sys._getframe(1).f_code.co_name)
        return len(self.full_shape)

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
            if name == "detach":
                return as_local_slice(func(*args, **kwargs), args[0].__dict__["_fsdp_info"])
            if name == "clone":
                return as_local_slice(func(*args, **kwargs), args[0].__dict__["_fsdp_info"])
            if name in _MAKERS:
                return func(*args, **kwargs)
            if name in _CASTS:
                return _cast(func, name, args, kwargs)
            if name in _ELEMENTWISE or _is_foreach_update(name):
                return _update(func, name, args, kwargs)
        owner = next(_sharded_in((args, kwargs)))
        if func is torch.autograd.grad:
            raise _refuse_autograd_grad(owner)
        raise _refusal(owner, name)


def _refuse_autograd_grad(parameter: torch.Tensor) -> ShardedAccessError:
    info: ParameterInfo = parameter.__dict__["_fsdp_info"]
    return ShardedAccessError(
        "torch.autograd.grad cannot return gradients of sharded parameters",
        unit=info.flat.unit_name,
        parameter=info.name,
        rank=info.flat.groups.rank,
        cure="call loss.backward(): the slice is in parameter.grad, the whole in fsdp.full_grad(model, name). "
        "torch.autograd.grad with respect to inputs works",
    )


def _is_initialiser(frame: types.FrameType) -> bool:
    """Shape-aware initialisers ask for a shape first, and return silently for the empty slice some ranks hold."""
    return frame.f_globals.get("__name__") == "torch.nn.init"


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
        leaf = next(_instances_in((args, kwargs or {}), RestingLeaf))
        info: ParameterInfo = leaf.__dict__["_fsdp_info"]
        raise ShardedAccessError(
            f"the full weight '{info.name}' was kept past its unit's forward and used by {name or 'an operation'}",
            unit=info.flat.unit_name,
            parameter=info.name,
            rank=info.flat.groups.rank,
            cure="keep a copy (weight.detach().clone()), or open `with fsdp.full_params(module):` where it is used",
        )

    def __repr__(self, **kwargs: Any) -> str:
        return f"RestingLeaf({self.__dict__['_fsdp_info'].name!r})"

    def __reduce_ex__(self, protocol: int) -> Any:
        raise ShardedAccessError("a full weight kept past its unit's forward cannot be pickled or copied")


def _is_foreach_update(name: str) -> bool:
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


def _refusal(parameter: torch.Tensor, call: str) -> ShardedAccessError:
    info: ParameterInfo = parameter.__dict__["_fsdp_info"]
    with engine_access():
        numel = parameter.numel()
    if call in _RANDOM or call in _WRITES or (call.endswith("_") and not call.endswith("__")):
        cure = (
            "open `with fsdp.full_params(module, writeback=True):` around the edit; inside it the parameter is whole, "
            "and what is written there is kept"
        )
    else:
        cure = (
            "use it inside its unit's forward; for another entry point list the method in "
            "fsdp_wrap(..., forward_methods=(...)); to read it elsewhere open `with fsdp.full_params(module):` "
            "(with writeback=True to edit it)"
        )
    return ShardedAccessError(
        f"parameter '{info.name}' is sharded and was used as if it were whole, by {call or 'an operation'}",
        expected=f"the full tensor of shape {tuple(info.full_shape)}",
        found=f"this rank's slice of {numel} of {info.full_shape.numel()} elements",
        unit=info.flat.unit_name,
        parameter=info.name,
        rank=info.flat.groups.rank,
        cure=cure,
    )


def _sharded_in(value: Any) -> Iterator[torch.Tensor]:
    return _instances_in(value, ShardedParameter)


def _instances_in(value: Any, cls: type) -> Iterator[torch.Tensor]:
    if isinstance(value, cls):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _instances_in(item, cls)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _instances_in(item, cls)


def _property(func: Any, access: str, args: tuple) -> Any:
    name = func.__self__.__name__
    parameter = args[0]
    if access == "__get__":
        if name in _UNREADABLE_PROPERTIES:
            raise _refusal(parameter, name)
        if name == "shape" and _is_initialiser(sys._getframe(2)):
            raise _refusal(parameter, sys._getframe(2).f_code.co_name)
        value = func(*args)
        return as_local_slice(value, parameter.__dict__["_fsdp_info"]) if name == "data" else value
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
            raise _refusal(parameter, "assigning .data of another dtype")
        parameter.detach().copy_(value)
        info.flat.mark_updated()
        return
    raise _refusal(parameter, "assigning .data")


def _metadata(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    if name == "size" and (len(args) > 1 or kwargs):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim is not None and len(args[0].__dict__["_fsdp_info"].full_shape) != 1:
            raise _refusal(args[0], "size")
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
        unit=parameter.__dict__["_fsdp_info"].flat.unit_name,
        parameter=parameter.__dict__["_fsdp_info"].name,
        rank=parameter.__dict__["_fsdp_info"].flat.groups.rank,
        cure='move or cast the model before fsdp_wrap, or ask for fsdp_wrap(..., precision="bf16")',
    )


def _matches(operand: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether an operand of an element-wise update is a scalar, or the same slice of a tensor of the same shape."""
    if torch.Tensor.dim(operand) == 0 and info_of(operand) is None:
        return True
    if torch.Tensor.size(operand) != torch.Tensor.size(target):
        return False
    own, other = info_of(target), info_of(operand)
    return own is None or other is None or (own.full_shape, own.local_range) == (other.full_shape, other.local_range)


def _update(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """An element-wise update in place: right on slices, if every operand is a slice or a scalar."""
    target = args[0] if args else next(_sharded_in(kwargs))  # initialisers pass theirs by keyword
    targets = list(target) if isinstance(target, (list, tuple)) else [target]
    if not name.startswith("_"):
        for operand in (*args[1:], *(v for v in kwargs.values() if v is not target)):
            if isinstance(operand, torch.Tensor) and not _matches(operand, target):
                raise _refusal(next(_sharded_in((args, kwargs))), name)
    for tensor in targets:
        if isinstance(tensor, ShardedParameter):
            tensor.__dict__["_fsdp_info"].flat.resting.wait()
    result = func(*args, **kwargs)
    for tensor in targets:
        if isinstance(tensor, ShardedParameter):
            info = tensor.__dict__["_fsdp_info"]
            info.flat.mark_updated()
            if name in _FILLING:
                info.flat.mark_filled(info.index)
    return result
