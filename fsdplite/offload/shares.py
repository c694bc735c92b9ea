"""One step of chunks: a few pieces at a time, of one chunk or of several short ones, each with one call of the class."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .homes import Home, Place
from .pieces import Chunk, Piece, batches
from .update import Updater

__all__ = ["Share", "update"]


@dataclass(eq=False)
class Share:
    """What a step has to update of one chunk.

    Attributes:
        home: Whose.
        chunk: Of its chunks.
        reduced: The gradient of the whole shard, where the users do not hold it.
    """

    home: Home
    chunk: Chunk
    reduced: torch.Tensor | None


def update(
    shares: Sequence[tuple[Share, Place]],
    updater: Updater,
    groups: list[dict[str, Any]],
    group_of: Callable[[torch.Tensor], int | None],
) -> None:
    """Update shares, whose regions are at their places."""
    pieces = [(share, place, piece) for share, place in shares for piece in share.chunk.pieces]
    most_numel = min(share.home.piece_numel for share, _ in shares)
    for batch in batches(pieces, lambda item: item[2].numel, most_numel):
        found: list[tuple[Home, Place, Piece, Any]] = []
        for (share, place), of_it in itertools.groupby(batch, key=lambda item: item[:2]):
            own = [piece for _, _, piece in of_it]
            for piece, entry in share.home.entries(own, group_of, place, share.reduced):
                found.append((share.home, place, piece, entry))
        if found:
            updater.run([entry for *_, entry in found], groups)
        for home, place, piece, entry in found:
            home.absorb(piece, entry, place)
