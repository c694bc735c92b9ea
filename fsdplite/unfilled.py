"""Tensors that have no values, which a forward refuses: built on the meta device, loaded by halves, or lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import FSDPError
from .flat_param import FlatParameter
from .materialize import was_filled

__all__ = ["Unfilled", "listed"]


class Unfilled(dict[str, Any]):
    """By name, the place of each: a flat parameter and an index, or what ``was_filled`` asks about a buffer.

    Attributes:
        half_loaded: Names of those that a load may have written in part before it failed.
        lost: Names of those that were in a file which is no more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.half_loaded: set[str] = set()
        self.lost: set[str] = set()

    def copy(self) -> Unfilled:
        twin = Unfilled()
        twin.update(self)
        twin.half_loaded = set(self.half_loaded)
        twin.lost = set(self.lost)
        return twin

    def half_load(self, flat: FlatParameter, index: int) -> None:
        """A load has written one in part."""
        self._add(flat, index)
        self.half_loaded.add(flat.names[index])

    def lose(self, flat: FlatParameter) -> None:
        """The file that held a flat parameter's masters is lost."""
        for index in range(len(flat.users)):
            self._add(flat, index)
        self.lost.update(flat.names)
        flat.was_lost = True

    def _add(self, flat: FlatParameter, index: int) -> None:
        flat.unfilled.add(index)
        self[flat.names[index]] = (flat, index)
        flat.mark_updated()

    def refuse(self, rank: int) -> None:
        """Raise if there is any."""
        for name, place in list(self.items()):
            if not isinstance(place[0], FlatParameter) and was_filled(*place):
                del self[name]  # a buffer that was written since
        names = sorted(self)
        mixed = [name for name in names if name in self.half_loaded]
        if mixed:
            raise FSDPError(
                "a load ended in the middle: the model holds a mixture of old and new values",
                found=listed(mixed),
                parameter=mixed[0],
                rank=rank,
                cure="load again, and let no error of the load pass unseen",
            )
        self.refuse_lost(names, rank)
        if names:
            raise FSDPError(
                "tensors built on the meta device were never filled",
                found=listed(names),
                parameter=names[0],
                rank=rank,
                cure="give their modules a reset_parameters() that fills them, build them on a real device on the "
                "first rank (sync_params=True), or load weights before the first forward",
            )

    def refuse_lost(self, names: Iterable[str], rank: int) -> None:
        """Raise if any of these is lost."""
        lost = [name for name in names if name in self and name in self.lost]
        if lost:
            raise FSDPError(
                "the masters of these parameters were lost with the file of the offloaded optimizer that held them",
                found=listed(lost),
                parameter=lost[0],
                rank=rank,
                cure="load a checkpoint: fsdp.load_checkpoint(root, model, optimizer)",
            )


def listed(names: list[str]) -> str:
    """The first twenty, and how many more there are."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
