"""``fsdplite ckpt diff``: do two checkpoints hold the same?"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from .ckpt_compare import Difference, Stored, compare_structure, compare_values, shared_tensors
from .ckpt_output import Outcome, add_all_option, escaped, progress, table
from .ckpt_root import locate

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Compare two checkpoints, whatever world sizes, stages and meshes saved them: names, shapes, dtypes, the values of all
tensors by their bits, parameter groups (matched by their members), the optimizer's scalars, extra and per-rank values.
For floating tensors that differ: how many elements, the first of them, and the largest absolute difference.
The step's number, world size, mesh and date are shown and are no difference. Memory: two blocks of 3 MiB and buffers.
"""
_STATE = "optimizer/"
_EPILOG = """\
examples:
  fsdplite ckpt diff runs/a/step-100 runs/b/step-100
  fsdplite ckpt diff runs/a runs/b --ignore 'per_rank/*' --ignore 'extra*'

exit codes: 0 equal, 1 they differ or one is damaged, 2 usage
"""


def add_parser(actions: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser("diff", help="compare two", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("a", metavar="A", help="a step-<n> directory, or a root for its latest step")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--bits", action="store_true", help="only whether bits differ: stop at a tensor's first block "
                        "that does; quicker if much differs")  # fmt: skip
    parser.add_argument("--ignore", action="append", default=[], metavar="GLOB",
                        help="leave out such names, as the table shows them; may be repeated")  # fmt: skip
    add_all_option(parser)
    return parser


def run(args: argparse.Namespace) -> Outcome:
    def ignored(name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in args.ignore)

    a, b = Stored(*locate(args.a)), Stored(*locate(args.b))
    try:
        found = [d for d in compare_structure(a.manifest, b.manifest) if not ignored(d.name)]
        shared = {n: pair for n, pair in shared_tensors(a.manifest, b.manifest).items() if not ignored(n)}
        with progress("comparing", sum(a.manifest.tensors[one].size_bytes for one, _ in shared.values())) as advance:
            for name, pair in shared.items():
                difference = compare_values(a, b, name, pair, advance, args.bits)
                if difference is not None:
                    found.append(difference)
    finally:
        a.close()
        b.close()
    document = {
        "equal": not found,
        "a": _summary(a),
        "b": _summary(b),
        "tensors_compared": len(shared),
        "tensors_equal": len(shared) - sum(d.kind in ("values", "damaged") for d in found),
        "differences": [asdict(d) for d in found],
    }
    return Outcome(int(bool(found)), document, lambda: _text(document, found, args.all))


def _summary(stored: Stored) -> dict[str, Any]:
    manifest = stored.manifest
    return {"path": stored.folder, "step": manifest.step, "world_size": manifest.world_size,
            "mesh": list(manifest.mesh), "created": manifest.created, "run_id": manifest.run_id}  # fmt: skip


def _text(document: dict[str, Any], found: list[Difference], every: bool) -> str:
    text = ""
    for letter in ("a", "b"):
        side = document[letter]
        text += f"{letter.upper()}: {escaped(side['path'])}, step {side['step']}, {side['world_size']} rank(s)\n"
    if found:
        rows = [[d.name, d.what] for d in sorted(found, key=_place)] if every else _folded(sorted(found, key=_place))
        text += "\n" + table(["name", "difference"], rows, every, "differences") + "\n"
    equal, compared = document["tensors_equal"], document["tensors_compared"]
    text += f"{equal} of {compared} tensors in both are equal, bit for bit; "
    return text + (f"{len(found)} difference(s)\n" if found else "nothing else differs\n")


def _place(difference: Difference) -> tuple[bool, bool, float]:
    """Structure before values, weights before the optimizer's state, then the largest difference first."""
    is_state = difference.name.startswith(_STATE)
    return difference.kind == "values", is_state, -(difference.details.get("largest_difference") or 0.0)


def _folded(found: list[Difference]) -> list[list[str]]:
    """Rows of name and difference; a scalar of the optimizer that differs alike for many parameters is one row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for difference in found:
        is_scalar = difference.kind == "setting" and difference.name.startswith(_STATE)
        name = f"{_STATE}*/{difference.name.rpartition('/')[2]}" if is_scalar else difference.name
        alike.setdefault((name, difference.what), []).append(difference.name)
    return [[name, f"{what}, for {len(names)} parameters"] if len(names) > 1 else [names[0], what]
            for (name, what), names in alike.items()]  # fmt: skip
