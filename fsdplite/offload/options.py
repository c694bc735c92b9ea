"""``Offload``: what is kept off the device, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, did_you_mean
from ..keywords import known_keywords

__all__ = ["Offload", "as_offload"]

_DEFAULT_BUFFER_BYTES = 32 * 2**20


@known_keywords
@dataclass(frozen=True)
class Offload:
    """What rests in host memory or on a disk, for ``fsdp_wrap(..., offload=...)``. Each is a switch of its own.

    Args:
        params: ``"cpu"``: parameters' and gradients' shards rest in host memory. None: on the device that computes.
        optimizer: Where an optimizer made by ``fsdp.offloaded`` keeps its state: ``"cpu"`` for host memory,
            ``"nvme"`` for files under ``path``. None: there is no such optimizer.
        path: An existing directory on a fast disk of this machine; each rank keeps files of its own there.
        pin: Page-locked host memory where there is CUDA: copies are faster and overlap.
        buffer_bytes: Size of one of the buffers through which state passes, per kind of state (Adam has two).
        buffers: How many of those there are: for reading ahead, updating, and writing behind.
    """

    params: str | None = None
    optimizer: str | None = None
    path: str | os.PathLike[str] | None = None
    pin: bool = True
    buffer_bytes: int = _DEFAULT_BUFFER_BYTES
    buffers: int = 4

    def __post_init__(self) -> None:
        _check_word("params", self.params, ("cpu",))
        _check_word("optimizer", self.optimizer, ("cpu", "nvme"))
        if self.optimizer == "nvme" and self.path is None:
            raise ConfigError(
                'Offload(optimizer="nvme") needs a path', cure='Offload(optimizer="nvme", path="/mnt/nvme0/run")'
            )
        if self.path is not None and self.optimizer != "nvme":
            raise ConfigError(
                "Offload(path=...) is for files of optimizer state",
                expected='optimizer="nvme" beside it',
                found=f"optimizer={self.optimizer!r}",
            )
        if self.path is not None and not isinstance(self.path, (str, os.PathLike)):
            raise ConfigError("Offload(path=...) is a directory", expected="a path", found=repr(self.path))
        if self.path is not None:
            if not os.fspath(self.path):
                raise ConfigError("Offload(path=...) is a directory", expected="a path", found=repr(self.path))
            object.__setattr__(self, "path", os.path.abspath(self.path))  # the program may change its directory
        if not isinstance(self.buffers, int) or self.buffers < 3:
            raise ConfigError(
                "reading ahead, updating and writing behind take a buffer each",
                expected="buffers of at least 3",
                found=repr(self.buffers),
            )
        if not isinstance(self.buffer_bytes, int) or self.buffer_bytes < 4096:
            raise ConfigError("buffer_bytes is a number of bytes", expected=">= 4096", found=repr(self.buffer_bytes))

    def describe(self) -> str:
        """What must be the same on all ranks."""
        return f"offload params={self.params} optimizer={self.optimizer}"


def _check_word(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value is None or value in known:
        return
    raise ConfigError(
        f"Offload({name}=...) does not know this place",
        expected="None, " + ", ".join(repr(word) for word in known),
        found=repr(value) + did_you_mean(value, known),
    )


def as_offload(value: Any, stage: Any) -> Offload:
    """The options for ``fsdp_wrap(offload=...)``; None is nothing.

    Raises:
        ConfigError: Something else, or parameters that no stage shards.
    """
    if value is None:
        return Offload()
    if not isinstance(value, Offload):
        raise ConfigError(
            "offload takes an Offload", expected='fsdp.Offload(params="cpu"), or None', found=repr(value)
        )
    if value.params is not None and not stage.shards_optimizer:
        raise ConfigError(
            "stage 0 computes with the resting parameters themselves, so they cannot rest elsewhere",
            expected="stage 1, 2 or 3 with Offload(params=...)",
            found=f"stage {stage.number}",
        )
    return value
