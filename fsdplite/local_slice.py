"""One rank's part of a parameter, as a tensor that is not taken for the whole: what it answers and what it refuses."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .errors import ShardedAccessError
from .recompute.lost_gradients import is_running_again

if TYPE_CHECKING:
    from .flat_param import FlatParameter

__all__ = [
    "COPIES", "ELEMENTWISE", "FILLING", "NORMS", "LocalSlice", "ParameterInfo", "as_local_slice", "engine_access",
    "info_of", "instances_in", "is_initialiser", "matches", "read_grad", "refusal", "write_grad",
]  # fmt: skip

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
    def where(self) -> dict[str, Any]:
        """Unit, parameter and rank, for an error."""
        return self.flat.where(self.index)

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
ELEMENTWISE = {
    "zero_", "fill_", "copy_", "add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_",
    "addcmul_", "addcdiv_", "lerp_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "neg_", "negative_", "abs_",
    "sqrt_", "rsqrt_", "square_", "reciprocal_", "pow_", "exp_", "log_", "sign_", "nan_to_num_", "round_", "floor_",
    "ceil_", "trunc_", "tanh_", "sigmoid_", "relu_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__",
    "constant_", "ones_", "zeros_",
}  # fmt: skip
_WRITES = {"__setitem__"} | {
    f"__i{operator}__"
    for operator in (
        "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
    )
}  # fmt: skip
FILLING = {"zero_", "fill_", "copy_", "constant_", "ones_", "zeros_"}
_RANDOM = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_",
    "trunc_normal_",
}  # fmt: skip
# As many numbers as the slice has: with one seed ranks would repeat each other.
_DRAWN = {"randn_like", "rand_like", "randint_like", "bernoulli", "dropout"}


class LocalSlice(torch.Tensor):
    """A plain tensor in element-wise arithmetic. It refuses norms, and to be written to a file as if it were whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in NORMS:
            owner = next(instances_in((args, kwargs or {}), LocalSlice))
            raise owner._refuse_norm(name)
        misuse = _misuse(func, name, args, sys._getframe(1))
        if misuse is not None:
            raise refusal(next(instances_in((args, kwargs or {}), LocalSlice)), misuse)
        written = [info.flat for info in _written(name, args)]
        for flat in written:
            flat.resting.wait()
        with engine_access():
            result = func(*args, **(kwargs or {}))
        for flat in written:
            flat.mark_updated()
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
            **info.where,
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


def _written(name: str, args: tuple) -> Iterator[ParameterInfo]:
    """The parameters that an operation writes through ``.data``, ``detach()`` or a value of ``state_dict()``."""
    is_foreach = name.startswith("_foreach_") and name.endswith("_")
    if is_foreach or name in ELEMENTWISE or name in _WRITES:
        for target in instances_in(args[:1], LocalSlice):
            info = target.__dict__["_fsdp_info"]
            with engine_access():
                own, shard = (torch.Tensor.untyped_storage(t)._cdata for t in (target, info.flat.users[info.index]))
            if own == shard:  # else a copy, or optimizer state
                yield info


def is_initialiser(frame: types.FrameType) -> bool:
    """Shape-aware initialisers ask for a shape first, and return silently for the empty slice some ranks hold."""
    return frame.f_globals.get("__name__") == "torch.nn.init"


def _misuse(func: Any, name: str, args: tuple, caller: types.FrameType) -> str | None:
    """The name of an operation that means something else in a slice than in the whole, or would repeat in each slice."""
    if name in _RANDOM or name in _DRAWN:
        return name
    if name == "__setitem__":
        return None if _is_everywhere(args[1]) else name
    if name in FILLING and len(args) < 2:
        return None
    if name in ELEMENTWISE and isinstance(args[0], LocalSlice):
        with engine_access():
            fits = all(matches(operand, args[0]) for operand in args[1:] if isinstance(operand, torch.Tensor))
        return None if fits else name
    if is_initialiser(caller):
        return caller.f_code.co_name
    return name if getattr(func, "__module__", None) == "torch.nn.init" else None


def _is_everywhere(index: Any) -> bool:
    """Whether an index means in a slice what it means in the whole: every element, or those that a mask picks."""
    return index.dtype is torch.bool if isinstance(index, torch.Tensor) else index in (Ellipsis, slice(None))


def matches(operand: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether an operand of an element-wise update is a scalar, or the same slice of a tensor of the same shape."""
    if torch.Tensor.numel(operand) == 1 and info_of(operand) is None:
        return True
    if torch.Tensor.size(operand) != torch.Tensor.size(target):
        return False
    own, other = info_of(target), info_of(operand)
    return own is None or other is None or (own.full_shape, own.local_range) == (other.full_shape, other.local_range)


def instances_in(value: Any, cls: type) -> Iterator[torch.Tensor]:
    if isinstance(value, cls):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from instances_in(item, cls)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from instances_in(item, cls)


def refusal(parameter: torch.Tensor, call: str) -> ShardedAccessError:
    info: ParameterInfo = parameter.__dict__["_fsdp_info"]
    with engine_access():
        numel = parameter.numel()
    if info.flat.unit is not None and info.flat.unit.is_active:
        cure = (
            "its unit's forward runs, and this is the resting parameter, reached past its module (through a list, a "
            "closure, another object's attribute): read it as the attribute of the module that holds it"
        )
    elif is_running_again():
        cure = (
            "the backward of its unit was over when a reentrant checkpoint ran this segment again: call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    elif call in _RANDOM or call in _WRITES or (call.endswith("_") and not call.endswith("__")):
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
        **info.where,
        cure=cure,
    )
