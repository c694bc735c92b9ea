"""What a checkpoint consists of: the on-disk contract. Pure data, no torch, no files.

A rank file holds one-dimensional ranges of tensors under their own names; only the manifest says how the ranges tile
them. ``manifest.json`` begins with a CRC-32 over the rest of itself and records a checksum of each file's header,
which in turn holds the checksums of the file's chunks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Container
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..errors import CheckpointError
from .dtypes import ITEMSIZE

__all__ = [
    "FORMAT",
    "LARGEST_STEP",
    "FileRecord",
    "MANIFEST",
    "MARKS",
    "Manifest",
    "Piece",
    "Range",
    "TensorRecord",
    "decode",
    "encode",
    "intersect",
    "rank_file",
    "split_state_name",
    "state_name",
    "step_directory",
]

FORMAT = "fsdplite-checkpoint"
VERSION = 1
LARGEST_STEP = 2**63 - 1  # of every count in a manifest
MANIFEST = "manifest.json"
KINDS = ("sharded", "replicated", "per_rank")
MARKS = {"__tuple__", "__dict__", "__float__", "__tensor__"}  # a dictionary of one of these keys is something else
_PREFIX = b'{"crc32": "'
_DIGITS = 8
_CHECKSUM = re.compile("[0-9a-f]{8}")


@dataclass(frozen=True)
class Range:
    """Elements ``[first, first + count)`` of a tensor, all that file number ``file`` holds of it."""

    file: int
    first: int
    count: int


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: global shape without padding, and where its elements are."""

    dtype: str
    shape: tuple[int, ...]
    kind: str
    ranges: tuple[Range, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class FileRecord:
    """One rank file: its size, and the CRC-32 of its header."""

    name: str
    size_bytes: int
    header_bytes: int
    header_crc32: int


@dataclass
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: Of training.
        world_size: Number of ranks that wrote it, and of files.
        mesh: Ranks per (replicate, shard) dimension of the first unit.
        run_id: Of the save; the same in no other.
        created: Seconds since 1970.
        files: By rank.
        tensors: By name. Parameters and buffers have their original names; states of the optimizer are
            ``optimizer/<parameter>/<key>``, tensors in ``extra`` ``extra/<n>``, and what belongs to one rank
            ``per_rank/<rank>``.
        aliases: Other names of tied tensors, and the name under which they are stored.
        extra: The JSON part of ``extra``.
        optimizer: Class, parameter groups and scalars of the optimizer, or None.
        left_out: Frozen parameters that ``trainable_only=True`` left out.
    """

    step: int
    world_size: int
    mesh: tuple[int, int]
    run_id: str
    created: float
    files: list[FileRecord] = field(default_factory=list)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: Any = None
    optimizer: dict[str, Any] | None = None
    left_out: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def model_tensors(self) -> dict[str, TensorRecord]:
        """Parameters and buffers."""
        return {name: t for name, t in self.tensors.items() if not is_reserved(name)}

    def find(self, name: str) -> str | None:
        """The name under which a tensor called ``name`` is stored, if it is."""
        if name in self.tensors:
            return name
        return self.aliases.get(name)

    def validate(self) -> None:
        """Raise unless the ranges of every tensor tile it exactly once, in files that exist here."""
        names = [file.name for file in self.files]
        if self.world_size != len(names) or any(name != rank_file(i, len(names)) for i, name in enumerate(names)):
            raise CheckpointError("the manifest does not list one file per rank", found=names[:8])
        for name, tensor in self.tensors.items():
            if tensor.dtype not in ITEMSIZE or tensor.kind not in KINDS:
                raise CheckpointError(
                    f"tensor '{name}' has an unknown dtype or kind", found=(tensor.dtype, tensor.kind)
                )
            end = 0
            for part in tensor.ranges:
                if part.first != end or part.count < 1 or not 0 <= part.file < len(self.files):
                    break
                end += part.count
            if end != tensor.numel or len({part.file for part in tensor.ranges}) != len(tensor.ranges):
                raise CheckpointError(
                    f"the ranges of tensor '{name}' do not tile it",
                    expected=f"elements 0 to {tensor.numel}, each once, at most one range per file",
                    found=[(part.file, part.first, part.count) for part in tensor.ranges[:8]],
                )
        self._check_names()
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer)

    def _check_names(self) -> None:
        known = {*self.tensors, *self.left_out}
        if len(known) != len(self.tensors) + len(self.left_out):
            found = [name for name in self.left_out if name in self.tensors] or self.left_out
            raise CheckpointError("tensors are listed as left out that are there, or twice", found=found[:5])
        for alias, name in self.aliases.items():
            if name not in known or is_reserved(name):
                raise CheckpointError(f"'{alias}' is listed as another name of '{name}', which is not there")
            if alias in known:
                raise CheckpointError(f"'{alias}' is listed as another name of '{name}', and is a tensor of its own")
        for name, tensor in self.tensors.items():
            if (tensor.kind == "per_rank") != name.startswith("per_rank/"):
                raise CheckpointError(f"tensor '{name}' is of kind {tensor.kind}", expected="per_rank/<rank>")
            if not name.startswith("optimizer/"):
                continue
            parameter = split_state_name(name, self.tensors)[0]
            owner = self.tensors.get(parameter)
            if self.optimizer is None or owner is None or owner.shape != tensor.shape:
                theirs = "is not there" if owner is None else f"has shape {owner.shape}"
                raise CheckpointError(
                    f"'{name}' of shape {tensor.shape} is not the state of a parameter: '{parameter}' {theirs}"
                )

    def _check_optimizer(self, optimizer: dict[str, Any]) -> None:
        """Raise unless each parameter is a member of one group, and each state is of a member."""
        members = [name for group in optimizer["groups"] for name in group["members"]]
        known = set(members)
        for name in members:
            if name not in self.tensors or is_reserved(name):
                raise CheckpointError(f"'{name}' is listed in a parameter group, and is no parameter")
        if len(known) != len(members):
            twice = next(name for name in members if members.count(name) > 1)
            raise CheckpointError(f"'{twice}' is listed twice in the parameter groups")
        for name, scalars in optimizer["scalars"].items():
            both = [key for key in scalars if state_name(name, key) in self.tensors]
            if name not in known or both:
                what = f"state '{both[0]}' of it is there twice" if both else "it is in no parameter group"
                raise CheckpointError(f"the optimizer's scalars list '{name}', but {what}")
        states = [split_state_name(name, self.tensors)[0] for name in self.tensors if name.startswith("optimizer/")]
        if strays := [name for name in states if name not in known]:
            raise CheckpointError(f"there is optimizer state of '{strays[0]}', which is in no parameter group")


def is_reserved(name: str) -> bool:
    """Whether a tensor's name is not one of the model's: a dotted name has no slash, unless a module's name has."""
    return name.startswith(("optimizer/", "extra/", "per_rank/"))


def state_name(parameter: str, key: str) -> str:
    """The name of one state's tensor in a checkpoint."""
    return f"optimizer/{parameter}/{key}"


def split_state_name(name: str, parameters: Container[str]) -> tuple[str, str]:
    """The parameter and the key of :func:`state_name`. Both may have slashes: the longest known parameter it is."""
    parts = name.removeprefix("optimizer/").split("/")
    for count in range(len(parts) - 1, 0, -1):
        parameter = "/".join(parts[:count])
        if parameter in parameters:
            return parameter, "/".join(parts[count:])
    return "/".join(parts[:-1]), parts[-1]


def rank_file(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}.safetensors"


def step_directory(step: int) -> str:
    return f"step-{step}"


# ---------------------------------------------------------------------- bytes


def encode(manifest: Manifest) -> bytes:
    """``manifest.json``. Raises if the manifest is not valid."""
    manifest.validate()
    tensors = {
        name: {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "kind": t.kind,
            "numel": t.numel,
            "ranges": [[part.file, part.first, part.count] for part in t.ranges],
        }
        for name, t in manifest.tensors.items()
    }
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "mesh": list(manifest.mesh),
        "run_id": manifest.run_id,
        "created": manifest.created,
        "files": [
            {
                "name": f.name,
                "size": f.size_bytes,
                "header_bytes": f.header_bytes,
                "header_crc32": f"{f.header_crc32:08x}",
            }
            for f in manifest.files
        ],
        "extra": manifest.extra,
        "optimizer": manifest.optimizer,
        "aliases": manifest.aliases,
        "left_out": manifest.left_out,
        "tensors": tensors,
    }
    rest = b'", ' + json.dumps(body, allow_nan=False).encode()[1:] + b"\n"
    checksum = zlib.crc32(_PREFIX + b"0" * _DIGITS + rest)
    return _PREFIX + f"{checksum:08x}".encode() + rest


def decode(raw: bytes, path: str) -> Manifest:
    """Check and read ``manifest.json``. Every defect is a :class:`CheckpointError` that names the file."""
    start, end = len(_PREFIX), len(_PREFIX) + _DIGITS
    expected = f"{zlib.crc32(_PREFIX + b'0' * _DIGITS + raw[end:]):08x}".encode()
    if not raw.startswith(_PREFIX) or raw[start:end] != expected:
        raise CheckpointError(
            "the manifest is damaged",
            expected=f"checksum {expected.decode()}",
            found=raw[:end].decode(errors="replace"),
            phase="read",
            path=path,
        )
    try:
        manifest = _read(json.loads(raw, parse_constant=_refuse_constant))
        manifest.validate()
        return manifest
    except CheckpointError as problem:
        raise CheckpointError("the manifest is not valid", found=problem.problem, phase="read", path=path) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise CheckpointError("the manifest is not valid", found=repr(problem), phase="read", path=path) from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _read(body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT or type(body["version"]) is not int or body["version"] != VERSION:
        raise CheckpointError(
            f"format {body['format']} version {body['version']} is not known here; expected {FORMAT} {VERSION}"
        )
    _check_types(body)
    return Manifest(
        step=body["step"],
        world_size=body["world_size"],
        mesh=tuple(body["mesh"]),
        run_id=body["run_id"],
        created=body["created"],
        files=[FileRecord(f["name"], f["size"], f["header_bytes"], int(f["header_crc32"], 16)) for f in body["files"]],
        tensors={
            name: TensorRecord(t["dtype"], tuple(t["shape"]), t["kind"], tuple(Range(*part) for part in t["ranges"]))
            for name, t in body["tensors"].items()
        },
        aliases=body["aliases"],
        extra=body["extra"],
        optimizer=body["optimizer"],
        left_out=body["left_out"],
    )


def _check_types(body: dict[str, Any]) -> None:
    """Raise unless every field has the type that the rest of the package relies on: anybody can write a checksum."""

    def need(holds: object, what: str, found: Any) -> None:
        if not holds:
            raise ValueError(f"{what}: found {repr(found)[:80]}")

    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value <= LARGEST_STEP

    def is_texts(value: Any) -> bool:
        return type(value) is list and all(type(text) is str for text in value)

    for name in ("step", "world_size"):
        need(is_count(body[name]), name, body[name])
    mesh, created, optimizer = body["mesh"], body["created"], body["optimizer"]
    need(type(mesh) is list and len(mesh) == 2 and all(map(is_count, mesh)), "mesh", mesh)
    need(type(created) in (int, float) and 0 <= created < 2**37, "created", created)
    need(type(body["run_id"]) is str, "run_id", body["run_id"])
    need(is_texts(body["left_out"]), "left_out", body["left_out"])
    need(all(type(name) is str for name in body["aliases"].values()), "aliases", body["aliases"])
    for file in body["files"]:
        need(type(file["name"]) is str and is_count(file["size"]) and is_count(file["header_bytes"]), "files", file)
        need(_CHECKSUM.fullmatch(file["header_crc32"]), "checksum of a file", file["header_crc32"])
    for name, tensor in body["tensors"].items():
        need(type(tensor["dtype"]) is str and type(tensor["kind"]) is str, f"tensor {name!r}", tensor)
        shape = tensor["shape"]
        need(type(shape) is list and len(shape) <= 64 and all(map(is_count, shape)), f"shape of {name!r}", shape)
        need(tensor["numel"] == prod(shape), f"number of elements of {name!r}", tensor["numel"])
        for part in tensor["ranges"]:
            need(type(part) is list and len(part) == 3 and all(map(is_count, part)), f"ranges of {name!r}", part)
    if optimizer is not None:
        need(type(optimizer["class"]) is str, "optimizer's class", optimizer["class"])
        for group in optimizer["groups"]:
            holds = is_texts(group["members"]) and type(group["settings"]) is type(group["tensors"]) is dict
            need(holds, "parameter group", group)
        for name, state in optimizer["scalars"].items():
            need(type(state) is dict, f"scalars of {name!r}", state)
            for key, entry in state.items():
                need(list(entry) in (["value"], ["tensor"]), f"scalar {key!r} of {name!r}", entry)


# ---------------------------------------------------------------------- ranges


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor that one file holds and a reader wants.

    Attributes:
        file: Number of the file.
        offset: First element, counted from the start of the range in the file.
        first: First element, counted in the tensor.
        count: Number of elements.
    """

    file: int
    offset: int
    first: int
    count: int


def intersect(tensor: TensorRecord, low: int, high: int) -> list[Piece]:
    """Where elements ``[low, high)`` of a tensor are stored, in order."""
    pieces = []
    for part in tensor.ranges:
        first, stop = max(low, part.first), min(high, part.first + part.count)
        if first < stop:
            pieces.append(Piece(part.file, first - part.first, first, stop - first))
    return pieces
