"""The optimizer state of one flat parameter: its store, its chunks, and what each parameter has of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import OffloadError
from ..flat_param import FlatParameter
from ..parameter import engine_access, read_grad
from .options import Offload
from .pieces import Chunk, Piece, batches, chunk_numel_within, cut, piece_numel_within
from .stores import DiskStore, HostStore, Store
from .update import Entry, Updater

__all__ = ["Home"]


class Home:
    """See the module docstring.

    Args:
        flat: A flat parameter that trains.
        dtypes: Of the regions.
        offload: Where the store is.
    """

    def __init__(self, flat: FlatParameter, dtypes: dict[str, torch.dtype], offload: Offload) -> None:
        self.flat = flat
        itemsize = max((dtype.itemsize for dtype in dtypes.values()), default=1)
        self.chunk_numel = chunk_numel_within(offload.buffer_bytes, itemsize)
        self.piece_numel = piece_numel_within(self.chunk_numel)
        self.chunks, numel = cut(flat.layout, flat.groups.shard_rank, self.chunk_numel, self.piece_numel)
        if offload.optimizer == "nvme" and dtypes and numel:
            contents = f"unit {flat.unit_name or '(root)'}: {', '.join(dtypes)}"
            self.store: Store = DiskStore(numel, dtypes, str(offload.path), flat.groups.rank, contents)
        else:
            self.store = HostStore(numel, dtypes, offload.pin and flat.device.type == "cuda")
        self.writes_mirror = False
        self._pieces: dict[int, list[Piece]] = {}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                self._pieces.setdefault(piece.index, []).append(piece)

    @property
    def buffer_bytes(self) -> int:
        """What a chunk takes in its widest region."""
        return self.chunk_numel * max((dtype.itemsize for dtype in self.store.dtypes.values()), default=1)

    def holds(self, index: int) -> bool:
        """Whether this rank has elements of the parameter."""
        return index in self._pieces

    # ------------------------------------------------------------------ updates

    def begin(self) -> None:
        """A step begins: shards are written from here on."""
        resting = self.flat.resting
        resting.wait()
        self.writes_mirror = resting.is_mirrored(self.flat.generation)
        resting.mirrors(-1)  # until all of it is written

    def end(self) -> None:
        """The step is over; the hook after it counts the flat parameter as changed once."""
        if self.writes_mirror:
            self.flat.resting.mirrors(self.flat.generation + 1)

    def entries(
        self,
        pieces: list[Piece],
        group_of: Callable[[torch.Tensor], int | None],
        part: Callable[[str, int, int], torch.Tensor],
        reduced: torch.Tensor | None = None,
    ) -> list[tuple[Piece, Entry]]:
        """What is updated of some pieces of a chunk: those of parameters that are in a group and have a gradient.

        Args:
            pieces: Of one of :attr:`chunks`.
            group_of: The number of a user's parameter's group.
            part: Elements ``[start, stop)`` of a region, at this moment.
            reduced: The gradient of the whole shard, where the users do not hold it.
        """
        found = []
        with engine_access():
            for piece in pieces:
                user = self.flat.users[piece.index]
                group = group_of(user)
                if reduced is not None:
                    gradient = reduced[piece.start : piece.stop]
                elif (whole := read_grad(user)) is not None:
                    whole = whole.detach().as_subclass(torch.Tensor)
                    gradient = whole[piece.offset : piece.offset + piece.numel]
                else:
                    continue
                if group is None:
                    continue
                entry = Entry(
                    value=_on_host(self.flat.shard[piece.start : piece.stop].detach()),
                    gradient=_on_host(gradient),
                    group=group,
                    state=None,
                )
                if piece.has_state:
                    regions = {key: part(key, piece.place, piece.place_stop) for key in piece.keys}
                    entry.state = {**piece.scalars, **regions}
                found.append((piece, entry))
        return found

    def absorb(self, piece: Piece, entry: Entry, part: Callable[[str, int, int], torch.Tensor]) -> None:
        """Keep what an update has made of a piece."""
        if self.writes_mirror:
            self.flat.resting.write_mirror(piece.start, entry.value)
        if self.flat.shard.device.type != "cpu":
            self.flat.shard[piece.start : piece.stop].copy_(entry.value)
        self.keep(piece, entry.state or {}, part)

    def keep(self, piece: Piece, state: dict[str, Any], part: Callable[[str, int, int], torch.Tensor]) -> None:
        """Put a piece's state where it belongs: its elements into regions, the rest beside the piece."""
        keys, scalars = [], {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != (piece.numel,):
                scalars[key] = value
                continue
            if key not in self.store.dtypes:
                raise OffloadError(
                    f"the optimizer made a state '{key}' that no space was reserved for",
                    expected=", ".join(self.store.dtypes) or "none",
                    unit=self.flat.unit_name,
                    parameter=self.flat.names[piece.index],
                    rank=self.flat.groups.rank,
                    cure="set the options that make it (momentum, amsgrad) when the optimizer is built",
                )
            keys.append(key)
            place = part(key, piece.place, piece.place_stop)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        piece.keys, piece.scalars, piece.has_state = tuple(keys), scalars, bool(state)

    def update(
        self, updater: Updater, groups: list, chunk: Chunk, group_of: Any, part: Any, reduced: torch.Tensor | None
    ) -> None:
        """One step of a chunk, a few pieces at a time: what an update makes on its way is as long as those.

        Args: as of :meth:`entries`.
        """
        for pieces in batches(chunk.pieces, self.piece_numel):
            found = self.entries(pieces, group_of, part, reduced)
            if found:
                updater.run([entry for _, entry in found], groups)
            for piece, entry in found:
                self.absorb(piece, entry, part)

    # ------------------------------------------------------------------ one parameter's state

    def has_state(self, index: int) -> bool:
        return any(piece.has_state for piece in self._pieces.get(index, ()))

    def region(self, index: int, key: str) -> torch.Tensor:
        """This rank's slice of a parameter's state, to read or to write; of a file a view, nothing is read yet."""
        pieces = self._pieces[index]
        return self.store.part(key, pieces[0].place, pieces[-1].place_stop)

    def state_of(self, index: int) -> dict[str, Any]:
        """A parameter's state as the optimizer would hold it."""
        first = self._pieces[index][0]
        return {**first.scalars, **{key: self.region(index, key) for key in first.keys}}

    def set_state(self, index: int, state: dict[str, Any], filled: set[str]) -> None:
        """Take a parameter's state, whole slices; those in ``filled`` are in their regions already."""
        pieces = self._pieces[index]
        numel = pieces[-1].stop - pieces[0].start
        for piece in pieces:
            own = {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == (numel,):
                    if key in filled:
                        continue
                    own[key] = value[piece.offset : piece.offset + piece.numel]
                else:
                    own[key] = value.clone() if isinstance(value, torch.Tensor) else value
            self.keep(piece, own, self.store.part)
            piece.keys = (*(key for key in state if key in filled), *piece.keys)
            piece.has_state = bool(state)

    def drop_state(self, index: int) -> None:
        for piece in self._pieces.get(index, ()):
            piece.keys, piece.scalars, piece.has_state = (), {}, False


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.to("cpu")
