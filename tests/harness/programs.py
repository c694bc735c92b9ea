"""Programs in ranks that have torch already: as torchrun starts them, without the seconds that its imports take."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

from tests.harness.pool import run


def run_program(path: Path, *arguments: str, ranks: int = 1, timeout_s: float = 300.0) -> str:
    """What a program prints, all ranks' output end to end.

    Args:
        path: A Python file that runs as ``__main__``, in new ranks with torchrun's variables; one rank has none.
        arguments: Its command line.
        ranks: How many run it.
        timeout_s: How long it may take.

    Raises:
        RanksFailed: It raised, or left by ``SystemExit`` with anything but success; holds what it printed.
    """
    return "".join(run(ranks, _run_main, path, arguments, fresh=True, group=ranks > 1, timeout_s=timeout_s))


def _run_main(path: Path, arguments: tuple[str, ...]) -> str:
    sys.argv = [str(path), *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise AssertionError(f"exit with {leaving.code}\n{output.getvalue()}") from None
    return output.getvalue()
