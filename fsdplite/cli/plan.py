"""``fsdplite plan``: what would a sharded step of this model hold and send?"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from .options import add_wrap_options, parse_policy
from .target import UsageError, load_target

__all__ = ["add_parser"]

_DESCRIPTION = """\
Predict memory and traffic of a sharded training step, without a process group, a device, or memory for the model.

TARGET names a module, or a callable without arguments, as package.module:name or path/to/file.py:name. A callable is
called under the meta device and returns
  a module                            activations are left out, unless --input is given, or
  (module, make_batch)                make_batch(step, rank, world_size) returns one rank's microbatch, or
  (module, make_batch, loss_of)       loss_of(module, *args, **kwargs) returns a scalar
"""
_EPILOG = """\
examples:
  fsdplite plan model.py:build --world-size 64 --policy by_class:Block --precision bf16
  fsdplite plan model.py:build --world-size 8 --input 4x2048:int64 --recompute sqrt --budget 80GiB
  fsdplite plan model.py:build --mesh 4x8 --policy from_model --json

exit codes: 0 fine, 1 it does not fit the budget or cannot be planned, 2 usage
"""


def add_parser(commands: Any) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "plan",
        help="predict memory and traffic of a sharded step",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="what builds the model (see above)")
    add("--world-size", type=int, metavar="N", help="ranks; may be left out with --mesh")
    add("--mesh", metavar="RxS", help="R replicas of S shards")
    add_wrap_options(parser)
    add("--optimizer", default="AdamW", metavar="NAME", help="one of torch.optim, or none (default AdamW)")
    add("--recompute", metavar="WHAT", help="sqrt, a byte budget (2GiB), or a policy as for --policy")
    add("--offload", choices=("optimizer", "params", "both"), help="what rests in host memory (default: nothing)")
    add("--prefetch", type=int, default=1, metavar="N", help="units gathered ahead (default 1)")
    add("--microbatches", type=int, default=1, metavar="N", help="backwards a step (default 1)")
    add("--no-sync", action="store_true", help="all but the last of them without synchronisation")
    add("--input", action="append", metavar="SHAPE[:DTYPE]",
        help="a positional input of one rank's microbatch, as 4x2048:int64; repeat for several (default dtype float32)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="kind of device (default cuda)")
    add("--rank", type=int, default=0, metavar="N", help="whose memory (default 0)")
    add("--budget", metavar="BYTES",
        help="memory of a rank, as 80GiB: exit 1, with what would help, if it is not enough")
    add("--html", metavar="PATH", help="also write a page with tables, memory by phase and a timeline")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import warnings

    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here needs it
    from ..errors import ConfigError, DoesNotFitError, FSDPError

    try:
        plan = _plan(args)
        refusal = None
        try:
            if args.budget is not None:
                plan.fits(args.budget)
        except DoesNotFitError as error:
            refusal = error
    except (UsageError, ConfigError) as error:
        print(f"fsdplite plan: {error}", file=sys.stderr)
        return 2
    except FSDPError as error:
        print(f"fsdplite plan: {error}", file=sys.stderr)
        return 1
    if args.html is not None:
        try:
            Path(args.html).write_text(plan.to_html(timeline=_timeline(plan)), encoding="utf-8")
        except OSError as error:
            print(f"fsdplite plan: --html: {args.html}: {error.strerror or error}", file=sys.stderr)
            return 2
    if args.json:
        print(json.dumps(_document(plan, args.budget, refusal)))
    else:
        print(plan, end="")
        if args.budget is not None:
            print(f"\n{refusal}" if refusal is not None else f"\nfits {args.budget}")
    return 0 if refusal is None else 1


def _timeline(plan: Any) -> Any:
    from ..planning.simulation import simulate

    return simulate(plan) if plan.has_activations else None


def _plan(args: argparse.Namespace) -> Any:
    from ..planning.prediction import plan

    options: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("stage", "precision", "prefetch", "microbatches", "no_sync", "device", "rank")
    }
    options["policy"] = parse_policy(args.policy)
    options["optimizer"] = None if args.optimizer == "none" else args.optimizer
    options["recompute"] = _recompute(args.recompute)
    if args.offload is not None:
        from ..offload.options import Offload

        options["offload"] = Offload(
            params="cpu" if args.offload in ("params", "both") else None,
            optimizer="cpu" if args.offload in ("optimizer", "both") else None,
        )
    if args.mesh is not None:
        shape = re.fullmatch(r"(\d+)x(\d+)", args.mesh)
        if shape is None:
            raise UsageError(f"--mesh: expected replicas x shards as 4x8, found '{args.mesh}'")
        options["mesh"] = int(shape[1]), int(shape[2])
    elif args.world_size is None:
        raise UsageError("expected --world-size N or --mesh RxS, found neither")
    if args.input:
        options["inputs"] = tuple(_input(text) for text in args.input)
    return plan(load_target(args.target), world_size=args.world_size, **options)


def _recompute(text: str | None) -> Any:
    if text is None or text == "sqrt":
        return text
    if text[:1].isdigit():
        from ..recompute.budget import recompute_within

        return recompute_within(text)
    return parse_policy(text, "--recompute")


def _input(text: str) -> Any:
    """A tensor on the meta device from ``4x2048:int64``."""
    import torch

    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not re.fullmatch(r"\d+(x\d+)*", shape) or not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input: expected a shape and a dtype as 4x2048:int64, found '{text}'")
    return torch.empty([int(size) for size in shape.split("x")], dtype=dtype, device="meta")


def _document(plan: Any, budget: str | None, refusal: Any) -> dict[str, Any]:
    document = plan.to_dict()
    if budget is not None:
        document["budget"] = budget
        document["fits"] = refusal is None
        document["remedies"] = [
            {"text": r.text, "peak_bytes": r.peak_bytes, "saved_bytes": r.saved_bytes, "price": str(r.price),
             "note": r.note}
            for r in (refusal.remedies if refusal is not None else ())
        ]  # fmt: skip
    return document
