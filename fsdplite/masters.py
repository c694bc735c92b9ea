"""The masters of one flat parameter: this rank's slices of its parameters, which the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .layout import FlatLayout

__all__ = ["Masters"]


class Masters:
    """Slices that lie anywhere; :meth:`in_vector` makes those that are views of one shard.

    Args:
        slices: One of each parameter, in the flat parameter's order, maybe empty.
        check: Raises if what the slices are views of is lost.
        read: Copies the slices to their places in a vector like the shard. It raises where a look at a slice would be
            a signal.

    Attributes:
        addresses: Of the slices.
        vector: The shard, ``layout.shard_numel`` elements, if the slices are views of one.
    """

    def __init__(
        self, slices: list[torch.Tensor], check: Callable[[], None], read: Callable[[torch.Tensor], None]
    ) -> None:
        self.slices = slices
        self.addresses = [values.data_ptr() for values in slices]
        self.check = check
        self.vector: torch.Tensor | None = None
        self._read = read

    @classmethod
    def in_vector(cls, vector: torch.Tensor, layout: FlatLayout, rank: int) -> Masters:
        """Views of a shard."""
        ranges = (layout.shard_slice(index, rank) for index in range(len(layout.slots)))
        made = cls([vector[start:stop] for start, stop in ranges], lambda: None, lambda shard: shard.copy_(vector))
        made.vector = vector
        return made

    def copy_to(self, shard: torch.Tensor) -> None:
        """Fill a vector of ``layout.shard_numel`` elements, cast where the dtypes differ, zero between parameters."""
        self.check()
        if self.vector is None:
            shard.zero_()
        self._read(shard)
