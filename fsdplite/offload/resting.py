"""Where shards of parameters and gradients rest: on the device that computes, or in host memory.

The device that computes and the place of rest are separate things everywhere, so that a machine without an
accelerator runs the same code: there both are host memory, the buffers are separate, and the copies are made.
Rajbhandari et al., "ZeRO-Infinity", 2021; Ren et al., "ZeRO-Offload", 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..streams import Lane, lane_for

if TYPE_CHECKING:
    from ..flat_param import FlatParameter

__all__ = ["OnDevice", "OnHost", "copy"]


def copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """The one call that moves bytes between the device and host memory. Casts where the dtypes differ."""
    into.copy_(source, non_blocking=True)


class OnDevice:
    """Shards rest where they are computed with.

    Attributes:
        device: Where shards and gradients rest.
        is_elsewhere: Whether that is another place than the one that computes.
        mirror: The shard in the compute dtype, where gathers read that.
    """

    is_elsewhere = False
    mirror: torch.Tensor | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def twin(self) -> OnDevice:
        """The same for another flat parameter."""
        return self

    def fetch(self, into: torch.Tensor, flat: FlatParameter, lane: Lane) -> None:
        """Copy a shard into memory of the device that computes, in the order of ``lane``, which is entered.

        Args:
            into: In the compute dtype.
            flat: Whose shard.
            lane: Of the gather.
        """
        flat.masters.copy_to(into)

    def bring(self, reduced: torch.Tensor, lane: Lane) -> torch.Tensor:
        """Bring a reduced gradient to its place of rest; ``lane``, which is entered, has made it. Read it after
        :meth:`wait`."""
        return reduced

    def wait(self) -> None:
        """Until what was brought is there, and what was fetched is no longer read: shards may be written after this."""

    def is_mirrored(self, generation: int) -> bool:
        """Whether there is a mirror, and it holds the shard's values of this generation."""
        return False

    def write_mirror(self, start: int, values: torch.Tensor) -> None:
        """An update has made these elements of the shard, from ``start`` on."""

    def mirrors(self, generation: int) -> None:
        """The mirror holds the shard's values of this generation."""


class OnHost(OnDevice):
    """Shards rest in host memory: one buffer per flat parameter, one copy per direction, on a lane of its own.

    Where the compute dtype is another than the master's there is a mirror of the shard in that dtype, so that a copy
    to the device is half as long and nothing is cast on the way. An update of an offloaded optimizer writes it in the
    same pass; any other change of the shard makes it stale, and the next gather fills it again.

    Args:
        compute: The device that computes.
        pin: Page-locked memory where ``compute`` is a CUDA device.
        mirror_dtype: Of the mirror; None: gathers read the shard itself.
    """

    is_elsewhere = True

    def __init__(self, compute: torch.device, pin: bool, mirror_dtype: torch.dtype | None) -> None:
        super().__init__(torch.device("cpu"))
        self._arguments = compute, pin, mirror_dtype
        self._pin = pin and compute.type == "cuda"
        self._lane = lane_for(compute, "offload")
        self._mirror_dtype = mirror_dtype
        self._generation = -1

    def twin(self) -> OnHost:
        return OnHost(*self._arguments)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._mirror_dtype is not None and self.mirror is None:
            self.mirror = torch.zeros(numel, dtype=self._mirror_dtype, device="cpu", pin_memory=self._pin)
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self._pin)

    def refresh_mirror(self, flat: FlatParameter) -> None:
        """Copy the shard there, if it has changed in a way that the mirror did not see."""
        if self.mirror is not None and self._generation != flat.generation:
            self.wait()
            flat.masters.copy_to(self.mirror)
            self._generation = flat.generation

    def fetch(self, into: torch.Tensor, flat: FlatParameter, lane: Lane) -> None:
        self.refresh_mirror(flat)
        self._lane.follow(lane)
        with self._lane:
            copy(into, flat.masters.vector if self.mirror is None else self.mirror)
        lane.follow(self._lane)

    def bring(self, reduced: torch.Tensor, lane: Lane) -> torch.Tensor:
        rest = torch.empty(reduced.numel(), dtype=reduced.dtype, device="cpu", pin_memory=self._pin)
        self._lane.follow(lane)
        with self._lane:
            copy(rest, reduced)
        lane.follow(self._lane)  # whose next allocation may be the memory that is being copied
        return rest

    def wait(self) -> None:
        self._lane.synchronize()

    def is_mirrored(self, generation: int) -> bool:
        return self.mirror is not None and self._generation == generation

    def write_mirror(self, start: int, values: torch.Tensor) -> None:
        self.mirror[start : start + values.numel()].copy_(values)

    def mirrors(self, generation: int) -> None:
        self._generation = generation
