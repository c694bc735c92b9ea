"""Small values that an optimizer class keeps in groups and in states: counters, settings, histories."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from typing import Any

import torch

__all__ = ["in_place", "is_same", "new_tensors_on_host", "own_copy", "put"]


def own_copy(value: Any) -> Any:
    """A copy that shares nothing which is changed in place: tensors, and what containers of Python hold."""
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(False):
            return value.detach().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, own_copy(item)) for key, item in value.items())
        return copied
    if isinstance(value, (list, deque)):
        copied = copy.copy(value)
        for index, item in enumerate(value):
            copied[index] = own_copy(item)
        return copied
    if type(value) is tuple:
        return tuple(own_copy(item) for item in value)
    return copy.copy(value) if isinstance(value, set) else value


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are of the same type and equal; what cannot be compared is not."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(is_same, one, other))
    try:
        return bool(one == other) or bool(one != one and other != other)
    except Exception:  # objects of a class that compares in a way of its own
        return False


def in_place(before: Any, after: Any) -> Any:
    """``after``, in the tensor that was there before if it fits: others may hold it."""
    if before is after or not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return after
    if (before.shape, before.dtype, before.device) != (after.shape, after.dtype, after.device):
        return after
    with torch.no_grad():
        return before.copy_(after)


def put(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value to its place, unless it is there."""
    value = value.detach().as_subclass(torch.Tensor)
    if place.data_ptr() != value.data_ptr():
        place.copy_(value)


def new_tensors_on_host() -> contextlib.AbstractContextManager:
    """Inside, an optimizer class makes its counters in host memory, whatever ``torch.set_default_device`` says."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
