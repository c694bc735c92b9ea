"""The optimizer state of one flat parameter: its store, its chunks, and what each parameter has of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OffloadError
from ..flat_param import FlatParameter
from ..local_slice import engine_access, read_grad
from .master_region import MASTERS, MasterRegion
from .options import Offload
from .pieces import Chunk, Piece, by_parameter, chunk_numel_within, cut, piece_numel_within
from .stores import DiskStore, HostStore, Store
from .stream import Part
from .update import Entry, Probed, Updater
from .values import in_place, is_same, own_copy, put

__all__ = ["Home", "Place"]

# Elements [start, stop) of a region, at this moment.
Place = Callable[[str, int, int], torch.Tensor]


@dataclass
class _Kept:
    """What a parameter has.

    Attributes:
        keys: Of all its state, in the class's order.
        beside: Its state that has no element per element of the parameter (step counters): one for all its pieces.
    """

    keys: list[str]
    beside: dict[str, Any]


@dataclass
class _Room:
    """Where the state is kept, and how it is cut.

    Attributes:
        store: Regions for what has an element per element of the shard.
        probed: What state the regions are for.
        chunks: Of the store.
        piece_numel: Of the longest piece.
        pieces: Of each parameter that this rank has elements of.
    """

    store: Store
    probed: Probed
    chunks: list[Chunk]
    chunk_numel: int
    piece_numel: int
    pieces: dict[int, list[Piece]]

    @contextlib.contextmanager
    def kept_if_filled(self) -> Iterator[None]:
        """What comes into it at first: if that fails, it is given back."""
        try:
            yield
        except BaseException:
            self.store.close()
            raise


class Home:
    """See the module docstring.

    Args:
        flat: A flat parameter that trains.
        probed: What state its parameters have.
        offload: Where the store is.

    Attributes:
        masters: What the store keeps of them; None where they are elsewhere.
    """

    def __init__(self, flat: FlatParameter, probed: Probed, offload: Offload) -> None:
        self.flat = flat
        self._offload = offload
        self._kept: dict[int, _Kept] = {}
        self._left: dict[int, _Kept] = {}  # by the pieces that this step has updated so far
        self.writes_mirror = False
        self.masters = MasterRegion(flat) if MasterRegion.is_for(flat, offload) else None
        self._room = room = self._reserve(probed)
        with room.kept_if_filled():
            if self.masters is not None:
                self.masters.move_in(room.store, room.chunks)

    @property
    def store(self) -> Store:
        return self._room.store

    @property
    def chunks(self) -> list[Chunk]:
        return self._room.chunks

    @property
    def probed(self) -> Probed:
        return self._room.probed

    @property
    def piece_numel(self) -> int:
        """Most elements that are updated at a time: what an update makes on its way is as long as those."""
        return self._room.piece_numel

    def _reserve(self, probed: Probed) -> _Room:
        flat, offload = self.flat, self._offload
        dtypes = {**({MASTERS: flat.dtype} if self.masters is not None else {}), **probed.regions}
        chunk_numel = chunk_numel_within(offload.buffer_bytes, max((d.itemsize for d in dtypes.values()), default=1))
        piece_numel = piece_numel_within(chunk_numel)
        chunks, numel = cut(flat.layout, flat.groups.shard_rank, chunk_numel, piece_numel)
        store: Store
        if offload.optimizer == "nvme" and dtypes and numel:
            contents = f"unit {flat.unit_name or '(root)'}: {', '.join(dtypes)}"
            store = DiskStore(numel, dtypes, str(offload.path), flat.groups.rank, contents)
        else:
            store = HostStore(numel, dtypes, offload.pin and flat.device.type == "cuda")
        return _Room(store, probed, chunks, chunk_numel, piece_numel, by_parameter(chunks))

    def widen(self, probed: Probed) -> None:
        """Reserve regions for further kinds of state; what there is moves into the new store, or stays if that fails.

        Memory: of files, none; until it has moved, both are on the disk.
        """
        before = self._room
        regions = {**probed.regions, **before.probed.regions}
        room = self._reserve(Probed(regions, (probed.beside | before.probed.beside) - regions.keys()))
        with room.kept_if_filled():
            for index, kept in self._kept.items():
                start = before.pieces[index][0].place
                for key in kept.keys:
                    if key in kept.beside:
                        continue
                    for piece in room.pieces[index]:
                        values = before.store.part(key, start + piece.offset, start + piece.offset + piece.numel)
                        room.store.part(key, piece.place, piece.place_stop).copy_(values)
            if self.masters is not None:
                self.masters.move_in(room.store, room.chunks)
        self._room = room
        before.store.close()

    def start_anew(self) -> None:
        """The store is lost, and all that was in it: another store, without state."""
        self._kept.clear()
        self.store.close()
        room = self._reserve(self.probed)
        with room.kept_if_filled():
            if self.masters is not None:
                self.masters.start_anew(room.store, room.chunks)
        self._room = room

    def release_masters(self) -> None:
        """Masters move out of the store, unless nobody will look at them again. Steps go on without them.

        Raises:
            OffloadError: There is no memory for them. They stay.
        """
        if self.masters is not None and self.flat.unit.schedule.root.module() is not None:
            self.masters.move_out()
            self.masters = None

    def close(self) -> None:
        """Give the store back."""
        self.store.close()

    @property
    def buffer_bytes(self) -> int:
        """What a chunk takes in its widest region."""
        return self._room.chunk_numel * max((dtype.itemsize for dtype in self.store.dtypes.values()), default=1)

    def holds(self, index: int) -> bool:
        """Whether this rank has elements of the parameter."""
        return index in self._room.pieces

    # ------------------------------------------------------------------ updates

    def begin(self) -> None:
        """A step begins: shards are written from here on."""
        resting = self.flat.resting
        resting.wait()
        self.writes_mirror = resting.is_mirrored(self.flat.generation)
        resting.mirrors(-1)  # until all of it is written
        self._left.clear()

    def abandon(self) -> None:
        """The step has failed: the shard may be changed in part, and the mirror with it."""
        self.flat.resting.mirrors(-1)
        self.flat.mark_updated()

    def end(self) -> None:
        """The step is over; the hook after it counts the flat parameter as changed once."""
        if self.writes_mirror:
            self.flat.resting.mirrors(self.flat.generation + 1)
        for index, left in self._left.items():
            before = self._kept.pop(index, None)
            if before is not None:
                left.beside = {key: in_place(before.beside.get(key), value) for key, value in left.beside.items()}
            if left.keys:
                self._kept[index] = left
        self._left.clear()

    def part_to_stream(self, chunk: Chunk, content: Any) -> Part:
        """A chunk on its way through the buffers."""
        is_new = not any(self.has_state(piece.index) for piece in chunk.pieces)
        new_keys = self.probed.regions if is_new else ()
        return Part(self.store, chunk.start, chunk.stop, tuple(self.store.dtypes), new_keys, content)

    def entries(
        self,
        pieces: list[Piece],
        group_of: Callable[[torch.Tensor], int | None],
        part: Place,
        reduced: torch.Tensor | None = None,
    ) -> list[tuple[Piece, Entry]]:
        """What is updated of some pieces of a chunk: those of parameters that are in a group and have a gradient.

        Args:
            pieces: Of one of :attr:`chunks`.
            group_of: The number of a user's parameter's group.
            part: Where the regions are.
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
                value = part(MASTERS, piece.place, piece.place_stop) if self.masters else _on_host(self._master(piece))
                found.append((piece, Entry(value, _on_host(gradient), group, self._state_before(piece, part))))
        return found

    def has_gradients(self, chunk: Chunk, group_of: Callable[[torch.Tensor], int | None]) -> bool:
        """Whether the users hold a gradient of anything in a chunk that is in a group."""
        with engine_access():
            users = [self.flat.users[piece.index] for piece in chunk.pieces]
            return any(read_grad(user) is not None and group_of(user) is not None for user in users)

    def _master(self, piece: Piece) -> torch.Tensor:
        """A piece of the parameters, where they rest."""
        return self.flat.masters.slices[piece.index][piece.offset : piece.offset + piece.numel]

    def _state_before(self, piece: Piece, part: Place) -> dict[str, Any]:
        kept = self._kept.get(piece.index)
        if kept is None:
            return {}
        # Each piece counts the step by itself.
        beside = kept.beside if len(self._room.pieces[piece.index]) == 1 else own_copy(kept.beside)
        return {key: beside[key] if key in beside else part(key, piece.place, piece.place_stop) for key in kept.keys}

    def absorb(self, piece: Piece, entry: Entry, part: Place) -> None:
        """Keep what an update has made of a piece."""
        if self.writes_mirror:
            self.flat.resting.write_mirror(piece.start, entry.value)
        put(part(MASTERS, piece.place, piece.place_stop) if self.masters else self._master(piece), entry.value)
        self._absorb_state(piece, entry.state, part)

    def _absorb_state(self, piece: Piece, state: dict[str, Any], part: Place) -> None:
        left = _Kept(list(state), {})
        for key, value in state.items():
            if self._has_region(piece.index, key, value, piece.numel):
                put(part(key, piece.place, piece.place_stop), value)
            else:
                left.beside[key] = value
        known = self._left.setdefault(piece.index, left)
        if known is not left and not (known.keys == left.keys and is_same(known.beside, left.beside)):
            raise self._error(
                piece.index,
                "the optimizer makes another state for one piece of a parameter than for the others",
                found=f"{known.beside} and {left.beside}",
                cure="use the class itself: an offloaded optimizer updates a parameter in pieces",
            )

    # ------------------------------------------------------------------ one parameter's state

    def has_state(self, index: int) -> bool:
        return index in self._kept

    def keys(self, index: int) -> Iterator[str]:
        """Of a parameter's state."""
        kept = self._kept.get(index)
        return iter(() if kept is None else list(kept.keys))

    def region(self, index: int, key: str) -> torch.Tensor:
        """This rank's slice of a parameter's state, to read or to write; of a file a view, nothing is read yet."""
        pieces = self._room.pieces[index]
        return self.store.part(key, pieces[0].place, pieces[-1].place_stop)

    def value(self, index: int, key: str) -> Any:
        """One of a parameter's states. Raises KeyError."""
        kept = self._kept.get(index)
        if kept is None or key not in kept.keys:
            raise KeyError(key)
        return kept.beside[key] if key in kept.beside else self.region(index, key)

    def set_value(self, index: int, key: str, value: Any) -> None:
        """Copy a state to where it is kept.

        Raises:
            OffloadError: It has not the shape or the dtype of what is kept, or there is no place for it.
        """
        has_region = self._has_region(index, key, value, self._numel(index))
        if has_region:
            put(self.region(index, key), value)
        kept = self._kept.setdefault(index, _Kept([], {}))
        kept.beside.pop(key, None)
        if not has_region:
            kept.beside[key] = own_copy(value)
        if key not in kept.keys:
            kept.keys.append(key)

    def drop_value(self, index: int, key: str) -> None:
        """Raises KeyError."""
        kept = self._kept.get(index)
        if kept is None or key not in kept.keys:
            raise KeyError(key)
        kept.keys.remove(key)
        kept.beside.pop(key, None)
        if not kept.keys:
            del self._kept[index]

    def set_state(self, index: int, state: dict[str, Any], filled: set[str]) -> None:
        """Take a parameter's state, whole slices, in place of what it has. Those in ``filled`` are in their regions."""
        for key, value in state.items():
            self._has_region(index, key, value, self._numel(index))  # all is refused before the first is taken
        self._kept.pop(index, None)
        for key, value in state.items():
            if key in filled:
                self._kept.setdefault(index, _Kept([], {})).keys.append(key)
            else:
                self.set_value(index, key, value)

    def start(self, index: int, first_state: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        """Give a parameter what ``first_state(values)`` returns, piece by piece."""
        for piece in self._room.pieces[index]:
            values = _on_host(self._master(piece))
            self._absorb_state(piece, first_state(values), self.store.part)
        left = self._left.pop(index)
        if left.keys:
            self._kept[index] = left

    def drop_state(self, index: int) -> None:
        self._kept.pop(index, None)

    def _numel(self, index: int) -> int:
        pieces = self._room.pieces[index]
        return pieces[-1].stop - pieces[0].start

    def _has_region(self, index: int, key: str, value: Any, numel: int) -> bool:
        """Whether a state of a piece of ``numel`` elements belongs into a region: its key tells."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        if key not in self.store.dtypes:
            if key in self.probed.beside or value.shape != (numel,) or numel == 1:
                return False
            raise self._error(
                index,
                f"no space was reserved for a state '{key}' of an element per element",
                expected=", ".join(self.store.dtypes) or "none",
                cure="an offloaded optimizer keeps what its class makes in a first step with the groups' settings",
            )
        if value.shape != (numel,):
            raise self._error(
                index, f"the state '{key}' has another shape", expected=f"({numel},), this rank's slice",
                found=tuple(value.shape), cure="assign an element for each element of the slice",
            )  # fmt: skip
        dtype = self.store.dtypes[key]
        if torch.promote_types(value.dtype, dtype) != dtype:
            raise self._error(
                index, f"the state '{key}' has a dtype that does not fit where it is kept", expected=dtype,
                found=value.dtype, cure=f"round it: value.to({dtype})",
            )  # fmt: skip
        return True

    def _error(self, index: int, problem: str, **details: Any) -> OffloadError:
        flat = self.flat
        return OffloadError(
            problem, **flat.where(index), **details
        )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.to("cpu")
