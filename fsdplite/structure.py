"""Finding and mapping the tensors inside inputs and outputs of any structure.

Tuples, NamedTuples, lists, dicts and their subclasses, dataclasses, and plain objects with a ``__dict__`` are
followed; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["arguments", "copy_structure", "map_tensors", "tensors_in"]

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a structure, in order. What is met twice, as a parent that its children know, is entered once."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    entered: dict[int, Any] = {}  # the values too: another object must not get the id of one that is gone
    stack = [iter((value,))]
    while stack:
        for item in stack[-1]:
            if isinstance(item, torch.Tensor):
                yield item
            elif not isinstance(item, _ATOMS) and id(item) not in entered:
                entered[id(item)] = item
                stack.append(iter(_items(item)))
                break
        else:
            stack.pop()


def _items(value: Any) -> Iterable[Any]:
    """What lies directly inside a structure; nothing in a leaf."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return _fields(value).values() if _is_record(value) else ()


def map_tensors(
    function: Callable[[Any], Any],
    value: Any,
    of: type | tuple[type, ...] = torch.Tensor,
    _known: dict[int, tuple[Any, Any]] | None = None,
) -> Any:
    """The same structure with ``function`` applied to every tensor; parts without a change are kept as they are.

    What is met twice is mapped once. Where a structure holds itself, as a parent that its children know, the inner
    mention keeps meaning the original.

    Args:
        function: What becomes of each.
        value: Any structure.
        of: What is looked for instead of tensors.
    """
    if isinstance(value, of):
        return function(value)
    if isinstance(value, _ATOMS):
        return value
    known = {} if _known is None else _known
    if id(value) not in known:
        known[id(value)] = value, value
        known[id(value)] = value, _mapped(function, value, of, known)
    return known[id(value)][1]


def _mapped(function: Callable[[Any], Any], value: Any, of: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item, of, known) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return _sequence_of(items, value)
    if not isinstance(value, dict) and not _is_record(value):
        return value
    fields = value if isinstance(value, dict) else _fields(value)
    changed = {key: map_tensors(function, item, of, known) for key, item in fields.items()}
    if all(changed[key] is item for key, item in fields.items()):
        return value
    result = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, dict):
            result[key] = item
        else:
            object.__setattr__(result, key, item)
    return result


def _sequence_of(items: list[Any], like: Any) -> Any:
    """A list or tuple of the class of another, past a constructor that may take something else than items."""
    if isinstance(like, list):
        result = copy.copy(like)
        result[:] = items
        return result
    if type(like).__module__ == "torch.return_types":  # what torch.max and others return
        return type(like)(items)
    result = tuple.__new__(type(like), items)
    if hasattr(like, "__dict__"):
        result.__dict__.update(like.__dict__)
    return result


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
        return _sequence_of(items, value)
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
