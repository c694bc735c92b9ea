"""Putting an optimizer's saved state back: by the names of its parameters, whatever the order of its groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..local_slice import engine_access
from .manifest import Manifest, split_state_name, state_name
from .model_state import ModelState, ModelTensor
from .optimizer_state import check_optimizer, decode_settings, member_of
from .tensor_bytes import dtype_name, torch_dtype
from .values import decode_value, scalar_tensor
from .wanted import Differences, Target, check_dtype, describe

__all__ = ["OptimizerLoad", "prepare"]


def prepare(optimizer: Any) -> None:
    """Before model and optimizer are looked at: an offloaded optimizer replaces files that are lost."""
    check_optimizer(optimizer)
    if hasattr(optimizer, "state_is_about_to_be_filled"):
        optimizer.state_is_about_to_be_filled()


class OptimizerLoad:
    """Plans first, so that every difference is known before anything changes, and installs last.

    Args:
        optimizer: Only its ``param_groups`` and ``state`` are used.
        model: The model's tensors.
        manifest: Of the checkpoint.
        stored_names: For each parameter of the model (by its own name) the name under which it is stored.
        allow_cast: See ``load_checkpoint``.
        differences: Gets what does not fit.

    Attributes:
        targets: Tensors to read.
    """

    def __init__(
        self,
        optimizer: Any,
        model: ModelState,
        manifest: Manifest,
        stored_names: dict[str, str],
        allow_cast: bool,
        differences: Differences,
    ) -> None:
        self.targets: list[Target] = []
        self._optimizer = optimizer
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[ModelTensor, dict[str, Any]]] = []
        if manifest.optimizer is None:
            differences.notes.append("the checkpoint holds no optimizer state")
            return
        self._manifest = manifest
        self._section = manifest.optimizer
        takes = self._takes_state(differences)
        self._saved_group = {
            name: number for number, group in enumerate(self._section["groups"]) for name in group["members"]
        }
        self._keys: dict[str, list[str]] = {}
        for name in manifest.tensors:
            if name.startswith("optimizer/"):
                parameter, key = split_state_name(name, manifest.tensors)
                self._keys.setdefault(parameter, []).append(key)
        if not takes:
            return
        wanted = set()
        for number, group in enumerate(optimizer.param_groups):
            members = [member_of(model, p, number) for p in group["params"]]
            known = [(m, stored_names[m.name]) for m in members if m.name in stored_names]
            wanted.update(stored for _, stored in known)
            self._plan_settings(number, group, known, differences)
            for member, stored in known:
                if stored not in self._saved_group:
                    differences.notes.append(f"missing: '{member.name}' is in no parameter group of the checkpoint")
                else:
                    self._plan_state(group, member, stored, allow_cast, differences)
        for name in self._saved_group:
            if name not in wanted and name in stored_names.values():
                differences.notes.append(f"unexpected: the checkpoint's optimizer holds '{name}', this one does not")

    def _takes_state(self, differences: Differences) -> bool:
        """Whether the saved state is of use to this optimizer. Another class is noted, and keeps its own settings."""
        saved, kind = self._section["class"], type(self._optimizer).__name__
        self._takes_settings = saved in _classes(self._optimizer)
        if self._takes_settings:
            return True
        ours, theirs = self._optimizer.param_groups[:1], self._section["groups"][:1]
        alike = bool(ours and theirs) and _setting_names(ours[0]) == _setting_names(theirs[0]["settings"])
        differences.notes.append(
            f"optimizer: the checkpoint's is {saved}, this one is {kind}; leave the optimizer out to load the model "
            "alone; with strict=False its state is " + ("taken, its settings are not" if alike else "left out")
        )
        return alike

    def _plan_settings(
        self, number: int, group: dict[str, Any], known: list[tuple[ModelTensor, str]], differences: Differences
    ) -> None:
        if not self._takes_settings:
            return
        numbers = sorted({self._saved_group[stored] for _, stored in known if stored in self._saved_group})
        if not numbers:
            return
        saved = self._section["groups"]
        first = saved[numbers[0]]
        for other in numbers[1:]:
            if (saved[other]["settings"], saved[other]["tensors"]) != (first["settings"], first["tensors"]):
                differences.wrong.append(
                    f"parameter group {number} joins parameters whose groups were saved with different settings "
                    f"({saved[numbers[0]]['members'][0]} and {saved[other]['members'][0]})"
                )
                return
        self._settings.append((group, decode_settings(first)))

    def _plan_state(
        self, group: dict[str, Any], member: ModelTensor, stored: str, allow_cast: bool, differences: Differences
    ) -> None:
        before = self._optimizer.state.get(member.tensor, {})
        low, high = member.local_range()
        state: dict[str, Any] = {}
        for key in self._keys.get(stored, ()):
            source = state_name(stored, key)
            record = self._manifest.tensors[source]
            with engine_access():
                shape = torch.Size(member.tensor.shape)
                device = member.tensor.device
                parameter_dtype = member.tensor.dtype
            dtype = self._dtype_of(before.get(key), record.dtype, stored, parameter_dtype)
            check_dtype(source, record.dtype, dtype_name(dtype, source), allow_cast, differences)
            # An offloaded optimizer has the memory, or the file, already.
            to_fill = getattr(self._optimizer, "state_to_fill", None)
            values = to_fill(member.tensor, key, dtype) if to_fill is not None else None
            if values is None:
                with torch.inference_mode(False):
                    values = torch.zeros(shape, dtype=dtype, device=device)
            state[key] = values
            self.targets.append(Target(source, low, high, values.view(-1)))
        for key, entry in self._section["scalars"].get(stored, {}).items():
            if "value" in entry:
                state[key] = decode_value(entry["value"], {}, f"optimizer state '{key}' of '{stored}'")
            else:
                value = scalar_tensor(entry.get("tensor"), f"optimizer state '{key}' of '{stored}'")
                state[key] = _place(value, key, before.get(key), group, member)
        self._states.append((member, state))

    def _dtype_of(self, before: Any, stored: str, parameter: str, wanted: torch.dtype) -> torch.dtype:
        """A moment keeps the dtype it has here; a new one follows its parameter if it did when it was saved."""
        if isinstance(before, torch.Tensor):
            return before.dtype
        saved_parameter = self._manifest.tensors.get(parameter)
        if saved_parameter is not None and saved_parameter.dtype == stored:
            return wanted
        return torch_dtype(stored)

    def begin(self) -> None:
        """Nothing is refused any more: values come now."""
        if hasattr(self._optimizer, "state_is_being_filled"):
            self._optimizer.state_is_being_filled()

    @torch.inference_mode(False)  # what moves to another device must stay an ordinary tensor
    def install(self) -> None:
        """Give the optimizer what was read. Groups keep their order and members."""
        for group, settings in self._settings:
            for key, value in settings.items():
                before = group.get(key)
                if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
                    value = value.to(before.device)
                group[key] = value
        for member, state in self._states:
            if state:
                self._optimizer.state[member.tensor] = state
            else:
                self._optimizer.state.pop(member.tensor, None)
        if hasattr(self._optimizer, "state_is_filled"):
            self._optimizer.state_is_filled()

    def unexpected(self, stored_names: dict[str, str]) -> dict[str, str]:
        """Saved states of parameters that the model does not have: their parameters are listed already."""
        known = set(stored_names.values())
        return {
            state_name(parameter, key): describe(self._manifest.tensors[state_name(parameter, key)])
            for parameter, keys in getattr(self, "_keys", {}).items()
            if parameter not in known
            for key in keys
        }


def _classes(optimizer: Any) -> set[str]:
    """The classes whose state an optimizer can go on with: its own and its bases.

    The first of torch is the last of them: its bases compute something else (AdamW is a subclass of Adam there). An
    offloaded optimizer is of the class that it was given.
    """
    names = set()
    for cls in getattr(optimizer, "update_class", type(optimizer)).__mro__:
        names.add(cls.__name__)
        if cls.__module__.startswith("torch.optim."):
            break
    return names


def _setting_names(group: Iterable[str]) -> set[str]:
    """Classes with the same settings keep the same state (Adam and AdamW). Schedulers add one of their own."""
    return set(group) - {"params", "param_names", "initial_lr"}


@torch.inference_mode(False)
def _place(value: torch.Tensor, key: str, before: Any, group: dict[str, Any], member: ModelTensor) -> torch.Tensor:
    """A scalar state where a fresh optimizer keeps it, its value and dtype as saved."""
    if isinstance(before, torch.Tensor):
        return value.to(before.device)
    if group.get("capturable") or (key == "step" and group.get("fused")):
        with engine_access():
            return value.to(member.tensor.device)
    return value
