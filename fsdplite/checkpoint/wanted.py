"""What a model and an optimizer want from a checkpoint: compared with what is stored before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from ..errors import CheckpointError
from .dtypes import is_float, widens
from .manifest import TensorRecord
from .tensor_bytes import bytes_of, torch_dtype

__all__ = ["Differences", "Target", "check_dtype", "sink"]


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
        wrong: Shapes and dtypes that do not fit, in words; errors also when not strict.
        notes: What else ``strict`` refuses, in words.
    """

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, strict: bool, path: str) -> None:
        lines = list(self.wrong)
        if strict:
            lines += [f"missing: '{name}' {what}" for name, what in self.missing.items()]
            lines += [f"unexpected: '{name}' {what}" for name, what in self.unexpected.items()]
            lines += self.notes
        if not lines:
            return
        shown = lines[:50] + ([f"and {len(lines) - 50} more"] if len(lines) > 50 else [])
        raise CheckpointError(
            f"the checkpoint does not fit, in {len(lines)} points; nothing was loaded",
            found="\n    ".join(["", *shown]),
            phase="compare",
            path=path,
            cure="load into the model that was saved, or pass strict=False to leave out what is missing or unexpected "
            "(other shapes stay errors; a narrower dtype needs allow_cast=True)",
        )


def describe(record: TensorRecord) -> str:
    return f"of shape {tuple(record.shape)}, {record.dtype}"


def check_dtype(name: str, stored: str, wanted: str, allow_cast: bool, differences: Differences) -> None:
    """Widening is exact and goes without asking; rounding needs ``allow_cast``; another kind of number never fits."""
    fits = widens(stored, wanted)
    if fits or (fits is False and allow_cast):
        return
    why = "a narrowing cast needs allow_cast=True" if fits is False else "these are different kinds of numbers"
    if fits is None and not is_float(stored) and not is_float(wanted):
        why = "the values might not fit"
    differences.wrong.append(f"dtype: '{name}' is stored as {stored}, wanted as {wanted}: {why}")


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
        values = torch.empty(len(view) // dtype.itemsize, dtype=dtype)
        bytes_of(values)[:] = view
        with torch.no_grad():
            into[begin : begin + values.numel()].copy_(values)

    return take


def into_memory(tensor: Any) -> tuple[torch.Tensor, Callable[[], None]]:
    """A contiguous one-dimensional tensor to write to, and what has to be called when it is full."""
    flat = tensor.detach()
    if flat.is_contiguous():
        return flat.view(-1), lambda: None
    copy = torch.empty(flat.numel(), dtype=flat.dtype, device=flat.device)

    def write_back() -> None:
        with torch.no_grad():
            flat.copy_(copy.view(flat.shape))

    return copy, write_back
