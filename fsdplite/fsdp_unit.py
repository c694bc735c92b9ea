"""What the user's module becomes: a subclass of its own class, made on the fly.

Overriding ``__call__`` on the class, rather than registering forward hooks, leaves the user's hooks inside, where
weights are whole, and a compiled block compiled inside. Name and qualified name stay those of the user's class.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .errors import ConfigError, FSDPError, WrapError
from .norm import clip_grad_norm
from .local_slice import info_of
from .parameter import ShardedParameter
from .unit import UnitState
from .whole_values import prefixed_names

__all__ = ["FSDPUnit", "become_unit", "state_of"]


def state_of(module: nn.Module) -> UnitState | None:
    """The unit state of a wrapped module; None for a plain one, also a slice or copy of a wrapped class."""
    return module.__dict__.get("_fsdp")


class FSDPUnit:
    """A wrapped module. Mixed into the module's class by ``fsdp_wrap``; not made by hand."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not passed on: a registry in the user's base class must not see the class made on the fly."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.__dict__.get("_fsdp")
        if unit is None:  # a slice of a wrapped Sequential is an instance of the class and no unit
            return super().__call__(*args, **kwargs)
        return unit.run(super().__call__, args, kwargs)

    # ------------------------------------------------------------------ training

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate without reducing, at every stage.

        Memory: every unit keeps its whole unsharded gradient in fp32 (4 bytes a parameter) until the next
        synchronised backward. Without ``no_sync`` micro-batches accumulate in the shard instead.
        """
        units = _units_below(self)
        before = [unit.requires_sync for unit in units]
        for unit in units:
            unit.requires_sync = False
        try:
            yield
        finally:
            for unit, value in zip(units, before):
                unit.requires_sync = value

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards reduce gradients, from now on (see :meth:`no_sync`)."""
        for unit in _units_below(self):
            unit.requires_sync = bool(requires_gradient_sync)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of gradients over all ranks by ``factor``; None is the number of ranks (the mean)."""
        if factor is not None and not factor > 0:
            raise ConfigError("the divide factor must be positive", expected="a number > 0 or None", found=factor)
        _own_state(self).schedule.divide_factor = None if factor is None else float(factor)

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

        Args:
            max_norm: Largest norm.
            norm_type: Order of the norm; ``float("inf")`` or ``"inf"`` for the maximum.

        Returns:
            The global norm, a 0-d tensor (fp32; fp64 for fp64 gradients) with the same value on every rank.

        Raises:
            ConfigError: An argument is no number.
            GradientError: A gradient is unreduced, because the last backward ran without synchronisation.

        Collective: one all-reduce of one element per distinct shard group. Every rank must call it.
        """
        try:
            max_norm, norm_type = float(max_norm), float(norm_type)
        except (TypeError, ValueError):
            raise ConfigError(
                "clip_grad_norm_ takes a number, the largest norm",
                expected="a number, and another one or 'inf' as norm_type",
                found=f"{type(max_norm).__name__} and {norm_type!r}",
                cure="write model.clip_grad_norm_(1.0): it knows the model's parameters",
            ) from None
        below = {id(p) for p in self.parameters()}
        ignored = [p for p in _own_state(self).schedule.ignored.parameters if id(p) in below]
        return clip_grad_norm(_own_state(self), _units_below(self), ignored, max_norm, norm_type)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As ``nn.Module.zero_grad``; also drops unreduced gradients, and full weights kept for a backward."""
        super().zero_grad(*args, **kwargs)
        set_to_none = bool(args[0] if args else kwargs.get("set_to_none", True))
        for unit in _units_below(self):
            for flat in unit.flats:
                flat.zero_grad(set_to_none)
        unit = state_of(self)
        if unit is not None and unit.schedule.root is unit:
            unit.schedule.rest_all()

    # ------------------------------------------------------------------ state, moves and copies

    # Arguments are passed on as they came: a user's own method may take fewer, or others.
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes what ``state_dict()`` gave, and full tensors. Values are copied; ``assign=True`` is refused."""
        if (kwargs.get("assign") or True in args[1:2]) and state_of(self) is not None:
            raise ConfigError(
                "load_state_dict(assign=True) would replace the sharded parameters",
                cure="leave assign=False: values are copied into the slices",
            )
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as problem:
            prefixed = prefixed_names(self, state_dict)
            if prefixed is None or isinstance(problem, FSDPError):
                raise
            raise prefixed from problem

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``half``, ``cuda`` and the like: no-ops pass; a change is refused before anything has changed."""
        for name, parameter in self.named_parameters():
            if info_of(parameter) is not None and type(parameter) is ShardedParameter:
                if fn(parameter) is not parameter:
                    raise WrapError(
                        "a wrapped model cannot be moved, cast or emptied",
                        unit=info_of(parameter).flat.unit_name,
                        parameter=name,
                        cure='do it before fsdp_wrap; for low precision ask for fsdp_wrap(..., precision="bf16")',
                    )
        # Swapping a parameter with itself, as torch would do then, is refused for one that hooks are registered on.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            return super()._apply(fn, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def __deepcopy__(self, memo: dict) -> Any:
        unit = state_of(self)
        if unit is not None and (unit.is_active or any(f.binding.is_bound or f.binding.shows_others for f in unit.flats)):
            raise FSDPError(
                "a unit cannot be copied while its full weights are shown",
                unit=unit.name,
                rank=unit.groups.rank,
                cure="copy outside the forward, the backward and full_params",
            )
        own = getattr(super(), "__deepcopy__", None)
        if own is not None and not isinstance(self, torch.fx.GraphModule):  # which makes one of another class
            return own(memo)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for key, value in self.__dict__.items():
            # The compiled call is bound to the original; the copy compiles its own.
            twin.__dict__[key] = None if key == "_compiled_call_impl" else copy.deepcopy(value, memo)
        return twin

    def __prepare_scriptable__(self) -> Any:
        raise WrapError(
            "torch.jit.script cannot compile a wrapped module",
            cure="script the plain module, before fsdp_wrap or loaded from fsdp.full_state_dict",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if state_of(self) is None:
            return super().__reduce_ex__(protocol)
        raise FSDPError(
            "a wrapped module cannot be pickled, nor copied by copy.copy: it holds this rank's slices and groups",
            unit=state_of(self).name,
            cure="use fsdp.save_checkpoint(root, model, ...), or write what fsdp.full_state_dict(model) returns; "
            "copy.deepcopy(model) makes a copy",
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """DistributedDataParallel reads this first; it would broadcast rank 0's slices over everybody's."""
        if sys._getframe(1).f_globals.get("__name__") != "torch.nn.parallel.distributed":
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise WrapError(
            "DistributedDataParallel cannot hold a wrapped model: gradients are averaged already",
            cure="drop DistributedDataParallel; for plain data parallel training use fsdp_wrap(model, stage=0)",
        )


def _own_state(module: Any) -> UnitState:
    unit = state_of(module)
    if unit is None:
        raise FSDPError(
            f"this {type(module).__name__} is not a unit",
            cure="call it on the module that was given to fsdp_wrap",
        )
    return unit


def _units_below(module: Any) -> list[UnitState]:
    _own_state(module)
    return [unit for m in module.modules() if (unit := state_of(m)) is not None]


_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def become_unit(module: nn.Module, unit: UnitState, forward_methods: tuple[str, ...]) -> None:
    """Swap the module's class and attach the state."""
    cls = type(module)
    methods = tuple(name for name in forward_methods if callable(getattr(cls, name, None)))
    key = (cls, methods)
    if key not in _classes:
        namespace: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__slots__": (),
        }
        for name in methods:
            namespace[name] = _entry_point(cls, name)
        _classes[key] = _subclass(cls, namespace)
    module.__class__ = _classes[key]
    module.__dict__["_fsdp"] = unit


def _subclass(cls: type, namespace: dict[str, Any]) -> type:
    """A unit's class. A user's metaclass is not run: it may number, register or change the classes it makes."""
    metaclass = type(cls)
    made = type.__new__(metaclass, cls.__name__, (FSDPUnit, cls), namespace)
    if isinstance(made, abc.ABCMeta):
        abc._abc_init(made)  # isinstance() keeps its answers there, and must not mix them with those of cls
    return made


def _entry_point(cls: type, name: str) -> Any:
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit = self.__dict__.get("_fsdp")
        bound = functools.partial(original, self)
        return bound(*args, **kwargs) if unit is None else unit.run(bound, args, kwargs)

    return method
