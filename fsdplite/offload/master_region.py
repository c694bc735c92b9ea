"""Masters in the file of their optimizer state: where a mirror in host memory serves the gathers, nothing else needs them.

A step reads and writes them as it does the state. Between steps they are mapped: parameters are views of the file.
"""

from __future__ import annotations

import torch

from ..errors import OffloadError
from ..flat_param import FlatParameter
from ..masters import Masters
from .files import aligned_bytes
from .options import Offload
from .pieces import Chunk, Piece
from .stores import DiskStore

__all__ = ["MASTERS", "MasterRegion"]

MASTERS = "masters of the parameters"  # a region's key; no class has a state of this name


class MasterRegion:
    """The masters of one flat parameter in one region of its store."""

    def __init__(self, flat: FlatParameter) -> None:
        self._flat = flat

    @staticmethod
    def is_for(flat: FlatParameter, offload: Offload) -> bool:
        """Whether a store is to keep its masters: none does, and gathers read the mirror."""
        is_here = flat.masters.vector is not None and flat.shard_numel > 0
        return offload.optimizer == "nvme" and flat.resting.mirror is not None and is_here

    def move_in(self, store: DiskStore, chunks: list[Chunk]) -> None:
        """Write the masters to a new store, in order and not through a mapping: what fails has a name.

        Memory: one chunk.
        """
        self._flat.resting.refresh_mirror(self._flat)  # while they are in memory
        slices = self._flat.masters.slices
        for chunk in chunks:
            offset, size = store.span(MASTERS, chunk.start, chunk.stop)
            buffer = aligned_bytes(size)
            values = buffer.view(self._flat.dtype)
            for piece in chunk.pieces:
                place = piece.place - chunk.start
                values[place : place + piece.numel].copy_(slices[piece.index][piece.offset : piece.offset + piece.numel])
            store.file.write(offset, buffer)
        self._rest_in(store, chunks)

    def _rest_in(self, store: DiskStore, chunks: list[Chunk]) -> None:
        flat = self._flat
        pieces: dict[int, list[Piece]] = {}
        for chunk in chunks:
            for piece in chunk.pieces:
                pieces.setdefault(piece.index, []).append(piece)
        slices = [torch.empty(0, dtype=flat.dtype, device="cpu") for _ in flat.users]
        for index, of_it in pieces.items():
            slices[index] = store.part(MASTERS, of_it[0].place, of_it[-1].place_stop)
        flat.move_masters(Masters(slices, flat.layout, flat.groups.shard_rank, store.check))

    def start_anew(self, store: DiskStore, chunks: list[Chunk]) -> None:
        """They are lost: another store, where they wait to be loaded."""
        self._rest_in(store, chunks)
        self._flat.unit.schedule.unfilled.lose(self._flat)

    def move_out(self) -> None:
        """Back to where they came from. Memory: the shard."""
        flat, kept = self._flat, self._flat.masters
        flat.move_masters(None)
        try:
            kept.copy_to(flat.masters.vector)
        except OffloadError:
            flat.unit.schedule.unfilled.lose(flat)
