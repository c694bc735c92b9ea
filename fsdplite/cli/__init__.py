"""The ``fsdplite`` command. One file per command; none of them imports torch before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..version import __version__
from . import ckpt, doctor, migrate, parity, plan
from .arguments import Parser

__all__ = ["main"]

_COMMANDS = (plan, parity, doctor, ckpt, migrate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; None takes the process's own.

    Returns:
        The exit code: 0 fine, 1 a problem was found, 2 the command was not used right.
    """
    parser = Parser(
        prog="fsdplite",
        description="Fully sharded data parallel training for PyTorch: tools for the command line.",
        epilog="exit codes: 0 fine, 1 a problem was found, 2 usage",
    )
    parser.add_argument("--version", action="version", version=f"fsdplite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed help or what is wrong
        return stop.code if isinstance(stop.code, int) else 0
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    return args.run(args)
