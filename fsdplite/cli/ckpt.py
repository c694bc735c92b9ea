"""``fsdplite ckpt``: checkpoints from the command line. Nothing here imports torch, but for an export that casts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..errors import ConfigError, FSDPError
from . import ckpt_diff, ckpt_export, ckpt_inspect, ckpt_ls, ckpt_prune, ckpt_verify
from .ckpt_output import Outcome, escaped, json_text, write_out
from .target import UsageError

__all__ = ["add_parser"]

_ACTIONS = (ckpt_ls, ckpt_inspect, ckpt_verify, ckpt_diff, ckpt_export, ckpt_prune)
_LONGEST_LINE = 2000


def add_parser(commands: Any) -> None:
    """Declare the commands and their options."""
    parser = commands.add_parser(
        "ckpt",
        help="list, inspect, verify, compare, export and prune checkpoints",
        description="Checkpoints from the command line. A place is a directory or a URL of an fsspec file system.",
        epilog="exit codes: 0 fine, 1 a problem or a difference was found, 2 usage",
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=lambda args: _help(parser))
    for action in _ACTIONS:
        added = action.add_parser(actions)
        added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.add_argument("--json", action="store_true", help="print one JSON object with everything")
        added.set_defaults(run=_run, action=action.run)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _run(args: argparse.Namespace) -> int:
    try:
        outcome: Outcome = args.action(args)
        write_out(json_text(outcome.document) if args.json else outcome.text())
        return outcome.code
    except (UsageError, ConfigError) as problem:
        return _complain(str(problem), 2)
    except FSDPError as problem:
        text = str(problem)
    except OSError as problem:
        where = f" at {problem.filename}" if problem.filename is not None else ""
        text = f"the file system refused{where}: {problem.strerror or problem}"
    except MemoryError:
        text = "there is not enough memory for what the files say they hold"
    except RecursionError:
        text = "values in the checkpoint are nested too deeply to be shown"
    except KeyboardInterrupt:
        return _complain("interrupted", 130)  # as a shell says it
    code = _complain(text, 1)
    if args.json:
        write_out(json_text({"error": text}))
    return code


def _complain(text: str, code: int) -> int:
    lines = [escaped(line, _LONGEST_LINE) for line in text.split("\n")]
    print("fsdplite ckpt: " + "\n".join(lines), file=sys.stderr)
    return code
