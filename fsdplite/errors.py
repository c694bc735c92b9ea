"""The exception tree. Every error says what was wrong, where, and what to call instead.

All of them derive from :class:`FSDPError`. Those caused by an argument are also ``ValueError``, so code that
catches ``ValueError`` for bad configuration keeps working.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

__all__ = [
    "did_you_mean",
    "unit_label",
    "FSDPError",
    "ConfigError",
    "UnknownOptionError",
    "PolicyError",
    "WrapError",
    "ShardedAccessError",
    "ParameterUseError",
    "GradientError",
    "RankMismatchError",
    "CollectiveError",
    "CheckpointError",
    "DoesNotFitError",
    "OffloadError",
]


class FSDPError(RuntimeError):
    """Base of all errors of this package.

    Args:
        problem: One sentence: what cannot be.
        expected: What should have been there.
        found: What was there.
        unit: Dotted name of the unit (``""`` is the root).
        parameter: Original dotted name of the parameter.
        rank: Rank on which this was seen.
        cure: What to do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        expected: Any = None,
        found: Any = None,
        unit: str | None = None,
        parameter: str | None = None,
        rank: int | None = None,
        cure: str | None = None,
    ) -> None:
        self.problem = problem
        self.unit = unit
        self.parameter = parameter
        self.rank = rank
        self.cure = cure
        lines = [problem]
        if expected is not None:
            lines.append(f"expected: {expected}")
        if found is not None:
            lines.append(f"found: {found}")
        where = []
        if unit is not None:
            where.append(f"unit {unit_label(unit)}")
        if parameter is not None:
            where.append(f"parameter '{parameter}'")
        if rank is not None:
            where.append(f"rank {rank}")
        if where:
            lines.append("where: " + ", ".join(where))
        if cure is not None:
            lines.append(f"cure: {cure}")
        super().__init__("\n  ".join(lines))


class ConfigError(FSDPError, ValueError):
    """An option has a value that cannot be used."""


class UnknownOptionError(ConfigError, TypeError):
    """An option that does not exist."""


class PolicyError(ConfigError):
    """A wrap policy does not fit the model."""


class WrapError(ConfigError):
    """A module cannot be wrapped the way it was asked for."""


class ShardedAccessError(FSDPError):
    """A sharded parameter was used as if it were whole."""


class ParameterUseError(FSDPError):
    """A gathered parameter was used in a way that cannot survive resharding."""


class GradientError(FSDPError):
    """A gradient is not in the state that the call needs."""


class RankMismatchError(FSDPError):
    """Ranks disagree about the model, the options or the order of units."""


class CollectiveError(FSDPError):
    """A collective failed or did not finish in time."""


class CheckpointError(FSDPError):
    """A checkpoint could not be saved, loaded, verified or exported.

    Attributes:
        phase: What was being done: ``"write"``, ``"publish"``, ``"read"``, ...
        path: The file or directory.
        errno: Of the operating system's error, if there was one.
    """

    def __init__(
        self,
        problem: str,
        *,
        phase: str | None = None,
        path: str | None = None,
        errno: int | None = None,
        **details: Any,
    ) -> None:
        super().__init__(problem, **details)
        self.phase = phase
        self.path = path
        self.errno = errno
        parts = []
        if phase is not None:
            parts.append(f"phase '{phase}'")
        if path is not None:
            parts.append(f"path {path}")
        if errno is not None:
            parts.append(f"errno {errno} ({os.strerror(errno)})")
        if parts:
            self.args = (f"{self.args[0]}\n  at: {', '.join(parts)}",)


class DoesNotFitError(FSDPError):
    """A planned step needs more memory than there is.

    Attributes:
        remedies: Changes that would make it fit, cheapest first; each has ``text``, ``peak_bytes``, ``saved_bytes``
            and ``price``.
    """

    def __init__(self, problem: str, *, remedies: tuple[Any, ...] = (), **details: Any) -> None:
        super().__init__(problem, **details)
        self.remedies = remedies


class OffloadError(FSDPError):
    """Optimizer state could not be kept in, or read from, its files.

    Attributes:
        path: The file or directory.
        errno: Of the operating system's error, if there was one.
    """

    def __init__(self, problem: str, *, path: str | None = None, errno: int | None = None, **details: Any) -> None:
        super().__init__(problem, **details)
        self.path = path
        self.errno = errno
        parts = [] if path is None else [f"path {path}"]
        if errno is not None:
            parts.append(f"errno {errno} ({os.strerror(errno)})")
        if parts:
            self.args = (f"{self.args[0]}\n  at: {', '.join(parts)}",)


def unit_label(name: str) -> str:
    """How a unit is called in messages: its dotted name, or ``(root)``."""
    return f"'{name}'" if name else "(root)"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """What to append to an unknown name: the nearest of the known ones, or nothing if none is near."""
    import difflib  # only once something is wrong

    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
