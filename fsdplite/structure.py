"""Finding and mapping the tensors inside inputs and outputs of any structure.

Tuples, NamedTuples, lists, dicts and their subclasses, dataclasses, and plain objects with a ``__dict__`` are
followed; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["arguments", "copy_structure", "map_tensors", "tensors_in"]

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def tensors_in(value: Any, _depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in a structure, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _ATOMS) or _depth > 16:
        return
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item, _depth + 1)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, _depth + 1)
    elif _is_record(value):
        for item in _fields(value).values():
            yield from tensors_in(item, _depth + 1)


def map_tensors(
    function: Callable[[Any], Any], value: Any, of: type | tuple[type, ...] = torch.Tensor
) -> Any:
    """The same structure with ``function`` applied to every tensor; parts without a change are kept as they are.

    Args:
        function: What becomes of each.
        value: Any structure.
        of: What is looked for instead of tensors.
    """
    if isinstance(value, of):
        return function(value)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item, of) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item, of) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    if _is_record(value):
        fields = _fields(value)
        changed = {key: map_tensors(function, item, of) for key, item in fields.items()}
        if all(changed[key] is item for key, item in fields.items()):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            object.__setattr__(result, key, item)
        return result
    return value


def copy_structure(
    value: Any,
    function: Callable[[Any], Any],
    of: type | tuple[type, ...] = torch.Tensor,
    _copies: dict[int, tuple[Any, Any]] | None = None,
) -> Any:
    """As :func:`map_tensors`, but what can be changed in place (lists, dicts, plain objects) is new everywhere.

    What is there twice in the structure is there twice in the copy. Objects that say how they are copied, pickled or
    deleted are kept as they are, unless a tensor inside changes.
    """
    copies = {} if _copies is None else _copies

    def again(item: Any) -> Any:
        return copy_structure(item, function, of, copies)

    if isinstance(value, of):
        return function(value)
    if isinstance(value, _ATOMS):
        return value
    if id(value) in copies:
        return copies[id(value)][1]
    if isinstance(value, tuple):
        items = [again(item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, dict, set)):
        result = copy.copy(value)
        copies[id(value)] = value, result  # the value too: another object must not get its id
        if isinstance(value, list):
            result[:] = [again(item) for item in value]
        elif isinstance(value, dict):
            for key, item in value.items():
                result[key] = again(item)
        return result
    if _is_record(value):
        if not _copies_plainly(type(value)):
            return map_tensors(function, value, of)
        result = copy.copy(value)
        copies[id(value)] = value, result
        for key, item in _fields(value).items():
            object.__setattr__(result, key, again(item))
        return result
    return value


def _copies_plainly(cls: type) -> bool:
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    own = any(getattr(cls, name, None) is not getattr(object, name, None) for name in names)
    return not own and not any(hasattr(cls, name) for name in ("__copy__", "__setstate__", "__del__"))


def _is_record(value: Any) -> bool:
    if isinstance(value, (nn.Module, type)) or callable(value):
        return False
    return dataclasses.is_dataclass(value) or (hasattr(value, "__dict__") and type(value).__module__ != "builtins")


def _fields(value: Any) -> dict[str, Any]:
    """What an object holds: its ``__dict__`` and, for a dataclass with slots, its fields that are set."""
    fields = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                fields.setdefault(field.name, getattr(value, field.name))
    return fields


def arguments(batch: Any) -> tuple[tuple, dict]:
    """A tensor, a tuple of positional or a dict of keyword arguments, or ``(args, kwargs)``, as the last."""
    is_pair = isinstance(batch, tuple) and len(batch) == 2
    if is_pair and isinstance(batch[0], (tuple, list)) and isinstance(batch[1], dict):
        return tuple(batch[0]), batch[1]
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, dict):
        return (), batch
    return (batch,), {}
