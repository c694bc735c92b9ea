"""Warnings that point at the user's line, however deep in the package they are found."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]

_NOT_THE_USERS = ("fsdplite", "torch")  # a module's call, an optimizer's step and autograd lie in between


def warn_user(text: str) -> None:
    """A ``UserWarning`` at the nearest caller that is part of neither the package nor torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package_of(frame.f_globals) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def _package_of(names: dict) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
