"""Gradients of sharded parameters, as users and torch's own utilities see them.

A :class:`ShardedGrad` is a plain tensor in everything but norms: a norm of a slice is not the norm of the gradient (and
one taken by hand brings a warning, see :mod:`fsdplite.gradient_part`).
``torch.nn.utils.clip_grad_norm_`` stays right: the norms it takes come back as :class:`PartialNorm`, which only
the final norm over all of them can turn into a number, with one all-reduce.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Sequence

import torch
import torch.distributed as dist

from .collectives import all_reduce
from .errors import ConfigError, GradientError
from .gradient_part import part_of, watch_reduction
from .groups import Groups
from .local_slice import COPIES, NORMS, engine_access, read_grad
from .watchdog import Waiting

if TYPE_CHECKING:
    from .flat_param import FlatParameter

__all__ = ["PendingGrad", "ShardedGrad", "combine_norms"]

_VECTOR_NORMS = {"linalg_vector_norm", "vector_norm"}
_OTHER_NORMS = NORMS - _VECTOR_NORMS - {"_foreach_norm"}


class ShardedGrad(torch.Tensor):
    """This rank's slice of a reduced gradient. ``_fsdp_shard`` keeps the shard it is a view of alive.

    ``_fsdp_ref`` is weak: a parameter's ``.grad`` is invisible to the garbage collector, so a strong reference back
    to the owner would never be found.
    """

    @property
    def _fsdp_flat(self) -> FlatParameter:
        return self._fsdp_ref()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in _VECTOR_NORMS:
            return _partial_norm(args, kwargs)
        if name == "_foreach_norm":
            ord_ = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            return [_partial_norm((tensor, ord_), {}) for tensor in args[0]]
        if name in _OTHER_NORMS:
            raise _norm_error(_first_sharded((*args, *kwargs.values())), name)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            raise _scaler_error(_first_sharded(args))
        if name in ("zero_", "_foreach_zero_"):
            _forget_pending(args[0])
        with engine_access():
            result = func(*args, **kwargs)
            if name in COPIES or (name == "__get__" and func.__self__.__name__ == "data"):
                return _like(result, args[0])
        watch_reduction(name, args, kwargs, result)
        return part_of(result, args, name)


_PENDING_METADATA = {
    "requires_grad_", "detach_", "size", "numel", "dim", "element_size", "untyped_storage", "data_ptr", "stride",
    "is_contiguous",
}  # fmt: skip


class PendingGrad(ShardedGrad):
    """Stands for a gradient that is still unreduced on every rank; setting it to None or to zero drops it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("zero_", "_foreach_zero_"):
            _forget_pending(args[0])
            if name == "_foreach_zero_":  # the list may hold reduced gradients too
                with engine_access():
                    func([gradient for gradient in args[0] if type(gradient) is not PendingGrad])
            return args[0]
        if name in ("__get__", "__set__") or name in _PENDING_METADATA:
            with engine_access():
                return func(*args, **(kwargs or {}))
        raise pending_error(_first_sharded(args)._fsdp_flat)


class PartialNorm(torch.Tensor):
    """Norms over this rank's slices: not numbers yet. ``_fsdp_sources`` names the owner of each element."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in ("to", "__get__"):
            with engine_access():
                result = func(*args, **kwargs)
            return _as_partial(result, args[0]._fsdp_sources) if name == "to" else result
        if name == "stack":
            with engine_access():
                stacked = func(*args, **kwargs)
            sources = []
            for norm in args[0]:
                sources.extend(getattr(norm, "_fsdp_sources", [None]))
            return _as_partial(stacked, sources)
        if name in _VECTOR_NORMS and args[0].dim() == 1:
            ord_ = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
            with engine_access():
                plain = args[0].as_subclass(torch.Tensor)
            entries = [(source.groups if source else None, plain[i]) for i, source in enumerate(args[0]._fsdp_sources)]
            flats = [source for source in args[0]._fsdp_sources if source]
            flats[0].unit.schedule.agreement.agree_on_extra("gradient norm", flats[0].unit)
            dtypes = [flat.dtype for flat in flats]
            return combine_norms(entries, float(ord_), norm_dtype(dtypes), plain.device)
        if name in ("dim", "ndimension", "size"):
            with engine_access():
                return func(*args, **kwargs)
        source = next((s for s in args[0]._fsdp_sources if s), None) if isinstance(args[0], PartialNorm) else None
        raise _norm_error_at(source, name)


def _as_partial(tensor: torch.Tensor, sources: Sequence[FlatParameter | None]) -> PartialNorm:
    partial = tensor.as_subclass(PartialNorm)
    partial._fsdp_sources = list(sources)
    return partial


def _like(result: Any, gradient: Any) -> Any:
    """A copy or view of all of a gradient keeps its class, but not its shard alive."""
    if isinstance(gradient, ShardedGrad) and isinstance(result, torch.Tensor) and result.numel() == gradient.numel():
        result = result.as_subclass(ShardedGrad)
        result._fsdp_ref = gradient._fsdp_ref
        result._fsdp_index = gradient._fsdp_index
        result._fsdp_shard = None
    return result


def combine_norms(
    entries: Sequence[tuple[Groups | None, torch.Tensor]], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The norm over everything, in ``dtype``, from norms over parts. Entries without groups are the same on every rank.

    Collective: one all-reduce of one element per distinct shard group.
    """
    message_dtype = _norm_dtype_on(device)  # one size on the wire, whatever this rank happens to hold
    powers: dict[int, tuple[Groups | None, torch.Tensor]] = {}
    for groups, norm in entries:
        key = id(groups.shard) if groups is not None and groups.shard is not None else 0
        value = norm.to(device=device, dtype=message_dtype)
        value = value if math.isinf(norm_type) or norm_type == 0 else value**norm_type
        if key in powers:
            known = powers[key][1]
            value = torch.maximum(known, value) if math.isinf(norm_type) else known + value
        powers[key] = (groups if key else None, value)
    total = torch.zeros((), device=device, dtype=message_dtype)
    for groups, value in powers.values():
        if groups is not None:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            value = value.clone()
            all_reduce(value, groups.shard, groups, Waiting("", "all-reduce of the gradient norm", 0), op).wait()
        total = torch.maximum(total, value) if math.isinf(norm_type) else total + value
    total = total if math.isinf(norm_type) or norm_type == 0 else total ** (1.0 / norm_type)
    return total.to(dtype)


def norm_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """fp32, or fp64 where a gradient is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def local_norm(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Norm of a slice; 0 for an empty one, whatever the order.

    In fp64 on CPU: the same sum is cut in other places at each stage and world size, and rounded to fp32 it should
    not show.
    """
    if gradient.numel() == 0:
        return torch.zeros((), device=gradient.device)
    dtype = torch.promote_types(gradient.dtype, _norm_dtype_on(gradient.device))
    return torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)


def _norm_dtype_on(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def pending_error(flat: FlatParameter) -> GradientError:
    return GradientError(
        "a gradient is still unsharded and unreduced: the last backward ran without synchronisation",
        **flat.where(),
        cure="run the last micro-batch outside no_sync() (or after set_requires_gradient_sync(True)), or drop the "
        "gradients with zero_grad()",
    )


def _partial_norm(args: tuple, kwargs: dict) -> torch.Tensor:
    gradient = args[0] if args else kwargs["x"]
    ord_ = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    if ord_ <= 0:
        raise ConfigError("the norm of a sharded gradient has a positive order", expected="> 0, or inf", found=ord_)
    if not isinstance(gradient, ShardedGrad):
        with engine_access():
            return local_norm(gradient, ord_)
    flat = gradient._fsdp_flat
    if (updates := flat.unit.schedule.updates()) is not None:
        raise updates.refusal("a norm of gradients", flat.unit_name)
    flat.gradient.refuse_pending()
    with engine_access():
        return _as_partial(local_norm(gradient.as_subclass(torch.Tensor), ord_), [flat])


def _forget_pending(target: Any) -> None:
    for gradient in target if isinstance(target, (list, tuple)) else (target,):
        flat = gradient._fsdp_flat if isinstance(gradient, ShardedGrad) else None
        if flat is None or flat.gradient is None:
            continue
        with engine_access():
            is_own = read_grad(flat.users[gradient._fsdp_index]) is gradient  # and not a copy somebody keeps
        if is_own:
            flat.gradient.drop(gradient._fsdp_index)


def _first_sharded(args: Any) -> Any:
    for item in args:
        if isinstance(item, ShardedGrad):
            return item
        if isinstance(item, (list, tuple)):
            found = _first_sharded(item)
            if found is not None:
                return found
    return None


def _norm_error(gradient: ShardedGrad, name: str) -> GradientError:
    return _norm_error_at(gradient._fsdp_flat, name, gradient._fsdp_index)


def _norm_error_at(flat: FlatParameter | None, name: str, index: int = 0) -> GradientError:
    return GradientError(
        f"'{name}' of a sharded gradient would be the number of one rank's slice",
        unit=flat.unit_name if flat else None,
        parameter=flat.names[index] if flat else None,
        rank=flat.groups.rank if flat else None,
        cure="use model.clip_grad_norm_(max_norm), torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), or "
        "fsdp.full_grad(model, name) for one whole gradient",
    )


def _scaler_error(gradient: ShardedGrad) -> GradientError:
    flat = gradient._fsdp_flat
    return GradientError(
        "torch.amp.GradScaler looks for overflows in this rank's slices only, so ranks would skip steps apart",
        unit=flat.unit_name,
        rank=flat.groups.rank,
        cure="use fsdp.LossScaler, which has the same methods",
    )
