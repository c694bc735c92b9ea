"""Errors that all ranks raise: as a note that travels, and as the exception at its end."""

from __future__ import annotations

from typing import Any

from .. import errors
from ..errors import CheckpointError, FSDPError

__all__ = ["SharedFailure", "failure_of", "record_of"]

_ATTRIBUTES = ("problem", "rank", "phase", "path", "errno", "parameter", "unit")


class SharedFailure(Exception):
    """Carries the error that all ranks raise out of the place that noticed it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def record_of(error: FSDPError) -> dict[str, Any]:
    return {
        "class": type(error).__name__,
        "text": str(error),
        **{name: getattr(error, name, None) for name in _ATTRIBUTES},
    }


def failure_of(record: dict[str, Any]) -> FSDPError:
    cls = getattr(errors, record["class"], CheckpointError)
    error = cls(record["text"])
    for name in _ATTRIBUTES:
        if record.get(name) is not None:
            setattr(error, name, record[name])
    return error
