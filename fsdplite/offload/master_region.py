"""Masters in the file of their optimizer state: where a mirror in host memory serves the gathers, nothing else needs them.

A step reads and writes them as it does the state. Between steps they are mapped: parameters are views of the file. The
engine itself reads them with calls that can be refused, because a mapping answers a failing disk with a signal.
"""

from __future__ import annotations

import torch

from ..errors import OffloadError
from ..flat_param import FlatParameter
from ..masters import Masters
from .files import aligned_bytes
from .options import Offload
from .pieces import Chunk, by_parameter
from .stores import DiskStore

__all__ = ["MASTERS", "MasterRegion"]

MASTERS = "masters of the parameters"  # a region's key; no class has a state of this name


class MasterRegion:
    """The masters of one flat parameter in the first region of its store."""

    def __init__(self, flat: FlatParameter) -> None:
        self._flat = flat

    @staticmethod
    def is_for(flat: FlatParameter, offload: Offload) -> bool:
        """Whether a store is to keep its masters: none does, and gathers read the mirror."""
        is_here = flat.masters.vector is not None and flat.shard_numel > 0
        return offload.optimizer == "nvme" and flat.resting.mirror is not None and is_here

    def move_in(self, store: DiskStore, chunks: list[Chunk]) -> None:
        """Write the masters to a new store, in order and not through a mapping: what fails has a name.

        They are where they were until all is written. Memory: one chunk.
        """
        flat = self._flat
        flat.resting.refresh_mirror(flat)  # while they are where they were
        slices = flat.masters.slices
        buffer = _buffer(store, chunks)
        for chunk in chunks:
            offset, size = store.span(MASTERS, chunk.start, chunk.stop)
            values = buffer.view(flat.dtype)
            for piece in chunk.pieces:
                place = piece.place - chunk.start
                values[place : place + piece.numel].copy_(slices[piece.index][piece.offset : piece.offset + piece.numel])
            store.file.write(offset, buffer[:size])
        self._rest_in(store, chunks)

    def _rest_in(self, store: DiskStore, chunks: list[Chunk]) -> None:
        flat = self._flat
        slices = [torch.empty(0, dtype=flat.dtype, device="cpu") for _ in flat.users]
        for index, of_it in by_parameter(chunks).items():
            slices[index] = store.part_alone(MASTERS, of_it[0].place, of_it[-1].place_stop)

        def read(shard: torch.Tensor) -> None:
            buffer = _buffer(store, chunks)
            for chunk in chunks:
                offset, size = store.span(MASTERS, chunk.start, chunk.stop)
                store.file.read(offset, buffer[:size])
                values = buffer.view(flat.dtype)
                for piece in chunk.pieces:
                    place = piece.place - chunk.start
                    shard[piece.start : piece.stop].copy_(values[place : place + piece.numel])

        flat.move_masters(Masters(slices, store.check, read))

    def start_anew(self, store: DiskStore, chunks: list[Chunk]) -> None:
        """They are lost: another store, where they wait to be loaded."""
        self._rest_in(store, chunks)
        self._flat.unit.schedule.unfilled.lose(self._flat)

    def move_out(self) -> None:
        """Back to where they came from; lost if they cannot be read. Memory: the shard.

        Raises:
            OffloadError: There is no memory for them. They stay where they are.
        """
        flat = self._flat
        try:
            moved = flat.new_masters()
        except (RuntimeError, MemoryError) as problem:
            raise OffloadError(
                "the masters in a file cannot come back to host memory",
                expected=f"{flat.shard_numel * flat.dtype.itemsize} bytes",
                found=str(problem).splitlines()[0],
                **flat.where(),
                cure="nothing is lost: save a checkpoint, or free memory and call close() again",
            ) from problem
        is_lost = False
        try:
            flat.masters.copy_to(moved.vector)
        except OffloadError:
            is_lost = True
        flat.move_masters(moved)
        if is_lost:
            flat.unit.schedule.unfilled.lose(flat)


def _buffer(store: DiskStore, chunks: list[Chunk]) -> torch.Tensor:
    """As long as the longest chunk."""
    return aligned_bytes(max((store.span(MASTERS, chunk.start, chunk.stop)[1] for chunk in chunks), default=0))
