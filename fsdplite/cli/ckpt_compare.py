"""What differs between two checkpoints, whatever world sizes saved them: names, structure, values by their bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.catalog import load_manifest
from ..checkpoint.dtypes import ITEMSIZE
from ..checkpoint.manifest import MARKS, Manifest, TensorRecord, intersect
from ..checkpoint.reading import BUFFER_BYTES, Damage, RankFile, Request
from ..checkpoint.storage import FileSystem
from .ckpt_numbers import Distance
from .ckpt_output import shape_text
from .ckpt_values import readable, scalar_text

__all__ = ["Difference", "Stored", "compare_structure", "compare_values", "shared_tensors"]


@dataclass(frozen=True)
class Difference:
    """One finding.

    Attributes:
        kind: ``only_in_a``, ``only_in_b``, ``shape``, ``dtype``, ``values``, ``damaged``, ``setting``.
        name: Of the tensor or of the setting.
        what: In words.
        details: Numbers, for programs.
    """

    kind: str
    name: str
    what: str
    details: dict[str, Any] = field(default_factory=dict)


class Stored:
    """One checkpoint, read tensor by tensor. Memory: one block of 3 MiB, and the headers of the files it has opened."""

    def __init__(self, fs: FileSystem, folder: str) -> None:
        self.folder = folder
        self.manifest: Manifest = load_manifest(fs, folder)
        self.damages: list[Damage] = []
        self._fs = fs
        self._files: dict[int, RankFile] = {}
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def block(self, name: str, first: int, count: int) -> bytearray:
        """The bytes of elements ``[first, first + count)``. Damaged chunks are noted in ``damages``."""
        record = self.manifest.tensors[name]
        itemsize = ITEMSIZE[record.dtype]
        block = bytearray(count * itemsize)
        for piece in intersect(record, first, first + count):
            start = (piece.first - first) * itemsize

            def take(offset: int, view: memoryview, start: int = start) -> None:
                block[start + offset : start + offset + len(view)] = view

            request = Request(name, piece.offset * itemsize, (piece.offset + piece.count) * itemsize, take)
            self._file(piece.file, name, record).read([request], self._buffer, self.damages.append)
        return block

    def _file(self, number: int, name: str, record: TensorRecord) -> RankFile:
        if number not in self._files:
            listed = self.manifest.files[number]
            self._files[number] = RankFile(self._fs, os.path.join(self.folder, listed.name), listed)
        file = self._files[number]
        file.expect(name, record.dtype, next(part.count for part in record.ranges if part.file == number))
        return file


# ---------------------------------------------------------------------- tensors


def compare_structure(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Names, shapes, dtypes, tied names, the optimizer's settings and scalars, and extra."""
    for name in a.tensors:
        if (other := b.find(name)) is None or other not in b.tensors:
            yield Difference("only_in_a", name, "only in A")
            continue
        one, two = a.tensors[name], b.tensors[other]
        if one.shape != two.shape:
            what = f"shape {shape_text(one.shape)} in A, {shape_text(two.shape)} in B"
            yield Difference("shape", name, what, {"a": list(one.shape), "b": list(two.shape)})
        if one.dtype != two.dtype:
            what = f"dtype {one.dtype} in A, {two.dtype} in B"
            yield Difference("dtype", name, what, {"a": one.dtype, "b": two.dtype})
    for name in b.tensors:
        if (other := a.find(name)) is None or other not in a.tensors:
            yield Difference("only_in_b", name, "only in B")
    yield from _tied(a, b)
    for name in sorted(set(a.left_out) ^ set(b.left_out)):
        where = "A" if name in a.left_out else "B"
        yield Difference("setting", name, f"frozen and left out in {where} only")
    yield from _optimizers(a.optimizer, b.optimizer)
    yield from _trees(a.extra, b.extra, "extra")


def shared_tensors(a: Manifest, b: Manifest) -> dict[str, tuple[str, str]]:
    """Tensors that both have with one shape and dtype, and the names under which A and B store them.

    One that is tied in only one of the two is compared under each of its names.
    """
    pairs: dict[str, tuple[str, str]] = {}
    for name in [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]:
        one, two = a.tensors.get(a.find(name) or ""), b.tensors.get(b.find(name) or "")
        if one is not None and two is not None and (one.shape, one.dtype) == (two.shape, two.dtype):
            pair = (a.find(name) or "", b.find(name) or "")
            if pair not in pairs.values():
                pairs[name] = pair
    return pairs


def compare_values(
    a: Stored, b: Stored, name: str, pair: tuple[str, str], advance: Callable[[int], None], bits_only: bool
) -> Difference | None:
    """Compare one tensor of both, block by block.

    Args:
        name: To show.
        pair: Its names in A and in B.
        advance: Is told how many bytes of it have been compared.
        bits_only: Stop at the first block that differs.
    """
    record = a.manifest.tensors[pair[0]]
    distance = Distance(record.dtype)
    a.damages.clear()
    b.damages.clear()
    step = BUFFER_BYTES // ITEMSIZE[record.dtype]
    for first in range(0, record.numel, step):
        count = min(step, record.numel - first)
        one, two = a.block(pair[0], first, count), b.block(pair[1], first, count)
        advance(len(one))
        if a.damages or b.damages:
            break
        if one != two:
            distance.add(one, two, first)
            if bits_only:
                break
    for letter, stored in (("A", a), ("B", b)):
        if stored.damages:
            damage = stored.damages[0]
            file = os.path.basename(damage.path)
            what = f"chunk {damage.chunk} of it is damaged in {file} of {letter}: not compared"
            return Difference("damaged", name, what, {"where": letter.lower(), "file": file, "chunk": damage.chunk})
    return _values(name, record, distance, bits_only) if distance.differing else None


def _values(name: str, record: TensorRecord, distance: Distance, bits_only: bool) -> Difference:
    if bits_only:
        what = f"bits differ, first at element {distance.first}"
        return Difference("values", name, what, {"first": distance.first})
    what = f"{distance.differing} of {record.numel} differ, first at {distance.first}"
    if distance.largest is not None:
        what += f", by {distance.largest:.3g} at most"
    if distance.not_finite:
        what += f"; {distance.not_finite} with inf or nan"
    details = {"numel": record.numel, "differing": distance.differing, "first": distance.first,
               "largest_difference": distance.largest, "not_finite": distance.not_finite}  # fmt: skip
    return Difference("values", name, what, details)


# ---------------------------------------------------------------------- what stands in the manifests


def _tied(a: Manifest, b: Manifest) -> Iterator[Difference]:
    one, two = _groups_of_names(a), _groups_of_names(b)
    for letter, names in [("A", names) for names in one - two] + [("B", names) for names in two - one]:
        tied = sorted(names)
        what = f"in {letter} these are one tensor: {', '.join(tied)}"
        yield Difference("setting", "tied weights", what, {"names": tied})


def _groups_of_names(manifest: Manifest) -> set[frozenset[str]]:
    groups: dict[str, set[str]] = {}
    for alias, name in manifest.aliases.items():
        groups.setdefault(name, {name}).add(alias)
    return {frozenset(names) for names in groups.values()}


def _optimizers(a: dict[str, Any] | None, b: dict[str, Any] | None) -> Iterator[Difference]:
    if a is None or b is None:
        if a is not b:
            yield Difference("setting", "optimizer", f"only {'A' if b is None else 'B'} has one")
        return
    if a["class"] != b["class"]:
        yield Difference("setting", "optimizer", f"{a['class']} in A, {b['class']} in B")
    one, two = _by_members(a["groups"]), _by_members(b["groups"])
    for key, (number, group) in one.items():
        name = f"optimizer group {number}"
        if key not in two:
            yield Difference("only_in_a", name, f"B has no group of the same {len(group['members'])} parameters")
            continue
        tensors = [
            {k: f"{scalar_text(t)} {json.dumps(t, sort_keys=True)}" for k, t in g["tensors"].items()}
            for g in (group, two[key][1])
        ]
        for setting in sorted(set(group["settings"]) | set(two[key][1]["settings"])):
            values = [_setting(g["settings"], setting, known) for g, known in zip((group, two[key][1]), tensors)]
            if values[0] != values[1]:
                yield Difference("setting", f"{name}: {setting}", f"{values[0]} in A, {values[1]} in B",
                                 {"a": values[0], "b": values[1]})  # fmt: skip
    for key, (number, group) in two.items():
        if key not in one:
            what = f"A has no group of the same {len(group['members'])} parameters"
            yield Difference("only_in_b", f"optimizer group {number}", what)
    for parameter in sorted(set(a["scalars"]) | set(b["scalars"])):
        states = a["scalars"].get(parameter, {}), b["scalars"].get(parameter, {})
        for key in sorted(set(states[0]) | set(states[1])):
            if any(key not in state for state in states) or not _same(states[0][key], states[1][key]):
                texts = [scalar_text(state[key]) if key in state else "nothing" for state in states]
                yield Difference("setting", f"optimizer/{parameter}/{key}", f"{texts[0]} in A, {texts[1]} in B",
                                 {"a": states[0].get(key), "b": states[1].get(key)})  # fmt: skip


def _by_members(groups: list[dict[str, Any]]) -> dict[tuple[frozenset[str], int], tuple[int, dict[str, Any]]]:
    """Groups by whose they are: their order may differ. Empty ones are told apart by their order."""
    found: dict[tuple[frozenset[str], int], tuple[int, dict[str, Any]]] = {}
    for number, group in enumerate(groups):
        members, again = frozenset(group["members"]), 0
        while (members, again) in found:
            again += 1
        found[members, again] = (number, group)
    return found


def _setting(settings: dict[str, Any], key: str, tensors: dict[str, str]) -> str:
    return readable(settings[key], tensors) if key in settings else "nothing"


def _same(one: Any, two: Any) -> bool:
    """Equal as JSON: 1, 1.0 and true are three values."""
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def _trees(one: Any, two: Any, path: str) -> Iterator[Difference]:
    """Two JSON values, key by key."""
    if isinstance(one, dict) and isinstance(two, dict) and not MARKS & {*one, *two}:
        for key in sorted(set(one) | set(two)):
            if key in one and key in two:
                yield from _trees(one[key], two[key], f"{path}[{key!r}]")
            else:
                kind, letter = ("only_in_a", "A") if key in one else ("only_in_b", "B")
                yield Difference(kind, f"{path}[{key!r}]", f"only in {letter}")
    elif not _same(one, two):
        what = f"{readable(one, {})[:100]} in A, {readable(two, {})[:100]} in B"
        yield Difference("setting", path, what, {"a": one, "b": two})
