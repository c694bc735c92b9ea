"""Lanes of work beside the computation: one for gathering, one for reducing, one for copies to and from the host.

On CUDA a lane is a stream; on CPU the same calls do nothing, so that both run the same engine code. Memory that a
lane allocates is freed on that lane, ordered after the computation that used it by an event: never
``record_stream``, never a host synchronisation.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["Lane", "CudaLane", "lane_for"]


class Lane:
    """A lane on a device without streams: work is ordered by the program."""

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_for_compute(self) -> None:
        """What is put on this lane from now on runs after what the computation has been given so far."""

    def compute_waits(self) -> None:
        """What the computation is given from now on runs after what this lane has been given so far."""

    def follow(self, other: Lane) -> None:
        """What is put on this lane from now on runs after what ``other`` has been given so far."""

    def synchronize(self) -> None:
        """The host waits for what this lane has been given so far."""


class CudaLane(Lane):
    """A CUDA stream beside the current one."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._entered = threading.local()  # backward runs on a thread of its own

    def __enter__(self) -> CudaLane:
        outer = torch.cuda.current_stream(self.device)
        context = torch.cuda.stream(self.stream)
        context.__enter__()
        self._stack().append((outer, context))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack().pop()[1].__exit__(*exc)

    def _stack(self) -> list[tuple[torch.cuda.Stream, torch.cuda.StreamContext]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack

    def wait_for_compute(self) -> None:
        self.stream.wait_stream(self._compute())

    def compute_waits(self) -> None:
        self._compute().wait_stream(self.stream)

    def follow(self, other: Lane) -> None:
        if isinstance(other, CudaLane):
            self.stream.wait_stream(other.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def _compute(self) -> torch.cuda.Stream:
        """The computation's stream: inside the lane it is not the current one."""
        stack = self._stack()
        return stack[0][0] if stack else torch.cuda.current_stream(self.device)


_IDLE = Lane()
_cuda_lanes: dict[tuple[torch.device, str], CudaLane] = {}


def lane_for(device: torch.device, purpose: str) -> Lane:
    """The lane for ``"gather"``, ``"reduce"`` or ``"offload"`` on a device; all units of a process share it."""
    if device.type != "cuda":
        return _IDLE
    key = (device, purpose)
    if key not in _cuda_lanes:
        _cuda_lanes[key] = CudaLane(device, priority=-1)
    return _cuda_lanes[key]
