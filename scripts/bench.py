#!/usr/bin/env python3
"""Benchmarks. `engine` compares fsdplite with fully_shard, FullyShardedDataParallel and DDP on the CPU over gloo;
`offload` compares a step whose optimizer state is in files with what the disk and the update need alone.

    scripts/bench.py engine                        all cases, about five minutes on two idle cores
    scripts/bench.py engine --quick                about one minute
    scripts/bench.py engine --case host --rounds 100
    scripts/bench.py engine --markdown             the tables of the README
    scripts/bench.py engine --json found.json      everything that was measured, every step
    scripts/bench.py offload --path /mnt/nvme0     on that disk; about two minutes; 32 bytes of disk a parameter
    scripts/bench.py checkpoint                    1 GB saved and loaded, about five minutes and 4 GB of files
    scripts/bench.py checkpoint --quick --path /mnt/nvme0
    scripts/bench.py plan                          simulated beside real steps, about two minutes
    scripts/bench.py plan --published              simulated beside published throughput, about a minute

Contenders run interleaved, in the same processes, and ratios are taken between steps of the same round: another
program on the machine slows all of them down. Milliseconds are worth less than ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the sources beside this script, installed or not

PASS_TIMEOUT_S = 1800.0


def at_least_two(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, found {number}")
    return number


def options() -> argparse.Namespace:
    from checkpoint_bench import command as checkpoint_command
    from offload_bench import command as offload_command
    from plan_bench import command as plan_command
    from engine_bench.models import CASES

    parser = argparse.ArgumentParser(
        prog="scripts/bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    topics = parser.add_subparsers(dest="topic", required=True)
    engine = topics.add_parser("engine", help="step time, host time, peak bytes and collectives beside other engines")
    add = engine.add_argument
    known = "; ".join(f"{name}: {case.title}" for name, case in CASES.items())
    add("--case", nargs="+", choices=CASES, default=list(CASES), help=f"what to run ({known})")
    add("--rounds", type=at_least_two, help="measured steps of each contender; default: as many as the case needs")
    add("--quick", action="store_true", help="few rounds, and bytes of two contenders: about a minute")
    add("--measure", nargs="+", choices=("timing", "memory"), default=["timing", "memory"], help="which passes")
    add("--markdown", action="store_true", help="print Markdown instead of tables")
    add("--json", type=Path, metavar="PATH", help="also write everything that was measured")
    checkpoint_command.add_parser(topics)
    offload_command.add_parser(topics)
    plan_command.add_parser(topics)
    return parser.parse_args()


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    from engine_bench.launch import run_pass
    from engine_bench.models import CASES
    from engine_bench.report import describe_machine

    command = " ".join(["scripts/bench.py", *(a for a in sys.argv[1:] if a != "--markdown")])
    found: dict[str, Any] = {"command": command, "machine": describe_machine(), "cases": {}}
    for name in args.case:
        case = CASES[name]
        rounds = args.rounds or (case.quick_rounds if args.quick else case.rounds)
        entry: dict[str, Any] = {"title": case.title, "world_size": case.world_size, "units": case.units}
        for measure in args.measure:
            if measure == "memory" and not case.has_peak:
                continue
            print(f"{case.title}: {measure} ...", file=sys.stderr, flush=True)
            found["cases"][name] = entry
            entry[measure] = run_pass(name, measure, case.world_size, rounds, args.quick, PASS_TIMEOUT_S)
            if args.json is not None:  # after every pass: a long run that is stopped has not been for nothing
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main() -> int:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here needs it
    args = options()
    from engine_bench.launch import PassFailed
    from engine_bench.report import as_markdown, print_tables

    try:
        if args.topic == "plan":
            from plan_bench import command

            return command.run(args)
        if args.topic == "offload":
            from offload_bench import command

            return command.run(args)
        if args.topic == "checkpoint":
            from checkpoint_bench import command, report

            found = command.run(args)
            made = report.tables(found)
        else:
            from engine_bench.report import tables

            found = run_engine(args)
            made = tables(found)
    except PassFailed as failure:
        print(f"scripts/bench.py: {failure}", file=sys.stderr)
        return 1
    if args.markdown:
        print(as_markdown(found, made))
    else:
        print_tables(found, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
