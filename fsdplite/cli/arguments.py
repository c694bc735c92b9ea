"""The parser of every command: what it does not know is said by the command that was meant, with what is near."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import did_you_mean

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose commands, which are parsers of the same class, refuse what they do not know.

    Argparse hands it up instead, and the usage shown is that of the outermost command.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, and an error of this very command if anything is left over."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [text.partition("=")[0] for text in unknown if text.startswith("-") and text != "--"]
            if options:
                known = [option for option in self._option_string_actions if option.startswith("--")]
                named = [f"there is no option {option}{did_you_mean(option, known)}" for option in options]
                self.error("; ".join(named))
            self.error(f"not expected: {' '.join(unknown)}")
        return found, unknown
