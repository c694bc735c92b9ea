"""Errors of the file system as ours, and errors that all ranks raise: as a note, and as the exception at its end."""

from __future__ import annotations

from typing import Any

from .. import errors
from ..errors import CheckpointError, FSDPError

__all__ = ["SharedFailure", "failure_of", "from_os_error", "record_of"]

_ATTRIBUTES = ("problem", "rank", "phase", "path", "errno", "parameter", "unit")


def from_os_error(
    problem: OSError, what: str, *, phase: str, path: str | None, rank: int | None = None
) -> CheckpointError:
    """What the file system said, as an error of ours. ``path`` is where, unless it said that itself."""
    where = problem.filename or path
    return CheckpointError(
        f"{what}: {problem.strerror or problem}",
        rank=rank,
        phase=phase,
        path=None if where is None else str(where),
        errno=problem.errno,
    )


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
