"""Checking every byte of a checkpoint. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError
from ..keywords import known_keywords
from .catalog import changed_meanwhile, load_manifest, root_path
from .dtypes import ITEMSIZE
from .find import locate
from .manifest import MANIFEST, FileRecord, Manifest
from .reading import BUFFER_BYTES, Damage, RankFile, Request
from .remote import file_system
from .storage import FileSystem

__all__ = ["Problem", "Verification", "verify_checkpoint", "verify_folder"]


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        file: Name of the file.
        tensor: Name of the tensor, if it is in the data.
        first, count: The tensor's elements in question.
        what: In words.
    """

    file: str
    what: str
    tensor: str | None = None
    first: int | None = None
    count: int | None = None

    def __str__(self) -> str:
        where = self.file
        if self.tensor is not None:
            where += f", '{self.tensor}'"
        if self.first is not None and self.count is not None:
            where += f", elements {self.first} to {self.first + self.count}"
        return f"{where}: {self.what}"


@dataclass
class Verification:
    """Outcome of :func:`verify_checkpoint`.

    Attributes:
        path: The checkpoint's directory.
        problems: What is wrong; empty if every byte is the one that was written.
        bytes_checked: Of tensor data.
    """

    path: str
    problems: list[Problem] = field(default_factory=list)
    bytes_checked: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems


@known_keywords
def verify_checkpoint(path: Any) -> Verification:
    """Read all of one checkpoint and compare every checksum. Writes nothing.

    Finds any flipped bit, missing and replaced files, and files that do not belong to it.

    Args:
        path: A ``step-<n>`` directory, or a root, which stands for its latest published step; ``.path`` says which.
    """
    place = root_path(path)
    fs = file_system(place)
    try:
        folder = locate(fs, place)
    except (CheckpointError, OSError) as problem:
        return Verification(place, [Problem(MANIFEST, _in_words(problem))])
    return verify_folder(fs, folder, lambda read_bytes: None)


def verify_folder(fs: FileSystem, folder: str, advance: Callable[[int], None]) -> Verification:
    """The same, telling ``advance`` how many bytes of tensor data were read, at most 3 MiB at a time."""
    result = Verification(folder)
    try:
        manifest = load_manifest(fs, folder)
    except (CheckpointError, OSError) as problem:
        result.problems.append(Problem(MANIFEST, _in_words(problem)))
        return result
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for number, record in enumerate(manifest.files):
        _verify_file(fs, folder, manifest, number, record, buffer, result, advance)
    known = {MANIFEST, *(record.name for record in manifest.files)}
    try:
        names = fs.list(folder)
    except FileNotFoundError:
        names = []
    result.problems += [
        Problem(name, "is not part of this checkpoint; it is never read") for name in names if name not in known
    ]
    if result.problems and (what := changed_meanwhile(fs, folder, manifest)):
        result.problems = [Problem(MANIFEST, f"{what}: verify it again")]  # what was found is of two saves
    return result


def _in_words(problem: CheckpointError | OSError) -> str:
    if isinstance(problem, FileNotFoundError):
        return "is missing"
    return str(problem)


def _verify_file(
    fs: FileSystem,
    folder: str,
    manifest: Manifest,
    number: int,
    record: FileRecord,
    buffer: memoryview,
    result: Verification,
    advance: Callable[[int], None],
) -> None:
    try:
        file = RankFile(fs, os.path.join(folder, record.name), record)
    except (CheckpointError, OSError) as problem:
        result.problems.append(Problem(record.name, _in_words(problem)))
        return
    listed = {
        name: (tensor, part)
        for name, tensor in manifest.tensors.items()
        for part in tensor.ranges
        if part.file == number
    }
    try:
        for name, spec in file.header.tensors.items():
            tensor, part = listed.get(name, (None, None))
            if tensor is None or part is None:
                result.problems.append(Problem(record.name, "is not listed in the manifest", name))
            elif (spec.dtype, spec.numel) != (tensor.dtype, part.count):
                what = f"holds {spec.numel} elements of {spec.dtype}, the manifest lists {part.count} of {tensor.dtype}"
                result.problems.append(Problem(record.name, what, name))
        for name in listed:
            if name not in file.header.tensors:
                result.problems.append(Problem(record.name, "is not in the file that the manifest lists", name))

        def on_damage(damage: Damage) -> None:
            itemsize = ITEMSIZE[file.header.tensors[damage.tensor].dtype]
            first = listed[damage.tensor][1].first if damage.tensor in listed else 0
            result.problems.append(
                Problem(
                    record.name,
                    f"chunk {damage.chunk} is damaged",
                    damage.tensor,
                    first + damage.low // itemsize,
                    (damage.high - damage.low) // itemsize,
                )
            )

        requests = [
            Request(name, 0, spec.size_bytes, lambda offset, view: advance(len(view)))
            for name, spec in file.header.tensors.items()
        ]
        file.read(requests, buffer, on_damage)
        result.bytes_checked += file.bytes_read
    except OSError as problem:
        result.problems.append(Problem(record.name, _in_words(problem)))
    finally:
        file.close()
