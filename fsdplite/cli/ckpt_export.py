"""``fsdplite ckpt export``: a Hugging Face folder out of a checkpoint."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from ..checkpoint.catalog import load_manifest, root_path
from ..checkpoint.export import WORDS, export_safetensors
from .ckpt_output import Outcome, escaped, size_text, table
from .ckpt_root import add_step_option, locate
from .target import UsageError

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Write a checkpoint's parameters and buffers as a Hugging Face folder: model.safetensors, or several files and an index,
which is put in place last. Every byte that is read is checked. Bytes are copied without torch; with --dtype torch is
imported to round them.
"""
_EPILOG = "exit codes: 0 written, 1 it failed and the folder holds no finished export, 2 usage"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def add_parser(actions: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser("export", help="write a Hugging Face folder", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("path", metavar="PATH", help="a step-<n> directory, or a root")
    parser.add_argument("out", metavar="OUT", help="a directory, created if it is not there")
    add_step_option(parser)
    parser.add_argument("--dtype", choices=tuple(WORDS),
                        help="for floating tensors of 16 bits and more; imports torch")  # fmt: skip
    parser.add_argument("--max-shard-bytes", type=_bytes, default=5 * 10**9, metavar="SIZE",
                        help="begin a new file beyond so many bytes: 5000000, 500MB, 2GiB (default 5GB)")  # fmt: skip
    return parser


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([KMGT]i?)?B?", text.strip())
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5000000, 500MB or 2GiB, found {text!r}")
    return int(match[1]) * _UNITS[match[2] or ""]


def run(args: argparse.Namespace) -> Outcome:
    fs, folder = locate(args.path, args.step)
    out = root_path(args.out)
    if out == folder or out.startswith(folder + os.sep):
        raise UsageError(f"'{out}' is inside the checkpoint\n  cure: choose a directory elsewhere")
    manifest = load_manifest(fs, folder)
    written = export_safetensors(folder, out, dtype=args.dtype, max_shard_bytes=args.max_shard_bytes)
    files = [{"path": path, "size_bytes": os.path.getsize(path)} for path in written]
    document = {"path": folder, "step": manifest.step, "out": out, "dtype": args.dtype,
                "tensor_count": len(manifest.model_tensors()), "files": files}  # fmt: skip
    return Outcome(0, document, lambda: _text(document))


def _text(document: dict[str, Any]) -> str:
    rows = [[os.path.basename(file["path"]), size_text(file["size_bytes"])] for file in document["files"]]
    text = f"step {document['step']}: {document['tensor_count']} tensors written to {escaped(document['out'])}\n"
    return text + table(["file", ">size"], rows)
