"""``scripts/bench.py offload``: a step whose optimizer state is in files, beside what the disk and the update can do."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(topics: Any) -> None:
    """Declare the options."""
    offload = topics.add_parser("offload", help="optimizer state in files: bytes a second, and how much overlaps")
    add = offload.add_argument
    add("--path", type=Path, help="an existing directory on the disk to measure; default: this one")
    add("--million", type=int, default=96, help="millions of parameters (default 96)")
    add("--rounds", type=int, default=7, help="measured rounds (default 7)")
    add("--buffer-mib", type=int, default=32, help="size of a buffer (default 32)")
    add("--buffers", type=int, default=4, help="number of buffers (default 4)")
    add("--rows", type=int, default=64, help="of the batch for updates in backward (default 64; 0 leaves those out)")
    add("--no-fused", action="store_true", help="the update of torch's default instead of the fused one")
    add("--json", type=Path, metavar="PATH", help="also write what was measured")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Files lie in a directory of their own, which goes whatever ends the run but SIGKILL."""
    from engine_bench.report import describe_machine

    from .step import as_lines, measure

    signal.signal(signal.SIGTERM, _end)
    where = args.path if args.path is not None else Path.cwd()  # a temporary directory may be memory
    with tempfile.TemporaryDirectory(prefix="fsdplite-bench-", dir=where) as folder:
        numel, buffer_bytes = args.million * 10**6, args.buffer_mib * 2**20
        found = measure(folder, numel, args.rounds, buffer_bytes, args.buffers, not args.no_fused, args.rows)
    machine = describe_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print("\n".join(as_lines(found)))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, **asdict(found)}, indent=1) + "\n", encoding="utf-8")
    return 0


def _end(number: int, frame: Any) -> None:
    """As an interrupt does: through everything that cleans up."""
    raise SystemExit(128 + number)
