"""Buffers around a run that is repeated: the second one starts from what the first one found, and leaves no trace.

Scales that follow their input, step counters and running statistics are read and written by the same forward. The
second run works on copies, which take the places of the module's own buffers until it is over: those are not even
written, so nothing that was saved from either run changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["BuffersBefore"]


class BuffersBefore:
    """A module's buffers as they are now, before its first run.

    Holds the buffers and the dicts they are in, not the modules.

    Memory: a copy of every buffer until :meth:`first_run_is_over`, then of those that were written.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
        self._values: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for _, before in self._places:
            for buffer in before.values():
                if buffer is not None and id(buffer) not in self._values:
                    self._values[id(buffer)] = (buffer, _version(buffer), buffer.detach().clone())

    def first_run_is_over(self) -> None:
        """Forget what the run did not write. Compares values too: batch norm writes statistics without a version."""
        self._places = [(place, before) for place, before in self._places if place or before]
        unversioned = {key for key, (buffer, version, _) in self._values.items() if version == _version(buffer)}
        same = unversioned - _changed({key: self._values[key] for key in unversioned})
        self._values = {key: value for key, value in self._values.items() if key not in same}

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """The module's buffers have the values from before the first run; afterwards they are its own again."""
        now = [(place, dict(place)) for place, _ in self._places]
        copies = {
            key: value.clone().requires_grad_(buffer.requires_grad) for key, (buffer, _, value) in self._values.items()
        }
        try:
            for place, before in self._places:
                place.clear()
                place.update({name: copies.get(id(buffer), buffer) for name, buffer in before.items()})
            yield
        finally:
            for place, own in now:
                place.clear()
                place.update(own)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _changed(values: dict[int, tuple[torch.Tensor, int, torch.Tensor]]) -> set[int]:
    """Keys of the buffers whose bits differ from their copies. Waits once for each device, not for each buffer."""
    flags: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for key, (buffer, _, copy) in values.items():
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta:
            differs = (_bytes(buffer) != _bytes(copy)).any()
            flags.setdefault(buffer.device, []).append((key, differs))
    return {
        key
        for found in flags.values()
        for (key, _), differs in zip(found, torch.stack([flag for _, flag in found]).tolist())
        if differs
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
