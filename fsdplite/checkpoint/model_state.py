"""The tensors of a model under the names of the plain model, and which part of each this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import CheckpointError
from ..flat_param import FlatParameter
from ..fsdp_unit import state_of
from ..gradient import pending_error
from ..materialize import was_filled
from ..local_slice import info_of
from ..schedule import Schedule
from ..unit import UnitState
from ..user_warning import warn_user
from .manifest import is_reserved
from .tensor_bytes import dtype_name, flat_view, odd_kind

__all__ = ["ModelState", "ModelTensor", "collect", "refuse_unready", "unfilled_names"]

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(eq=False)
class ModelTensor:
    """A parameter or a persistent buffer.

    Attributes:
        names: All its names in the plain model; the first is the one under which it is stored.
        tensor: The user's object.
        shape: Original shape.
        dtype: Of the master, as safetensors calls it.
        place: (module, key) for buffers.
        flat, index: Its flat parameter and place there; None for what no unit owns.
    """

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: str
    place: tuple[nn.Module, str] | None = None
    flat: FlatParameter | None = None
    index: int = -1

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_buffer(self) -> bool:
        return self.place is not None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def local_range(self) -> tuple[int, int]:
        """Which of its elements this rank holds."""
        if self.flat is None:
            return 0, self.numel
        return self.flat.layout.local_range(self.index, self.flat.groups.shard_rank)

    def local(self) -> torch.Tensor:
        """Those elements, one-dimensional."""
        return flat_view(self.tensor)


@dataclass
class ModelState:
    """All tensors of a model, in ``named_parameters`` order, parameters first.

    Attributes:
        tensors: Parameters and persistent buffers.
        by_id: Of parameters, by the ``id`` of the user's object.
        flats: Flat parameters that own any of them.
        units: The states of all units, by their module's name in this model.
    """

    tensors: list[ModelTensor] = field(default_factory=list)
    by_id: dict[int, ModelTensor] = field(default_factory=dict)
    flats: list[FlatParameter] = field(default_factory=list)
    units: dict[str, UnitState] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """A dotted name without what compilation and recomputation wrappers add."""
    if "_orig_mod" not in name and "_checkpoint_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def collect(model: nn.Module) -> ModelState:
    """Find every tensor that a checkpoint of ``model`` holds. Local; touches nothing."""
    state = ModelState()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = state.by_id.get(id(parameter))
        if known is not None:
            if plain_name(name) not in known.names:
                known.names.append(plain_name(name))
            continue
        entry = _parameter(plain_name(name), parameter)
        state.by_id[id(parameter)] = entry
        state.tensors.append(entry)
    state.tensors += _buffers(model)
    for name, module in model.named_modules():
        unit = state_of(module)
        if unit is not None:
            state.units[plain_name(name)] = unit
    state.flats = list({id(t.flat): t.flat for t in state.tensors if t.flat is not None}.values())
    for flat in state.flats:
        flat.masters.check()
    _check_names(state)
    _check_bound(state)
    return state


def warn_extra_state(model: nn.Module) -> None:
    """Say which modules keep state that is neither a parameter nor a buffer: it may need code to be read."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            warn_user(
                f"module '{plain_name(name)}' has a get_extra_state() that this checkpoint does not hold; "
                "pass what it returns in extra= if it is JSON or tensors"
            )


def _parameter(name: str, parameter: torch.Tensor) -> ModelTensor:
    info = info_of(parameter)
    if info is not None:
        return ModelTensor(
            [name], parameter, tuple(info.full_shape), dtype_name(info.flat.dtype, name), None, info.flat, info.index
        )
    _refuse_odd(name, parameter)
    return ModelTensor([name], parameter, tuple(parameter.shape), dtype_name(parameter.dtype, name))


def _refuse_odd(name: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor whose bytes are not its values."""
    if kind := odd_kind(tensor):
        raise CheckpointError(
            f"'{name}' cannot be stored or loaded",
            expected="an ordinary tensor",
            found=kind,
            parameter=name,
            cure="run a forward first" if torch.nn.parameter.is_lazy(tensor) else "make it a non-persistent buffer, "
            "or an ordinary tensor",
        )


def _buffers(model: nn.Module) -> Iterator[ModelTensor]:
    seen: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            known = seen.get(id(buffer))
            if known is None:
                _refuse_odd(name, buffer)
                seen[id(buffer)] = ModelTensor(
                    [name], buffer, tuple(buffer.shape), dtype_name(buffer.dtype, name), (module, key)
                )
            elif name not in known.names:
                known.names.append(name)
    yield from seen.values()


def _check_names(state: ModelState) -> None:
    owners: dict[str, ModelTensor] = {}
    for entry in state.tensors:
        for name in entry.names:
            if name in owners:
                raise CheckpointError(f"two different tensors of the model are called '{name}'", parameter=name)
            if is_reserved(name):
                raise CheckpointError(
                    f"'{name}' begins as the names of a checkpoint's own tensors do",
                    expected="names that do not begin with optimizer/, extra/ or per_rank/",
                    parameter=name,
                    cure="rename the module",
                )
            owners[name] = entry


def _check_bound(state: ModelState) -> None:
    """Inside a forward or ``full_params`` modules hold other tensors than the ones to save."""
    for unit in state.units.values():
        for flat in unit.flats:
            for index, user in enumerate(flat.users):
                if id(user) not in state.by_id:
                    raise CheckpointError(
                        "the weights are whole at the moment, and a checkpoint is made of the slices",
                        **flat.where(index),
                        cure="save and load outside the forward and outside `with fsdp.full_params(...)`",
                    )


def refuse_unready(state: ModelState) -> None:
    """Raise if the model's values are not those that a resumed run should start from."""
    for flat in state.flats:
        if flat.gradient is not None and flat.gradient.is_pending:
            flat.gradient.drop_forgotten()
            if flat.gradient.is_pending:
                raise pending_error(flat)
    names = unfilled_names(state)
    if names:
        raise CheckpointError(
            "tensors have no values: they were never filled after the meta device, or a load into them ended half-way",
            found=", ".join(names[:20]),
            cure="load weights first: fsdp.load_safetensors(model, folder) or fsdp.load_checkpoint(root, model)",
        )


def unfilled(state: ModelState) -> Iterator[tuple[str, Schedule, str]]:
    """Tensors from the meta device that nobody gave values: name in this model, schedule, and name in its table."""
    seen = set()
    for name, unit in state.units.items():
        if id(unit.schedule) in seen:
            continue
        seen.add(id(unit.schedule))
        prefix = name.removesuffix(unit.name).rstrip(".")
        for inner, place in list(unit.schedule.unfilled.items()):
            if isinstance(place[0], FlatParameter) or not was_filled(*place):
                yield plain_name(f"{prefix}.{inner}" if prefix else inner), unit.schedule, inner


def unfilled_names(state: ModelState) -> list[str]:
    """Names of tensors that came from the meta device and that nobody gave values."""
    names = {name for name, _, _ in unfilled(state)}
    return sorted(names | {t.name for t in state.tensors if t.flat is None and t.tensor.is_meta})
