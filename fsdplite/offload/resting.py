"""Where shards of parameters and gradients rest: on the device that computes, or in host memory.

The device that computes and the place of rest are separate things everywhere, so that a machine without an
accelerator runs the same code: there both are host memory, the buffers are separate, and the copies are made.
Rajbhandari et al., "ZeRO-Infinity", 2021; Ren et al., "ZeRO-Offload", 2021.
"""

from __future__ import annotations

import torch

from ..streams import Lane, lane_for

__all__ = ["OnDevice", "OnHost", "copy"]


def copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """The one call that moves bytes between the device and host memory. Casts where the dtypes differ."""
    into.copy_(source, non_blocking=True)


class OnDevice:
    """Shards rest where they are computed with.

    Attributes:
        device: Where shards and gradients rest.
        is_elsewhere: Whether that is another place than the one that computes.
    """

    is_elsewhere = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def clone(self, shard: torch.Tensor) -> torch.Tensor:
        twin = self.zeros(shard.numel(), shard.dtype)
        twin.copy_(shard)
        return twin

    def fetch(self, into: torch.Tensor, shard: torch.Tensor, lane: Lane) -> None:
        """Copy a shard into memory of the device that computes, in the order of ``lane``, which is entered."""
        into.copy_(shard)

    def bring(self, reduced: torch.Tensor, lane: Lane) -> torch.Tensor:
        """Bring a reduced gradient to its place of rest; ``lane``, which is entered, has made it. Read it after
        :meth:`wait`."""
        return reduced

    def wait(self) -> None:
        """Until what was brought is there, and what was fetched is no longer read."""


class OnHost(OnDevice):
    """Shards rest in host memory: one buffer per flat parameter, one copy per direction, on a lane of its own."""

    is_elsewhere = True

    def __init__(self, compute: torch.device, pin: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._pin = pin and compute.type == "cuda"
        self._lane = lane_for(compute, "offload")

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=self._pin)

    def fetch(self, into: torch.Tensor, shard: torch.Tensor, lane: Lane) -> None:
        self._lane.follow(lane)
        with self._lane:
            copy(into, shard)
        lane.follow(self._lane)

    def bring(self, reduced: torch.Tensor, lane: Lane) -> torch.Tensor:
        rest = torch.empty(reduced.numel(), dtype=reduced.dtype, pin_memory=self._pin)
        self._lane.follow(lane)
        with self._lane:
            copy(rest, reduced)
        lane.follow(self._lane)  # whose next allocation may be the memory that is being copied
        return rest

    def wait(self) -> None:
        self._lane.synchronize()
