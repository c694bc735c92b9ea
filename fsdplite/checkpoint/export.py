"""Hugging Face folders out of checkpoints: whole tensors, streamed from the rank files, every byte checked."""

from __future__ import annotations

import json
import os
import secrets
from typing import TYPE_CHECKING, Any, Iterator

from ..errors import ConfigError, did_you_mean
from ..keywords import known_keywords
from .catalog import PUBLISHED, load_manifest, make_directories, remove_tree, root_path
from .dtypes import ITEMSIZE
from .failure import from_os_error
from .find import locate
from .manifest import MANIFEST, Manifest, TensorRecord, intersect
from .reading import BUFFER_BYTES, RankFile, Request, refuse_damage
from .remote import file_system
from .safetensors_file import TensorSpec, build_header, lay_out
from .storage import File, FileSystem, is_url, read_all, write_all, write_exactly

if TYPE_CHECKING:
    import torch

__all__ = ["INDEX", "SINGLE", "WORDS", "export_safetensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WORKING = ".exporting-"
WORDS = {"fp64": "F64", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_LONG_WORDS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CAST_FROM = {"F64", "F32", "F16", "BF16"}  # float8 values stay what they are


@known_keywords
def export_safetensors(
    path: Any, out_dir: Any, *, dtype: torch.dtype | str | None = None, max_shard_bytes: int = 5_000_000_000
) -> list[str]:
    """Write a checkpoint's parameters and buffers as a Hugging Face folder.

    One ``model.safetensors``, or several ``model-00001-of-0000N.safetensors`` with an index, which is put in place
    last: a folder that holds neither ``model.safetensors`` nor the index is not complete. Tied weights are written
    once, under the first of their names: :func:`load_safetensors`, and ``load_model`` of safetensors, know about
    that; a plain ``load_state_dict`` takes it with ``strict=False`` after the model has tied its weights.

    Args:
        path: A published ``step-<n>`` directory, or a root, which stands for its latest one.
        out_dir: Created if it is not there. May hold other files (a config, a tokenizer), but no finished export.
        dtype: ``torch.bfloat16`` or ``"bf16"``, and so on, for floating tensors of 16 bits and more; rounded to
            nearest. Integers, bools and float8 stay.
        max_shard_bytes: Begin a new file beyond so many bytes; one tensor is never split.

    Returns:
        The paths of the files, in order.

    Not collective: call it in one process. Memory: two blocks of 3 MiB. Without ``dtype`` torch is not imported.
    """
    wanted = None if dtype is None else _wanted(dtype)
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ConfigError("max_shard_bytes must be a positive whole number", found=repr(max_shard_bytes))
    source, target = root_path(path), root_path(out_dir)
    if is_url(target):
        raise ConfigError(
            "an export is written to a directory", found=target, cure="export, then copy the folder there"
        )
    try:
        return _export(source, target, wanted, max_shard_bytes)
    except OSError as problem:
        raise from_os_error(problem, "the export failed", phase="export", path=target) from problem


def _wanted(dtype: Any) -> str:
    """A dtype as safetensors names it, from a word, ``"bfloat16"``, or ``torch.bfloat16``."""
    word = str(dtype).removeprefix("torch.")
    name = WORDS.get(word) or WORDS.get(_LONG_WORDS.get(word, ""))
    if name is None:
        raise ConfigError(
            "dtype must be a floating type of 16 bits or more, or None",
            expected="torch.bfloat16, torch.float16, torch.float32, torch.float64, or " + ", ".join(map(repr, WORDS)),
            found=repr(dtype) + did_you_mean(word, (*WORDS, *_LONG_WORDS)),
        )
    return name


def _export(source: str, target: str, dtype: str | None, max_shard_bytes: int) -> list[str]:
    fs, source_fs = file_system(target), file_system(source)
    source = locate(source_fs, source)
    manifest = load_manifest(source_fs, source)
    files: list[RankFile] = []
    try:
        for record in manifest.files:  # all headers are proved before anything is written
            files.append(RankFile(source_fs, os.path.join(source, record.name), record))
        for name, tensor in manifest.model_tensors().items():
            for part in tensor.ranges:
                files[part.file].expect(name, tensor.dtype, part.count)
        shards = _shards(manifest, dtype, max_shard_bytes)
        made = _prepare(fs, target)
        working = os.path.join(target, _WORKING + secrets.token_hex(8))
        fs.make_directory(working)
        try:
            names = _write_shards(fs, manifest, files, shards, working)
        except BaseException:
            _give_up(fs, working, target if made else None)
            raise
    finally:
        for file in files:
            file.close()
    for name in names:  # the index is the last
        fs.rename(os.path.join(working, name), os.path.join(target, name))
    fs.flush_directory(target)
    remove_tree(fs, working)
    return [os.path.join(target, name) for name in names if name != INDEX]


def _prepare(fs: FileSystem, target: str) -> bool:
    """Make the folder, or clean up what a failed export has left in it. True if it was made."""
    try:
        names = fs.list(target)
    except FileNotFoundError:
        make_directories(fs, target)
        return True
    if MANIFEST in names or any(PUBLISHED.fullmatch(name) for name in names):
        what = "checkpoint" if MANIFEST in names else "root of checkpoints"
        raise ConfigError(
            f"the folder is a {what}: load_safetensors would not read an export in it",
            found=target,
            cure="choose a folder of its own",
        )
    finished = [name for name in names if name in (SINGLE, INDEX)]
    if finished:
        raise ConfigError(
            "the folder holds a finished export", found=os.path.join(target, finished[0]),
            cure="choose another folder, or remove its model*.safetensors files and its index",
        )  # fmt: skip
    for name in names:
        if not name.startswith(_WORKING):
            continue
        working = os.path.join(target, name)
        inside = fs.list(working)
        if INDEX in inside:
            for shard in _moved(fs, os.path.join(working, INDEX)) & set(names):
                fs.remove(os.path.join(target, shard))
        remove_tree(fs, working)
    return False


def _moved(fs: FileSystem, index: str) -> set[str]:
    """Files that a failed export may have moved to their place already."""
    try:
        return set(json.loads(read_all(fs, index))["weight_map"].values())
    except ValueError:
        return set()  # it was not complete, so nothing had been moved


def _give_up(fs: FileSystem, working: str, made: str | None) -> None:
    """Best effort: what stays is removed by the next export."""
    try:
        remove_tree(fs, working)
        if made is not None:
            fs.remove_directory(made)
    except OSError:
        pass


def _exported_dtype(record: TensorRecord, dtype: str | None) -> str:
    return dtype if dtype is not None and record.dtype in _CAST_FROM else record.dtype


def _shards(manifest: Manifest, dtype: str | None, max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Tensors by file, in model order, each file's laid out."""
    groups: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    filled = 0
    for name, record in manifest.model_tensors().items():
        stored = _exported_dtype(record, dtype)
        size = record.numel * ITEMSIZE[stored]
        if filled + size > max_shard_bytes and groups[-1]:
            groups.append([])
            filled = 0
        groups[-1].append((name, stored, record.shape, record.numel))
        filled += size
    return [lay_out(group) for group in groups]


def _write_shards(
    fs: FileSystem,
    manifest: Manifest,
    files: list[RankFile],
    shards: list[list[TensorSpec]],
    working: str,
) -> list[str]:
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for name, specs in zip(names, shards):
        file = fs.create(os.path.join(working, name))
        try:
            header = build_header(specs, chunked=False)
            write_exactly(fs, file, 0, memoryview(header))
            _write_data(fs, file, len(header), manifest, files, specs, buffer)
            fs.flush(file)
        finally:
            fs.close(file)
    if count > 1:
        weight_map = {spec.name: name for name, specs in zip(names, shards) for spec in specs}
        total = sum(spec.size_bytes for specs in shards for spec in specs)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"
        write_all(fs, os.path.join(working, INDEX), text)
        names.append(INDEX)
    fs.flush_directory(working)
    return names


def _write_data(
    fs: FileSystem,
    file: File,
    offset: int,
    manifest: Manifest,
    files: list[RankFile],
    specs: list[TensorSpec],
    buffer: memoryview,
) -> None:
    for spec in specs:
        record = manifest.tensors[spec.name]
        for piece in intersect(record, 0, record.numel):
            itemsize = ITEMSIZE[record.dtype]
            start = offset + spec.begin + piece.first * ITEMSIZE[spec.dtype]
            end = [start]

            def take(_: int, view: memoryview) -> None:
                for part in _cast(view, record.dtype, spec.dtype):
                    write_exactly(fs, file, end[0], part)
                    end[0] += len(part)

            request = Request(spec.name, piece.offset * itemsize, (piece.offset + piece.count) * itemsize, take)
            files[piece.file].read([request], buffer, refuse_damage)


def _cast(view: memoryview, stored: str, wanted: str) -> Iterator[memoryview]:
    if stored == wanted:
        yield view
        return
    from .tensor_bytes import bytes_of, host_empty, torch_dtype

    values = host_empty(len(view) // ITEMSIZE[stored], torch_dtype(stored))
    bytes_of(values)[:] = view
    values = values.to(torch_dtype(wanted))
    yield bytes_of(values)
