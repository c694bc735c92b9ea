"""Applying a ``torch.optim`` class to pieces of parameters, whose state is anywhere.

One object of the class serves all pieces: its groups and its state are set before each of its steps, so the update is
the class's own, in its own order, on tensors that are views of what is to be updated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError, ShardedAccessError
from ..optimizer_hooks import WHOLE_TENSOR_OPTIMIZERS, exempt

__all__ = ["Entry", "Updater"]


@dataclass(eq=False)
class Entry:
    """One piece in one update.

    Attributes:
        value: What is updated in place, one-dimensional.
        gradient: Of the same shape.
        group: Number of its parameter group.
        state: Its state before and, afterwards, after the update; None if it has none.
    """

    value: torch.Tensor
    gradient: torch.Tensor
    group: int
    state: dict[str, Any] | None


class Updater:
    """See the module docstring.

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer`` whose update is element by element.
        settings: Its keyword arguments.

    Attributes:
        defaults: The settings of a group, as the class fills them in.
    """

    def __init__(self, optimizer_class: type, settings: dict[str, Any]) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise ConfigError(
                "fsdp.offloaded takes the class of an optimizer",
                expected="for example torch.optim.AdamW",
                found=repr(optimizer_class),
            )
        refused = {cls.__name__ for cls in optimizer_class.__mro__} & WHOLE_TENSOR_OPTIMIZERS
        if refused:
            raise ShardedAccessError(
                f"{sorted(refused)[0]} reads whole tensors, and it would be given pieces",
                cure="use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, ...)",
            )
        self._class = optimizer_class
        self._settings = settings
        self._inner = optimizer_class([torch.zeros(1)], **settings)
        exempt(self._inner)
        self.defaults = dict(self._inner.defaults)

    def probe(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The keys of the state that has an element per parameter element, and their dtypes, in order."""
        value = torch.zeros(3, dtype=dtype)
        value.grad = torch.zeros(3, dtype=dtype)
        probe = self._class([{**_settings_of(group), "params": [value]}], **self._settings)
        exempt(probe)
        probe.step()
        found = probe.state[value].items()
        return {key: s.dtype for key, s in found if isinstance(s, torch.Tensor) and s.shape == value.shape}

    def run(self, entries: list[Entry], groups: list[dict[str, Any]]) -> None:
        """One step of all entries. Sets their state; states may be other tensors than before."""
        inner = self._inner
        members: dict[int, list[torch.Tensor]] = {}
        state: dict[torch.Tensor, Any] = defaultdict(dict)
        for entry in entries:
            members.setdefault(entry.group, []).append(entry.value)
            entry.value.grad = entry.gradient
            state[entry.value] = self._first_state(entry, groups) if entry.state is None else entry.state
        inner.param_groups = [{**_settings_of(groups[n]), "params": values} for n, values in members.items()]
        inner.state = state
        try:
            inner.step()
            for entry in entries:
                entry.state = state[entry.value]
        finally:
            for entry in entries:
                entry.value.grad = None
            inner.param_groups, inner.state = [], defaultdict(dict)

    def _first_state(self, entry: Entry, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """What the class gives a parameter before its first step: for most nothing, for Adagrad its sum."""
        group = {**_settings_of(groups[entry.group]), "params": [entry.value]}
        return dict(self._class([group], **self._settings).state.get(entry.value, {}))


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
