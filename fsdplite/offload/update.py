"""Applying a ``torch.optim`` class to pieces of parameters, whose state is anywhere.

One object of the class serves all pieces: its groups and its state are set before each of its steps, so the update is
the class's own, in its own order, on tensors that are views of what is to be updated. The class's ``step`` runs
several times in one step of the optimizer. What it leaves in the groups therefore counts once: each run finds the
groups as they were before the step, all must leave the same in them, and at the end of the step the groups get it.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError, ShardedAccessError
from ..keywords import refuse_unknown
from ..optimizer_hooks import WHOLE_TENSOR_OPTIMIZERS, exempt, refuse_sparse_updates
from .values import in_place, is_same, new_tensors_on_host, own_copy

__all__ = ["Entry", "Probed", "Updater"]

# Lengths of the parameters of a trial step. A state that follows both has an element per element of its parameter.
_TRIAL_NUMEL = (7, 11)
_MEMBERS = ("params", "param_names")
_REMOVED = object()


@dataclass(eq=False)
class Entry:
    """One piece in one update.

    Attributes:
        value: What is updated in place, one-dimensional.
        gradient: Of the same shape.
        group: Number of its parameter group.
        state: Its state before and, afterwards, after the update; empty if it has none.
    """

    value: torch.Tensor
    gradient: torch.Tensor
    group: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Probed:
    """What state a class makes for a parameter.

    Attributes:
        regions: Dtypes of those with an element for each element of the parameter, by key, in order.
        beside: Keys of all others.
    """

    regions: dict[str, torch.dtype]
    beside: frozenset[str]


class Updater:
    """See the module docstring.

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer`` whose update is element by element.
        settings: Its keyword arguments.

    Attributes:
        defaults: The settings of a group, as the class fills them in.
        has_first_state: The class gives parameters their state before the first step (Adagrad).
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
        refuse_sparse_updates(optimizer_class)
        parameters = list(inspect.signature(optimizer_class).parameters.values())[1:]  # after the tensors
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            refuse_unknown(optimizer_class.__name__, settings, [parameter.name for parameter in parameters])
        self._class = optimizer_class
        self._settings = settings
        self._inner = self._make([{"params": [torch.zeros(1, device="cpu")]}])
        self.defaults = dict(self._inner.defaults)
        self.has_first_state = bool(self._inner.state)
        self._written: dict[int, dict[str, Any]] = {}  # by groups that a run of this step has updated

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with new_tensors_on_host():
            made = self._class(groups, **self._settings)
        exempt(made)
        return made

    # ------------------------------------------------------------------ what the class does

    def settings_of_new(self, group: dict[str, Any]) -> dict[str, Any]:
        """All settings of a new group: its own, the defaults, and what the class adds when it is made."""
        made = self._make([{**own_copy(_settings_of(group)), "params": [torch.zeros(1, device="cpu")]}])
        return _settings_of(made.param_groups[0])

    def probe(self, group: dict[str, Any], dtype: torch.dtype) -> Probed:
        """Try the class on small parameters of a group's settings.

        Raises:
            ConfigError, ShardedAccessError: It keeps something that an update by pieces would get wrong.
        """
        alone, _ = self._trial(group, dtype, _TRIAL_NUMEL[:1])
        together, values = self._trial(group, dtype, _TRIAL_NUMEL)
        one, all_of_them = (_settings_of(made.param_groups[0]) for made in (alone, together))
        for key, value in all_of_them.items():
            if not is_same(value, one.get(key)):
                raise ShardedAccessError(
                    f"{self._class.__name__} computes group['{key}'] from all parameters of the group",
                    found=f"{one.get(key)!r} with one parameter, {value!r} with two",
                    cure="use the class itself: an offloaded optimizer updates some pieces of parameters at a time",
                )
        states = [together.state.get(value, {}) for value in values]
        regions = {
            key: state.dtype
            for key, state in states[0].items()
            if all(isinstance(s.get(key), torch.Tensor) and s[key].shape == v.shape for s, v in zip(states, values))
        }
        return Probed(regions, frozenset(states[0].keys() - regions.keys()))

    def _trial(self, group: dict[str, Any], dtype: torch.dtype, lengths: tuple[int, ...]) -> tuple[Any, list]:
        values = [torch.zeros(numel, dtype=dtype, device="cpu") for numel in lengths]
        for value in values:
            value.grad = torch.zeros_like(value)
        made = self._make([{**own_copy(_settings_of(group)), "params": values}])
        before = self._attributes(made)
        with new_tensors_on_host():
            made.step()
        self._check_attributes(made, before)
        return made, values

    def _attributes(self, made: Any) -> dict[str, Any]:
        """What the class keeps on its objects. Those of torch keep only what they may."""
        if self._class.__module__.startswith("torch.optim"):
            return {}
        return {key: own_copy(value) for key, value in vars(made).items() if key not in _attributes_of_torch()}

    def _check_attributes(self, made: Any, before: dict[str, Any]) -> None:
        after = self._attributes(made)
        for name in [*before, *(after.keys() - before.keys())]:
            if not is_same(before.get(name), after.get(name)):
                raise ConfigError(
                    f"{self._class.__name__} changes its attribute '{name}' in step(), which runs for some pieces of "
                    "parameters at a time, several times in one step",
                    found=f"{before.get(name)!r} before, {after.get(name)!r} after",
                    cure=f"keep it in the parameter groups (group['{name}']) or in each parameter's state; both are "
                    "stored in checkpoints, too",
                )

    def first_state(self, value: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """What the class gives a parameter before its first step."""
        made = self._make([{**own_copy(_settings_of(group)), "params": [value]}])
        return dict(made.state.get(value, {}))

    # ------------------------------------------------------------------ steps

    def run(self, entries: list[Entry], groups: list[dict[str, Any]]) -> None:
        """Update all entries. Sets their state; states may be other tensors than before.

        Args:
            entries: At least one.
            groups: All of the optimizer; they stay as they are until :meth:`end_step`.
        """
        members: dict[int, list[torch.Tensor]] = {}
        state: dict[torch.Tensor, Any] = defaultdict(dict)
        for entry in entries:
            members.setdefault(entry.group, []).append(entry.value)
            entry.value.grad = entry.gradient
            state[entry.value] = entry.state
        try:
            self._step(members, state, groups)
            for entry in entries:
                entry.state = state[entry.value]
        finally:
            for entry in entries:
                entry.value.grad = None

    def _step(self, members: dict[int, list], state: dict[torch.Tensor, Any], groups: list[dict[str, Any]]) -> None:
        inner = self._inner
        # All groups, in their order: a class may keep something in the first for all. What a run without members of a
        # group leaves in it does not count.
        inner.param_groups = [
            {**own_copy(_settings_of(group)), "params": members.get(number) or [torch.zeros(1, device="cpu")]}
            for number, group in enumerate(groups)
        ]
        inner.state = state
        before = self._attributes(inner)
        try:
            with new_tensors_on_host():
                inner.step()
            for number in members:
                self._note(number, groups[number], inner.param_groups[number])
            self._check_attributes(inner, before)
        finally:
            inner.param_groups, inner.state = [], defaultdict(dict)

    def _note(self, number: int, group: dict[str, Any], left: dict[str, Any]) -> None:
        """What a run has left in a group."""
        before = _settings_of(group)
        written: dict[str, Any] = {key: _REMOVED for key in before.keys() - left.keys()}
        for key, value in _settings_of(left).items():
            if key not in before or not is_same(value, before[key]):
                written[key] = value
        known = self._written.setdefault(number, written)
        if known is written or is_same(known, written):
            return
        key = next(k for k in {**known, **written} if k not in known or not is_same(known[k], written.get(k)))
        raise ShardedAccessError(
            f"{self._class.__name__} computes group['{key}'] from the tensors that it is given, and it is given "
            "some pieces of parameters at a time",
            found=f"{known.get(key)!r} from some pieces, {written.get(key)!r} from others",
            cure="use the class itself; only values that are the same for all parameters can be kept in a group",
        )

    def end_step(self, groups: list[dict[str, Any]]) -> None:
        """All pieces are updated: groups get what the class has left in them, also those without gradients."""
        idle: dict[int, list] = {number: [] for number in range(len(groups)) if number not in self._written}
        if idle:
            self._step(idle, defaultdict(dict), groups)
        for number, written in self._written.items():
            group = groups[number]
            for key, value in written.items():
                if value is _REMOVED:
                    del group[key]
                else:
                    group[key] = in_place(group.get(key), value)
        self._written = {}

    def forget_step(self) -> None:
        """The step ended in an error: the groups stay as they were."""
        self._written = {}


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


@functools.cache
def _attributes_of_torch() -> set[str]:
    """Names of what torch's own classes keep on an optimizer."""
    own = vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=1.0)).keys()
    return {*own, "_need_device_dtype_check_for_fused", "_step_supports_amp_scaling", "_zero_grad_profile_name"}
