"""``scripts/bench.py checkpoint``: its options, its passes in order."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_bench.launch import run_ranks
from engine_bench.report import describe_machine

PASS_TIMEOUT_S = 1800.0
MEASURES = ("timing", "loads", "memory")
# A load at every world size reads what 2 ranks have saved; export and import follow in one process, and on 2 ranks.
LOADED_BY = (2, 1, 3)
MEMORY = (("foreground", 2), ("background", 2), ("export", 1), ("import", 2))


def add_parser(topics: Any) -> None:
    parser = topics.add_parser(
        "checkpoint", help="saves beside plain writes and torch.distributed.checkpoint; bytes read; memory"
    )
    add = parser.add_argument
    add("--measure", nargs="+", choices=MEASURES, default=list(MEASURES), help="which passes")
    add("--megabytes", type=int, help="of parameters and moments over all ranks; default 1000")
    add("--ranks", type=int, nargs="+", default=[2, 1], help="world sizes whose saves are timed")
    add("--rounds", type=int, help="measured rounds of each contender; default 8")
    add("--quick", action="store_true", help="200 MB and 3 rounds: about a minute")
    add("--path", type=Path, help="an existing directory on the disk to measure; default: the working directory")
    add("--markdown", action="store_true", help="print Markdown instead of tables")
    add("--json", type=Path, metavar="PATH", help="also write everything that was measured")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured. The files lie in a new directory that is removed at the end."""
    megabytes = args.megabytes or (200 if args.quick else 1000)
    rounds = args.rounds or (3 if args.quick else 8)
    command = " ".join(["scripts/bench.py", *(a for a in sys.argv[1:] if a != "--markdown")])
    found: dict[str, Any] = {"command": command, "machine": describe_machine(), "megabytes": megabytes}
    folder = Path(tempfile.mkdtemp(prefix="fsdplite-bench-", dir=args.path or Path.cwd()))

    def measure(what: str, world_size: int) -> Any:
        print(f"{what} on {world_size} rank(s) ...", file=sys.stderr, flush=True)
        arguments = ["--measure", what, "--megabytes", str(megabytes), "--rounds", str(rounds)]
        arguments += ["--folder", str(folder), "--world-size", str(world_size)]
        return run_ranks("checkpoint_bench.worker", arguments, world_size, what, PASS_TIMEOUT_S)

    try:
        if "timing" in args.measure:
            found["timing"] = {str(world_size): measure("timing", world_size) for world_size in args.ranks}
        if "loads" in args.measure:
            found["loads"] = {str(world_size): measure("loads", world_size) for world_size in LOADED_BY}
        if "memory" in args.measure:
            if "loads" not in args.measure:
                measure("loads", 2)  # leaves a checkpoint to export
            found["memory"] = {what: measure(what, world_size) for what, world_size in MEMORY}
    finally:
        shutil.rmtree(folder)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
