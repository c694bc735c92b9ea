"""``scripts/bench.py plan``: predicted step times beside real ones on this machine, or beside published ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

PASS_TIMEOUT_S = 600.0


def add_parser(topics: Any) -> None:
    """Declare the options."""
    plan = topics.add_parser("plan", help="simulated step times beside real gloo runs, or beside published numbers")
    add = plan.add_argument
    add("--ranks", type=int, default=2, help="gloo ranks on this machine (default 2)")
    add("--rounds", type=int, default=7, help="measured steps of each contender (default 7)")
    add("--auto", action="store_true", help="fsdp.auto beside wrapping by block, on five models, instead")
    add("--published", action="store_true", help="published runs instead: nothing is measured")
    add("--markdown", action="store_true", help="print Markdown instead of tables")
    add("--json", type=Path, metavar="PATH", help="also write everything")


def run(args: argparse.Namespace) -> int:
    """Measure, or look up, and print both sides.

    Raises:
        PassFailed: A rank ended with an error.
    """
    from engine_bench.launch import run_ranks

    from .published import compare_published
    from .report import print_auto, print_published, print_rows

    found: Any
    if args.published:
        found = compare_published()
        print_published(found, args.markdown)
    else:
        module = "plan_bench.auto_worker" if args.auto else "plan_bench.worker"
        arguments = ["--world-size", str(args.ranks), "--rounds", str(args.rounds)]
        found = run_ranks(module, arguments, args.ranks, "plan", PASS_TIMEOUT_S)
        (print_auto if args.auto else print_rows)(found, args.markdown)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0
