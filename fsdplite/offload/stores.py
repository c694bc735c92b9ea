"""Where the optimizer state of one flat parameter is kept: in host memory, or in a file.

A state that has an element for each element of the shard is a *region* of the store.
"""

from __future__ import annotations

import abc

import torch

from .files import BLOCK_BYTES, StateFile, padded

__all__ = ["DiskStore", "HostStore", "Store"]


class Store(abc.ABC):
    """See the module docstring. ``dtypes`` are those of the regions, by the key of the state."""

    is_streamed = False

    def __init__(self, numel: int, dtypes: dict[str, torch.dtype]) -> None:
        self.numel = numel
        self.dtypes = dtypes

    @abc.abstractmethod
    def part(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a region, to read or to write in place."""

    def check(self) -> None:
        """Raise if what is kept is no longer there."""

    def close(self) -> None:
        """Give everything back."""


class HostStore(Store):
    """Regions in host memory."""

    def __init__(self, numel: int, dtypes: dict[str, torch.dtype], pin: bool) -> None:
        super().__init__(numel, dtypes)
        self._regions = {
            key: torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pin) for key, dtype in dtypes.items()
        }

    def part(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self._regions[key][start:stop]

    def close(self) -> None:
        self._regions.clear()


class DiskStore(Store):
    """Regions one after another in a file, each from a block's start."""

    is_streamed = True

    def __init__(self, numel: int, dtypes: dict[str, torch.dtype], folder: str, rank: int, contents: str) -> None:
        super().__init__(numel, dtypes)
        self._offsets: dict[str, int] = {}
        end = BLOCK_BYTES
        for key, dtype in dtypes.items():
            self._offsets[key] = end
            end += padded(numel * dtype.itemsize)
        self.file = StateFile(folder, end - BLOCK_BYTES, rank, contents)

    def part(self, key: str, start: int, stop: int) -> torch.Tensor:
        dtype = self.dtypes[key]
        return self.file.mapped(self._offsets[key] + start * dtype.itemsize, stop - start, dtype)

    def part_alone(self, key: str, start: int, stop: int) -> torch.Tensor:
        """The same, to hold on to: addresses are taken up to the end of this region, and not of the file."""
        dtype, offset = self.dtypes[key], self._offsets[key]
        most_bytes = offset + padded(self.numel * dtype.itemsize)
        return self.file.mapped(offset + start * dtype.itemsize, stop - start, dtype, most_bytes)

    def span(self, key: str, start: int, stop: int) -> tuple[int, int]:
        """Offset and length of whole blocks that hold these elements; ``start`` is at a block's start."""
        size = self.dtypes[key].itemsize
        return self._offsets[key] + start * size, padded((stop - start) * size)

    def check(self) -> None:
        self.file.check()

    def close(self) -> None:
        self.file.close()
