"""Filling shards at wrap time: from the weights that are there, from rank 0, or from a module's own initialiser.

Module by module, children before parents, which is the order in which constructors run: so a model built on the meta
device draws the same random numbers as one built normally. Each module's parameters go into the shards before the
next module is touched; there is never a second copy of the model.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from .collectives import broadcast
from .errors import WrapError
from .flat_param import FlatParameter
from .groups import Groups
from .partition import BufferSpec
from .user_warning import warn_user
from .watchdog import Waiting

__all__ = ["Materializer"]


class Materializer:
    """Fills the flat parameters of one ``fsdp_wrap`` call.

    Args:
        owners: For each parameter object (by id) its flat parameter and index.
        groups: Over which values are broadcast.
        sync: Whether rank 0's values replace everybody's.
        first_has: Canonical names of parameters and buffers that rank 0 holds for real, not on meta.
        device: Where meta tensors are made real.
    """

    def __init__(
        self,
        owners: dict[int, tuple[FlatParameter, int]],
        groups: Groups,
        *,
        sync: bool,
        first_has: set[str],
        device: torch.device,
    ) -> None:
        self._owners = owners
        self._groups = groups
        self._sync = sync
        self._first_has = first_has
        self._device = device
        self._placed: set[int] = set()
        self._real_buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Values from rank 0 arrive in one buffer: the backend may hold the last one a moment longer than it says.
        arriving = [p.numel() * p.element_size() for f, i in owners.values() if (p := f.users[i]).is_meta]
        largest = max(arriving, default=0) if sync else 0
        self._staging: torch.Tensor | None = torch.empty(largest, dtype=torch.uint8, device=device)
        self.unfilled: dict[str, Any] = {}

    def fill(self, root: nn.Module, buffers: dict[tuple[int, str], BufferSpec], skip: set[int]) -> None:
        """Visit ``root``'s modules, children before parents. ``skip``: ids of modules left alone.

        Collective: one broadcast per parameter and buffer when syncing.
        """
        self._visit(root, buffers, set(skip))
        self._staging = None

    def _visit(self, module: nn.Module, buffers: dict[tuple[int, str], BufferSpec], visited: set[int]) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        for child in module._modules.values():
            if child is not None:
                self._visit(child, buffers, visited)
        self._fill_module(module, buffers)

    def _fill_module(self, module: nn.Module, buffers: dict[tuple[int, str], BufferSpec]) -> None:
        owned = {key: p for key, p in module._parameters.items() if p is not None and id(p) in self._owners}
        fresh = {key: p for key, p in owned.items() if id(p) not in self._placed}
        meta = {key: p for key, p in fresh.items() if p.is_meta}
        meta_buffers = {
            key: b for key, b in module._buffers.items() if b is not None and b.is_meta and (id(module), key) in buffers
        }
        for key, b in list(meta_buffers.items()):
            if id(b) in self._real_buffers:  # one tensor in two modules stays one
                module._buffers[key] = self._real_buffers[id(b)][1]
                del meta_buffers[key]
        given = self._given(meta, meta_buffers, module, buffers)
        values: dict[str, torch.Tensor] = {key: p.detach() for key, p in fresh.items() if not p.is_meta}
        empty: set[str] = set()
        if meta or meta_buffers:
            if given:
                for key, b in meta_buffers.items():
                    module._buffers[key] = torch.empty_like(b, device=self._device)
                    self._real_buffers[id(b)] = (b, module._buffers[key])
            else:
                made, empty = self._initialise(module, owned, meta, meta_buffers)
                values.update(made)
        for key, parameter in fresh.items():
            flat, index = self._owners[id(parameter)]
            value = self._staging_for(parameter) if key in meta and given else values.pop(key)
            if value.device != self._device:
                value = value.to(self._device)
            if self._sync:
                value = value if value.is_contiguous() else value.contiguous()
                broadcast(value, self._groups, Waiting(flat.unit_name, f"broadcast of {flat.names[index]}", 0))
            flat.place(index, value)
            if parameter.is_meta and hasattr(module, "_flat_weight_refs"):
                module._flat_weight_refs = []  # an RNN's weak references to its weights would forbid the swap
            flat.adopt(index)
            if key in empty:
                self.unfilled[flat.names[index]] = (flat, index)
                flat.unfilled.add(index)
            self._placed.add(id(parameter))
            del value
        if meta and hasattr(module, "_init_flat_weights"):
            module._init_flat_weights()
        for key, buffer in list(module._buffers.items()):
            if buffer is None or (id(module), key) not in buffers:
                continue
            name = buffers[(id(module), key)].name
            if buffer.device != self._device:
                buffer = module._buffers[key] = buffer.to(self._device)
            if self._sync:
                dense = buffer.contiguous()
                broadcast(dense, self._groups, Waiting("", f"broadcast of buffer {name}", 0))
                if dense is not buffer:
                    buffer = module._buffers[key] = dense
            if key in empty:
                self.unfilled[name] = (weakref.ref(module), key, buffer._version)

    def _staging_for(self, parameter: nn.Parameter) -> torch.Tensor:
        size = parameter.numel() * parameter.element_size()
        return self._staging[:size].view(parameter.dtype).view(parameter.shape)

    def _given(self, meta: dict, meta_buffers: dict, module: nn.Module, buffers: dict) -> bool:
        """Whether rank 0 sends everything that is on meta here."""
        if not self._sync or not (meta or meta_buffers):
            return False
        names = []
        for p in meta.values():
            flat, index = self._owners[id(p)]
            names.append(flat.names[index])
        names += [buffers[(id(module), key)].name for key in meta_buffers]
        return all(name in self._first_has for name in names)

    def _initialise(
        self, module: nn.Module, owned: dict, meta: dict, meta_buffers: dict
    ) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Let the module fill its own tensors at their original shapes. Returns values and what stayed unfilled."""
        stand_ins = {}
        for key, p in owned.items():
            # A tied weight that has its values already is drawn again and thrown away, as constructors do.
            shape = self._owners[id(p)][0].layout.slots[self._owners[id(p)][1]].shape
            blank = torch.empty(shape, dtype=p.dtype, device=self._device)
            stand_ins[key] = nn.Parameter(_blank(blank), requires_grad=p.requires_grad)
        originals = {key: module._parameters[key] for key in stand_ins}
        module._parameters.update(stand_ins)
        made_buffers = {}
        for key, b in meta_buffers.items():
            made_buffers[key] = module._buffers[key] = _blank(torch.empty_like(b, device=self._device))
            self._real_buffers[id(b)] = (b, made_buffers[key])
        watched = {**{key: stand_ins[key] for key in meta}, **made_buffers}
        versions = {key: tensor._version for key, tensor in watched.items()}
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if "parametrizations" in module._modules:
            reset = None  # it would initialise the weight that is computed, not what it is computed from
        try:
            if callable(reset):
                with torch.inference_mode(False):
                    reset()
            values = {key: module._parameters[key].detach() for key in meta}
        finally:
            module._parameters.update(originals)
        empty = set()
        for key in watched:
            tensor = values[key] if key in values else module._buffers[key]
            untouched = tensor is made_buffers.get(key) or (key in stand_ins and tensor._version == versions[key])
            if tensor.numel() and untouched and watched[key]._version == versions[key] and _is_blank(tensor):
                empty.add(key)
        return values, empty


def was_filled(module: weakref.ref, key: str, version: int) -> bool:
    """Whether a buffer that nobody had filled at wrap time was written or replaced since."""
    holder = module()
    buffer = None if holder is None else holder._buffers.get(key)
    return buffer is None or buffer._version != version


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()


def _is_blank(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all()) if tensor.is_floating_point() else not bool(tensor.any())


def refuse_gradients(parameter: nn.Parameter, name: str, rank: int) -> None:
    """A gradient from before wrapping has the full shape and was never averaged."""
    if parameter.grad is not None:
        raise WrapError(
            "a parameter has a gradient from before wrapping",
            parameter=name,
            rank=rank,
            cure="call zero_grad() before fsdp_wrap",
        )


def warn_low_precision(names: list[str], unit: str) -> None:
    warn_user(
        f"unit '{unit or '(root)'}' trains {len(names)} parameters in 16 bits (first: {names[0]}): small updates are "
        'rounded away. fsdp_wrap(..., precision="bf16") keeps an fp32 master of each.'
    )
