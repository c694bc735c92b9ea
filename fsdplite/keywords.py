"""Unknown keywords of public calls become errors that suggest the nearest known one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .errors import UnknownOptionError, did_you_mean

__all__ = ["known_keywords", "refuse_unknown"]

C = TypeVar("C", bound=Callable[..., Any])


def known_keywords(called: C) -> C:
    """The same function or class, which raises :class:`UnknownOptionError` where Python raises a bare ``TypeError``."""
    function = called.__init__ if isinstance(called, type) else called
    known = [
        name for name, parameter in inspect.signature(called).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]  # fmt: skip

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        refuse_unknown(called.__name__, given, known)
        return function(*args, **given)

    if not isinstance(called, type):
        return call
    called.__init__ = call
    return called


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """An error for the first name that is not known.

    Raises:
        UnknownOptionError: Lists what is known, and says what is near.
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise UnknownOptionError(
                f"{what} has no such option",
                expected=", ".join(known),
                found=repr(name) + did_you_mean(name, known),
            )
