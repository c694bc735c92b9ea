"""``fsdplite parity``: does a model train sharded as it trains unsharded?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from .options import add_wrap_options, parse_policy
from .ranks import RENDEZVOUS, run_on_ranks, under_torchrun
from .target import UsageError, load_target

__all__ = ["add_parser"]

_DESCRIPTION = """\
Train a model for a few steps sharded over ranks, and again unsharded in one process from the same seed on the same
batches, and show the largest difference of every parameter and gradient.

TARGET names a callable, as package.module:name or path/to/file.py:name, that takes no arguments and returns
  a module                            batches are guessed from its first layer, or
  (module, make_batch)                make_batch(step, rank, world_size) returns one rank's batch: a tensor, a tuple
                                      of positional arguments, a dict of keyword arguments, or (args, kwargs), or
  (module, make_batch, loss_of)       loss_of(module, *args, **kwargs) returns a scalar; without it the loss is the
                                      output if that is a scalar, else the mean of all floating outputs squared.
It is called twice with the same seed and must build the same weights.
"""
_EPILOG = """\
examples:
  fsdplite parity model.py:build
  fsdplite parity my_project.models:GPT --ranks 2 --policy by_class:Block --precision bf16 --bitwise
  torchrun --standalone --nproc-per-node 4 -m fsdplite parity model.py:build --stage 2 --json

exit codes: 0 within tolerance, 1 not, 2 usage
"""
_SHOWN_ROWS = 60


def add_parser(commands: Any) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "parity",
        help="compare sharded training of a model with unsharded training",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="what builds the model (see above)")
    add("--ranks", type=_positive, metavar="N",
        help="ranks to start on this machine's CPU (default 1); under torchrun its own are used")
    add("--steps", type=_positive, default=3, metavar="N", help="optimizer steps (default 3)")
    add_wrap_options(parser)
    add("--optimizer", default="SGD", metavar="NAME", help="an element-wise optimizer of torch.optim (default SGD)")
    add("--lr", type=float, default=0.1, help="learning rate (default 0.1)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--tolerance", type=float, metavar="X",
        help="largest difference over max(1, largest value) (default 1e-6; 1e-10 for fp64 parameters)")
    add("--bitwise", action="store_true", help="ask for equal bits, which are promised on one and two ranks")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {number}")
    return number


def _run(args: argparse.Namespace) -> int:
    try:
        if under_torchrun():
            world_size = int(os.environ["WORLD_SIZE"])
            if args.ranks not in (None, world_size):
                raise UsageError(f"--ranks {args.ranks} under a launcher that started {world_size}; leave --ranks out")
        elif args.ranks is not None and args.ranks > 1:
            return run_on_ranks(_as_arguments(args), args.ranks)
        return _compare(args)
    except UsageError as error:
        print(f"fsdplite parity: {error}", file=sys.stderr)
        return 2


def _as_arguments(args: argparse.Namespace) -> list[str]:
    """The command line again, for the ranks."""
    arguments = ["parity", args.target]
    for name in ("ranks", "steps", "stage", "precision", "policy", "optimizer", "lr", "seed", "tolerance"):
        value = getattr(args, name)
        if value is not None:
            arguments += [f"--{name}={value}"]
    return arguments + [f"--{name}" for name in ("bitwise", "json") if getattr(args, name)]


def _compare(args: argparse.Namespace) -> int:
    import warnings

    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here needs it
    import torch
    import torch.distributed as dist

    from ..errors import ConfigError, FSDPError
    from ..groups import init_distributed
    from ..parity import check_parity

    factory = load_target(args.target)
    if isinstance(factory, torch.nn.Module):
        raise UsageError(
            f"'{args.target}' is a module that is built already, and parity trains two from one seed\n"
            "  cure: name a function without arguments that builds it"
        )
    if not callable(factory):
        raise UsageError(f"'{args.target}' is a {type(factory).__name__}, and cannot be called")
    make_optimizer = _optimizer(args.optimizer, args.lr)
    policy = parse_policy(args.policy)
    joined_here = not dist.is_initialized()
    if RENDEZVOUS in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ[RENDEZVOUS]}", rank=rank, world_size=world_size
        )
    device = init_distributed()
    try:
        report = check_parity(
            factory,
            steps=args.steps,
            stage=args.stage,
            precision=args.precision,
            policy=policy,
            make_optimizer=make_optimizer,
            seed=args.seed,
            tolerance=args.tolerance,
            bitwise=args.bitwise,
            device=device,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except FSDPError as error:
        print(f"fsdplite parity: {error}", file=sys.stderr)
        return 1
    finally:
        if joined_here and dist.is_initialized():
            dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        (_print_json if args.json else _print_table)(report, args)
    return 0 if report.passed else 1


def _optimizer(name: str, lr: float) -> Any:
    import torch

    known = {
        entry.lower(): cls
        for entry, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    cls = known.get(name.lower())
    if cls is None:
        raise UsageError(f"--optimizer: expected one of {', '.join(sorted(c.__name__ for c in known.values()))}, "
                         f"found '{name}'")  # fmt: skip
    return lambda parameters: cls(parameters, lr=lr)


# -------------------------------------------------------------------------------------------------------------- output


def _print_json(report: Any, args: argparse.Namespace) -> None:
    def finite(value: float) -> float | None:
        return value if value < float("inf") else None  # JSON has no infinity

    rows = [
        {
            "name": row.name,
            "kind": row.kind,
            "shape": list(row.shape),
            "difference": finite(row.difference),
            "relative": finite(row.relative),
            "tolerance": row.tolerance,
            "passed": row.passed,
        }
        for row in report.differences
    ]
    head = {"passed": report.passed, "world_size": report.world_size, "steps": report.steps, "stage": args.stage,
            "precision": args.precision, "losses": report.losses}  # fmt: skip
    print(json.dumps(head | {"differences": rows}))


def _print_table(report: Any, args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    by_name: dict[str, dict[str, Any]] = {}
    for row in report.differences:
        by_name.setdefault(row.name, {})[row.kind] = row
    apart = [pair for pair in by_name.values() if not all(row.passed and row.difference == 0 for row in pair.values())]
    worst_first = sorted(apart, key=lambda pair: -max(row.relative for row in pair.values()))
    table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
    table.add_column("tensor", overflow="fold", min_width=12)
    table.add_column("shape", overflow="fold", min_width=6)
    table.add_column("parameter", justify="right", no_wrap=True)
    table.add_column("gradient", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for pair in worst_first[:_SHOWN_ROWS]:
        parameter, gradient = pair["parameter"], pair["gradient"]
        verdict = "ok" if parameter.passed and gradient.passed else "DIFFERS"
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        table.add_row(parameter.name, shape, _amount(parameter), _amount(gradient), verdict)
    console.print(f"largest absolute difference after {report.steps} steps on {report.world_size} rank(s), stage "
                  f"{args.stage}, {args.precision}", markup=False)  # fmt: skip
    if apart:
        console.print(table)
    if len(worst_first) > _SHOWN_ROWS:
        console.print(f"and {len(worst_first) - _SHOWN_ROWS} more tensors, none of them further apart")
    if equal := len(by_name) - len(apart):
        console.print(f"{equal} of {len(by_name)} tensors are equal, parameter and gradient")
    failed = sum(not row.passed for row in report.differences)
    asked = "equal bits" if args.bitwise else "tolerance"
    total = len(report.differences)
    console.print(f"all {total} comparisons within {asked}" if not failed else f"{failed} of {total} beyond {asked}")


def _amount(row: Any) -> str:
    if row.difference == float("inf"):
        return "no match"
    return "equal" if row.difference == 0 else f"{row.difference:.1e}"
