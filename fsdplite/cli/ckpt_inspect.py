"""``fsdplite ckpt inspect``: what one checkpoint says about itself."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..checkpoint.catalog import load_manifest
from ..checkpoint.manifest import MARKS, Manifest, TensorRecord
from ..errors import CheckpointError
from .ckpt_output import SHOWN_ROWS, Outcome, add_all_option, escaped, shape_text, size_text, table, time_text
from .ckpt_root import add_step_option, locate, reason
from .ckpt_values import per_rank_value, readable, scalar_text

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Show what is in a checkpoint: tensors and where their elements are, the optimizer, extra and per-rank values. Reads the
manifest and the values that ranks saved for themselves, no other tensor; 'fsdplite ckpt verify' checks all bytes.
"""
_EPILOG = "exit codes: 0 fine, 1 it cannot be read, 2 usage"
_PER_RANK = "per_rank/"


def add_parser(actions: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser("inspect", help="show what is in one", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("path", metavar="PATH", help="a step-<n> directory, or a root")
    add_step_option(parser)
    parser.add_argument("--match", action="append", metavar="GLOB", help="only tensors of such names; may be repeated")
    parser.add_argument("--ranges", action="store_true", help="for each tensor each file, first element and count")
    add_all_option(parser)
    return parser


@dataclass
class _Look:
    folder: str
    manifest: Manifest
    chosen: dict[str, TensorRecord]
    per_rank: dict[str, dict[str, Any]]
    hidden: int = 0  # ranks whose values were not read, for they are not shown


def run(args: argparse.Namespace) -> Outcome:
    fs, folder = locate(args.path, args.step)
    manifest = load_manifest(fs, folder)
    chosen = {
        name: tensor
        for name, tensor in manifest.tensors.items()
        if not args.match or any(fnmatchcase(name, glob) for glob in args.match)
    }
    look = _Look(folder, manifest, chosen, {})
    own = [name for name in chosen if name.startswith(_PER_RANK)]
    for name in own if args.json or args.all else own[:SHOWN_ROWS]:
        try:
            look.per_rank[name] = per_rank_value(fs, folder, manifest, name)
        except (CheckpointError, OSError) as problem:
            look.per_rank[name] = {"error": reason(problem)}
    look.hidden = len(own) - len(look.per_rank)
    code = int(any("error" in value for value in look.per_rank.values()))
    return Outcome(code, _document(look), lambda: _text(look, args))


def _document(look: _Look) -> dict[str, Any]:
    manifest = look.manifest
    return {
        "path": look.folder,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "mesh": list(manifest.mesh),
        "run_id": manifest.run_id,
        "created": manifest.created,
        "total_bytes": manifest.total_bytes,
        "tensor_bytes": manifest.tensor_bytes,
        "files": [{"name": f.name, "size_bytes": f.size_bytes, "header_crc32": f"{f.header_crc32:08x}"}
                  for f in manifest.files],
        "tensors": {
            name: {
                "dtype": t.dtype, "shape": list(t.shape), "kind": t.kind, "numel": t.numel, "size_bytes": t.size_bytes,
                "ranges": [{"file": part.file, "first": part.first, "count": part.count} for part in t.ranges],
            }
            for name, t in look.chosen.items()
        },
        "aliases": manifest.aliases,
        "left_out": manifest.left_out,
        "optimizer": manifest.optimizer,
        "extra": manifest.extra,
        "per_rank": {name.removeprefix(_PER_RANK): value for name, value in look.per_rank.items()},
    }  # fmt: skip


# ---------------------------------------------------------------------- for people


def _text(look: _Look, args: argparse.Namespace) -> str:
    manifest, every = look.manifest, args.all
    replicas, shards = manifest.mesh
    text = (
        f"step {manifest.step} in {escaped(look.folder)}\n"
        f"saved {time_text(manifest.created)} by {manifest.world_size} rank(s), mesh {replicas} x {shards}, run "
        f"{escaped(manifest.run_id, 40)}\n{len(manifest.tensors)} tensors, {size_text(manifest.total_bytes)}\n"
    )
    files = [[str(i), f.name, size_text(f.size_bytes)] for i, f in enumerate(manifest.files)]
    text += "\n" + table([">file", "name", ">size"], files, every, "files")
    text += "\n" + _tensors(look, args)
    if args.match:
        return text
    text += _optimizer(manifest, every)
    if manifest.extra is not None:
        text += "\nextra\n" + _extra(manifest, every)
    if look.per_rank:
        rows = [[name.removeprefix(_PER_RANK), size_text(manifest.tensors[name].size_bytes),
                 _cut(_own(value), every)] for name, value in look.per_rank.items()]  # fmt: skip
        text += "\n" + table([">rank", ">size", "its own value"], rows)
        text += f"and those of {look.hidden} more ranks; --all shows them\n" if look.hidden else ""
    if manifest.aliases:
        text += "\n" + table(["name", "is the same tensor as"], [list(p) for p in manifest.aliases.items()], every)
    if manifest.left_out:
        text += "\n" + table(["frozen, and left out"], [[name] for name in manifest.left_out], every, "names")
    return text


def _tensors(look: _Look, args: argparse.Namespace) -> str:
    rows = []
    for name, tensor in look.chosen.items():
        if args.ranges:
            where = "\n".join(f"{part.file}: {part.first} + {part.count}" for part in tensor.ranges)
        else:
            where = _numbers([part.file for part in tensor.ranges])
        rows.append([name, tensor.dtype, shape_text(tensor.shape), tensor.kind, size_text(tensor.size_bytes), where])
    where = "=file: first + count" if args.ranges else "files"
    text = table(["tensor", "=dtype", "shape", "=kind", ">size", where], rows, args.all, "tensors")
    if args.match:
        text += f"{len(rows)} of {len(look.manifest.tensors)} tensors\n"
    return text


def _numbers(numbers: list[int]) -> str:
    """``0-3, 7``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _optimizer(manifest: Manifest, every: bool) -> str:
    if manifest.optimizer is None:
        return ""
    rows = []
    for number, group in enumerate(manifest.optimizer["groups"]):
        tensors = {name: scalar_text(entry) for name, entry in group["tensors"].items()}
        settings = "\n".join(f"{key}: {readable(value, tensors)}" for key, value in group["settings"].items())
        rows.append([str(number), str(len(group["members"])), settings])
    text = f"\noptimizer {escaped(manifest.optimizer['class'])}\n"
    text += table([">group", ">parameters", "settings"], rows, every, "groups")
    counts = Counter(
        (key, scalar_text(entry)) for state in manifest.optimizer["scalars"].values() for key, entry in state.items()
    )
    if counts:
        rows = [[key, value, str(count)] for (key, value), count in counts.items()]
        text += "\n" + table(["scalar", "value", ">parameters"], rows, every, "values")
    return text


def _extra(manifest: Manifest, every: bool) -> str:
    names = {name.removeprefix("extra/"): name for name in manifest.tensors if name.startswith("extra/")}
    tensors = {short: _description(manifest.tensors[name].dtype, manifest.tensors[name].shape, name)
               for short, name in names.items()}  # fmt: skip
    extra = manifest.extra
    if isinstance(extra, dict) and not MARKS & set(extra):
        rows = [[key, _cut(readable(value, tensors), every)] for key, value in extra.items()]
        return table(["key", "value"], rows, every, "keys")
    return table(["value"], [[_cut(readable(extra, tensors), every)]])


def _description(dtype: str, shape: Any, name: str) -> str:
    return f"<tensor '{name}' of {dtype}, {shape_text(shape)}>"


def _own(value: dict[str, Any]) -> str:
    if "error" in value:
        return f"not readable: {value['error']}"
    tensors = {name: f"<tensor of {t['dtype']}, {shape_text(t['shape'])}>" for name, t in value["tensors"].items()}
    return readable(value["value"], tensors)


def _cut(text: str, every: bool) -> str:
    return text if every or len(text) <= 300 else f"{text[:300]}... (--all or --json shows {len(text)} characters)"
