"""What a model and an optimizer want from a checkpoint: compared with what is stored before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from ..errors import CheckpointError
from .dtypes import is_float, widens
from .manifest import TensorRecord
from .tensor_bytes import bytes_of, host_empty, torch_dtype

__all__ = ["Differences", "Target", "check_dtype", "sink"]

_SHOWN = 20  # lines of each kind
_NARROWING = "that cast rounds"


@dataclass
class Target:
    """Elements ``[low, high)`` of the stored tensor ``source``, to be written to a one-dimensional tensor."""

    source: str
    low: int
    high: int
    into: torch.Tensor


@dataclass
class Differences:
    """Everything in which a checkpoint and a model differ, to be told at once.

    Attributes:
        missing: Wanted and not stored.
        unexpected: Stored and not wanted.
        wrong: Shapes and so on that do not fit, in words; errors also when not strict.
        dtypes: The names of tensors by what is wrong with their dtypes, in words; errors as well.
        notes: What else ``strict`` refuses, in words.
    """

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def refuse(self, strict: bool, path: str, *, may_cast: bool = True) -> None:
        """Raise if there is anything. ``may_cast``: the call has an ``allow_cast`` to recommend."""
        names = []
        if strict:
            names += [f"missing: '{name}' {what}" for name, what in self.missing.items()]
            names += [f"unexpected: '{name}' {what}" for name, what in self.unexpected.items()]
        notes = self.notes if strict else []
        count = len(self.wrong) + sum(map(len, self.dtypes.values())) + len(names) + len(notes)
        if not count:
            return
        lines = _first(self.wrong) + [f"dtype: {_counted(found)} {what}" for what, found in self.dtypes.items()]
        for kind in ("missing", "unexpected"):
            lines += _first([line for line in names if line.startswith(kind)])
        cures = []
        if self.wrong or names or notes:
            cures.append("load into the model and optimizer that were saved")
        if names or notes:
            but = " (other shapes stay errors)" if self.wrong else ""
            cures.append(f"pass strict=False to leave out what is missing or unexpected{but}")
        if any(_NARROWING in what for what in self.dtypes):
            call = "pass allow_cast=True" if may_cast else "export with dtype="
            cures.append(
                f'for dtypes, {call} to round, or build the model in the stored one (precision="bf16" computes in bf16 '
                "all the same)"
            )
        raise CheckpointError(
            f"the checkpoint does not fit, in {count} point{'s' if count > 1 else ''}; nothing was loaded",
            found="\n    ".join(["", *lines, *_first(notes)]),
            phase="compare",
            path=path,
            cure="; ".join(cures) or None,
        )


def _first(lines: list[str]) -> list[str]:
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more like these"] if len(lines) > _SHOWN else [])


def _counted(names: list[str]) -> str:
    """The subject of a sentence about some tensors: all names if they are few, or the first and how many."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    if len(names) <= 3:
        return f"{shown} {'is' if len(names) == 1 else 'are'}"
    return f"{len(names)} tensors ({shown}, ...) are"


def describe(record: TensorRecord) -> str:
    return f"of shape {tuple(record.shape)}, {record.dtype}"


def check_dtype(name: str, stored: str, wanted: str, allow_cast: bool, differences: Differences) -> None:
    """Widening is exact and goes without asking; rounding needs ``allow_cast``; another kind of number never fits."""
    fits = widens(stored, wanted)
    if fits or (fits is False and allow_cast):
        return
    why = _NARROWING if fits is False else "these are different kinds of numbers"
    if fits is None and not is_float(stored) and not is_float(wanted):
        why = "the values might not fit"
    differences.dtypes.setdefault(f"stored as {stored}, wanted as {wanted}: {why}", []).append(name)


def sink(target: Target, stored: str, first: int) -> Callable[[int, memoryview], None]:
    """A function that takes stored bytes, in order, and puts their values into the target.

    Args:
        target: Where to.
        stored: The dtype of the bytes.
        first: The element of the stored tensor at which byte 0 is.
    """
    dtype = torch_dtype(stored)
    into = target.into
    start = first - target.low

    def take(offset: int, view: memoryview) -> None:
        begin = start + offset // dtype.itemsize
        if into.dtype == dtype and into.device.type == "cpu":
            where = begin * dtype.itemsize
            bytes_of(into)[where : where + len(view)] = view
            return
        values = host_empty(len(view) // dtype.itemsize, dtype)
        bytes_of(values)[:] = view
        with torch.no_grad():
            into[begin : begin + values.numel()].copy_(values)

    return take


def into_memory(tensor: Any) -> tuple[torch.Tensor, Callable[[], None]]:
    """A contiguous one-dimensional tensor to write to, and what has to be called when it is full."""
    flat = tensor.detach()
    if flat.is_contiguous() and not flat.is_conj() and not flat.is_neg():
        return flat.view(-1), lambda: None
    copy = torch.empty(flat.numel(), dtype=flat.dtype, device=flat.device)

    def write_back() -> None:
        with torch.no_grad():
            flat.copy_(copy.view(flat.shape))

    return copy, write_back


def shares_memory_inside(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor are one in memory, as after ``expand``."""
    extents = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)
    reached = 0
    for stride, size in extents:
        if stride <= reached:
            break
        reached += stride * (size - 1)
    else:
        return False
    if tensor.numel() == 0 or extents[0][0] == 0:
        return tensor.numel() > 0
    # Strides that interleave, which is rare: look at every element.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in extents:
        places = (places[:, None] + torch.arange(size, device="cpu") * stride).reshape(-1)
    return places.unique().numel() < places.numel()
