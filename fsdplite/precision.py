"""Which dtype each kind of tensor has: parameters in compute, the wire, outputs, buffers."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .errors import ConfigError, did_you_mean
from .keywords import known_keywords

__all__ = ["Precision", "as_precision"]


@known_keywords
@dataclass(frozen=True)
class Precision:
    """A mixed precision policy.

    The shard that the optimizer sees (the master) is fp32 whenever a ``param_dtype`` is set, whatever dtype the
    weights had before wrapping.

    Attributes:
        param_dtype: Dtype of gathered weights in forward and backward, and of the all-gather. None keeps the
            parameters' own dtype.
        reduce_dtype: Dtype of the gradient reduction on the wire. None means fp32 (fp64 for fp64 parameters).
        output_dtype: Floating outputs of each unit are cast to this. None leaves them.
        cast_forward_inputs: Cast floating inputs of each unit to ``param_dtype``.
        buffer_dtype: Floating buffers have this dtype inside forward, and their own outside. None leaves them.
        keep: Names of module classes, or globs over dotted module names, that stay fp32 inside a low precision
            unit: their weights, inputs and computation. Modules with running statistics always do.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    keep: tuple[str | type, ...] = ()

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ConfigError(
                    f"Precision.{field} must be a floating dtype", expected="a torch.dtype or None", found=repr(value)
                )
        keep = self.keep
        if isinstance(keep, (str, type)):
            keep = (keep,)
        for entry in keep:
            if not isinstance(entry, (str, type)) or entry == "":
                raise ConfigError(
                    "Precision.keep takes module classes, class names or globs over module names", found=repr(entry)
                )
        object.__setattr__(self, "keep", tuple(keep))

    def keeps(self, name: str, module: nn.Module) -> bool:
        """Whether this module stays in fp32: named in ``keep``, or holding running statistics."""
        if self.param_dtype is None or self.param_dtype.itemsize >= 4:
            return False
        if has_running_statistics(module):
            return True
        mro = {cls.__name__ for cls in type(module).__mro__}
        for entry in self.keep:
            if isinstance(entry, type):
                if isinstance(module, entry):
                    return True
            elif entry in mro or fnmatchcase(name, entry):
                return True
        return False

    def compute_dtype(self, dtype: torch.dtype, kept: bool) -> torch.dtype:
        """Dtype in which a parameter of ``dtype`` takes part in forward and backward."""
        if self.param_dtype is None or not dtype.is_floating_point:
            return dtype
        return torch.float32 if kept else self.param_dtype

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the shard the optimizer sees: fp32 under a policy, never narrower than the parameter."""
        if self.param_dtype is None or not dtype.is_floating_point:
            return dtype
        return dtype if dtype.itemsize > 4 else torch.float32

    def wire_dtype(self, master: torch.dtype) -> torch.dtype:
        """Dtype of the gradient on the wire."""
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return master if master.itemsize >= 4 else torch.float32

    def describe(self) -> str:
        """Stable text, compared across ranks at wrap time."""
        keep = ",".join(e if isinstance(e, str) else e.__qualname__ for e in self.keep)
        return (
            f"param={self.param_dtype} reduce={self.reduce_dtype} output={self.output_dtype} "
            f"inputs={self.cast_forward_inputs} buffer={self.buffer_dtype} keep={keep}"
        )


_WORDS = {
    "fp32": Precision(),
    "bf16": Precision(param_dtype=torch.bfloat16),
    "fp16": Precision(param_dtype=torch.float16),
}


def as_precision(value: Any) -> Precision:
    """``None``, a word or a :class:`Precision`, as a :class:`Precision`."""
    if value is None:
        return _WORDS["fp32"]
    if isinstance(value, Precision):
        return value
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    words = ", ".join(f'"{word}"' for word in _WORDS)
    meant = next((word for word, known in _WORDS.items() if known.param_dtype is value), value)
    found = f"{value!r}" + did_you_mean(meant, _WORDS)
    raise ConfigError("unknown precision", expected=f"{words}, a Precision, or None", found=found)


def has_running_statistics(module: nn.Module) -> bool:
    """Whether the module updates floating statistics in forward (batch and instance norms)."""
    return getattr(module, "running_mean", None) is not None or getattr(module, "running_var", None) is not None
