"""Saving: every rank streams its slice into a hidden directory, rank 0 checks and publishes it by one rename."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import Any

from torch import nn

from .. import events
from ..arguments import expect_module
from ..errors import CheckpointError, ConfigError
from ..groups import forgotten_group
from ..user_warning import warn_user
from . import background as background_saves
from . import catalog, snapshot
from ..keywords import known_keywords
from .agree import Agreement
from .background import SaveHandle, Staging
from .dtypes import ITEMSIZE
from .failure import SharedFailure, failure_of, from_os_error
from .manifest import LARGEST_STEP, MANIFEST, FileRecord, Manifest, decode, encode, rank_file, step_directory
from .remote import file_system
from .snapshot import Snapshot
from .storage import FileSystem, write_all
from .world import World, world_of
from .writer import Part, Written, write_rank_file

__all__ = ["save_checkpoint"]


@known_keywords
def save_checkpoint(
    root: Any,
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int,
    extra: Any = None,
    per_rank: Any = None,
    keep: int | None = None,
    background: bool = False,
    trainable_only: bool = False,
) -> SaveHandle:
    """Save a model, wrapped or not, and its optimizer, as ``root/step-<step>``.

    Each rank writes its slices under the original names. Until the last moment the checkpoint does not exist under
    its name; a step that is saved again is replaced in one operation. If any rank fails, all raise the same error
    and nothing is published.

    Args:
        root: A directory on a file system that all ranks share. Created if it is not there.
        model: Wrapped, containing wrapped modules, or plain.
        optimizer: Its state and parameter groups are stored by the names of the parameters.
        step: A number of at least 0, below 2**63.
        extra: JSON values and tensors, the same on all ranks (scheduler, counters).
        per_rank: JSON values and tensors of this rank (random states, data position).
        keep: Remove older published steps beyond so many, after this one is published.
        background: Return when the values are copied to host memory; a thread writes them. Errors surface at
            ``wait()``, at the next save, and at exit.
        trainable_only: Leave frozen parameters out.

    Returns:
        A handle: ``.wait()`` returns when the checkpoint is durable, ``.path`` is its directory.

    Raises:
        CheckpointError: With rank, phase, path and errno of the failure.
        RankMismatchError: Ranks brought different things.
        ConfigError: An argument cannot be used; or no process group is initialised, and this is not the first of the
            ranks that a launcher has started.

    Collective: every rank of the model's mesh must call it. Messages go through the process group's store; their
    size does not depend on the model. Buffers, and parameters that no unit owns, are rank 0's.

    Memory: one block of 3 MiB; with ``background`` a copy of this rank's part, kept for the next save.
    """
    expect_module(model, "fsdp.save_checkpoint(root, model, optimizer, step=step)")
    if (forgotten := forgotten_group()) is not None and forgotten.rank:  # what rank 0 alone saves is the whole of it
        raise forgotten
    world = world_of(model)
    agreement = Agreement(world, "save_checkpoint")
    save = _Save(agreement, root)
    options = {"step": step, "keep": keep, "trainable_only": bool(trainable_only), "background": bool(background)}
    contents = {"extra": extra, "per_rank": per_rank}
    if not background:
        with agreement.open():
            save.prepare(model, optimizer, options, contents)
            save.run()
        return SaveHandle(save.path)
    try:
        save.prepare(model, optimizer, options, contents)
        save.stage()
    except BaseException:
        with agreement.open():  # the others' threads hear of it
            raise
    return background_saves.start(save.path, agreement, save.run)


class _Save:
    """One rank's part of one save."""

    def __init__(self, agreement: Agreement, root: Any) -> None:
        self._agreement = agreement
        self._world: World = agreement.world
        self._given_root = root
        self._staging: Staging | None = None

    # ------------------------------------------------------------------ in the caller

    def prepare(self, model: nn.Module, optimizer: Any, options: dict[str, Any], contents: dict[str, Any]) -> None:
        """Check the arguments and look at everything that is to be saved."""
        background_saves.drain()
        _check_options(options)
        self._root = catalog.root_path(self._given_root)
        self._fs: FileSystem = file_system(self._root)
        self._step: int = options["step"]
        self._keep: int | None = options["keep"]
        self._agreement.path = self.path
        self._snapshot: Snapshot = snapshot.take(model, optimizer, trainable_only=options["trainable_only"], **contents)
        self._structure = self._snapshot.structure({**options, "root": self._root, "optimizer": optimizer is not None})
        self._parts: list[Part] = self._snapshot.parts(self._world)

    @property
    def path(self) -> str:
        return os.path.join(self._root, step_directory(self._step))

    def stage(self) -> None:
        """Copy what this rank writes: later changes are not part of the save."""
        self._parts, self._staging = background_saves.stage(self._parts)

    # ------------------------------------------------------------------ in the caller or in a thread

    def run(self) -> None:
        try:
            if self._world.is_first:
                self._lead()
            else:
                self._follow()
        finally:
            if self._staging is not None:
                self._staging.give_back()

    def _arrive(self) -> list[Any]:
        note = {
            "structure": snapshot.structure_digest(self._structure),
            "coordinates": self._snapshot.coordinates,
            "per_rank": -1 if self._snapshot.per_rank is None else len(self._snapshot.per_rank),
        }
        if self._world.is_first:
            return self._agreement.collect("arrived", note)
        self._agreement.post("arrived", note)
        return []

    def _details(self) -> dict[str, Any]:
        return {"structure": self._structure, "owned": self._snapshot.owned()}

    def _follow(self) -> None:
        agreement = self._agreement
        agreement.phase = "compare"
        self._arrive()
        go = agreement.hear("go")
        if go["differ"]:
            agreement.post("details", self._details())
            go = agreement.hear("start")
        written = self._write(go["staging"])
        agreement.phase = "wait for publication"
        agreement.post("wrote", vars(written))
        outcome = agreement.hear("outcome")
        if outcome["error"] is not None:
            raise SharedFailure(failure_of(outcome["error"]))

    def _lead(self) -> None:
        agreement, fs = self._agreement, self._fs
        agreement.phase = "compare"
        notes = self._arrive()
        structure = self._structure
        differ = any(note["structure"] != notes[0]["structure"] for note in notes)
        run_id = secrets.token_hex(8)
        staging = catalog.staging_directory(fs, self._root, self._step, run_id)
        if differ:
            agreement.tell("go", {"differ": True})
            details = agreement.collect("details", self._details())
            structure = snapshot.merge(
                [d["structure"] for d in details], [d["owned"] for d in details], self._world.ranks
            )
        manifest = self._plan(structure, notes, run_id)
        agreement.phase = "prepare"
        catalog.refuse_replacing(fs, self._root, self._step)
        catalog.make_directories(fs, self._root)
        for kept in catalog.clean(fs, self._root):
            warn_user(f"save_checkpoint could not remove what an earlier save has left: {kept}")
        catalog.make_room(fs, self._root, self._step)
        fs.make_directory(staging)
        with contextlib.nullcontext() if fs.is_remote else fs.held(staging):  # other jobs' cleaning leaves it alone
            self._lead_writing(staging, manifest, "start" if differ else "go")

    def _lead_writing(self, staging: str, manifest: Manifest, go: str) -> None:
        agreement = self._agreement
        try:
            agreement.tell(go, {"differ": False, "staging": staging})
            written = self._write(staging)
            agreement.phase = "wait for the others' files"
            files = agreement.collect("wrote", vars(written))
            manifest.files = self._check_files(staging, manifest, [Written(**file) for file in files])
            replaced = self._publish(staging, manifest)
        except BaseException as problem:
            failure = agreement.fail(problem)  # first, or the others would stumble over what is gone
            self._discard(staging)
            raise failure from failure.__cause__
        self._finish(manifest, replaced)
        agreement.tell("outcome", {"error": None})

    def _publish(self, staging: str, manifest: Manifest) -> str | None:
        """The commit: a rename, or where there is none the manifest. Returns where a replaced version is now."""
        agreement = self._agreement
        agreement.phase = "write the manifest"
        agreement.path = os.path.join(staging, MANIFEST)
        data = encode(manifest)
        decode(data, agreement.path)  # a reader's checks: what none would accept is not published
        if self._fs.is_remote:
            agreement.commit()
            self._write_manifest(staging, data)
            return None
        self._write_manifest(staging, data)
        agreement.phase, agreement.path = "publish", self.path
        self._check_whole(staging, manifest)
        agreement.commit()
        return catalog.publish(self._fs, self._root, staging, self._step, manifest.run_id)

    def _plan(self, structure: dict[str, Any], notes: list[Any], run_id: str) -> Manifest:
        taken = self._snapshot
        states = structure["optimizer state"]
        section = None
        if taken.optimizer is not None:
            scalars = {
                name: {key: value for key, value in state.items() if not isinstance(value, str)}
                for name, state in states.items()
            }
            section = {**taken.optimizer.section(), "scalars": {name: s for name, s in scalars.items() if s}}
        coordinates = [[tuple(place) for place in note["coordinates"]] for note in notes]
        mesh = taken.meshes[0] if taken.meshes else None
        return Manifest(
            step=self._step,
            world_size=self._world.size,
            mesh=(mesh.replicate_size, mesh.shard_size) if mesh is not None else (self._world.size, 1),
            run_id=run_id,
            created=time.time(),
            tensors=taken.records(states, coordinates, [note["per_rank"] for note in notes]),
            aliases={alias: t.name for t in taken.saved for alias in t.names[1:]},
            extra=taken.extra,
            optimizer=section,
            left_out=taken.left_out,
        )

    def _write(self, staging: str) -> Written:
        agreement = self._agreement
        agreement.phase = "write"
        agreement.path = path = os.path.join(staging, rank_file(self._world.index, self._world.size))
        try:
            events.emit("save", sum(part.data.numel() * ITEMSIZE[part.dtype] for part in self._parts))
            return write_rank_file(self._fs, path, self._parts, self._advance)
        except FileNotFoundError as problem:
            agreement.poll(now=True)  # if another rank has failed the directory is gone for that reason
            raise CheckpointError(
                f"rank {self._world.rank} does not see the directory that rank {self._world.ranks[0]} has made",
                rank=self._world.rank,
                phase="write",
                path=path,
                errno=problem.errno,
                cure="the root must be one directory on a file system that all ranks share",
            ) from problem

    def _advance(self, count: int) -> None:
        self._agreement.advance()
        events.emit("written", count)

    def _check_files(self, staging: str, manifest: Manifest, written: list[Written]) -> list[FileRecord]:
        """Every rank has written what the manifest will say it has, and it is here."""
        counts, sizes = [0] * len(written), [0] * len(written)
        for tensor in manifest.tensors.values():
            for part in tensor.ranges:
                counts[part.file] += 1
                sizes[part.file] += part.count * ITEMSIZE[tensor.dtype]
        records = []
        for rank, file in enumerate(written):
            name = rank_file(rank, self._world.size)
            path = os.path.join(staging, name)
            if (file.tensor_count, file.data_bytes) != (counts[rank], sizes[rank]):
                raise CheckpointError(
                    f"rank {self._world.ranks[rank]} did not write what was planned",
                    expected=f"{counts[rank]} ranges of {sizes[rank]} bytes",
                    found=f"{file.tensor_count} ranges of {file.data_bytes} bytes",
                    phase="check",
                    path=path,
                )
            try:
                size = self._fs.size(path)
            except FileNotFoundError:
                size = -1
            if size != file.size_bytes:
                raise CheckpointError(
                    f"the file of rank {self._world.ranks[rank]} is not what it wrote, seen from rank 0",
                    expected=f"{file.size_bytes} bytes",
                    found="no such file" if size < 0 else f"{size} bytes",
                    phase="check",
                    path=path,
                    cure="the root must be one directory on a file system that all ranks share",
                )
            records.append(FileRecord(name, file.size_bytes, file.header_bytes, file.header_crc32))
        return records

    def _write_manifest(self, staging: str, data: bytes) -> None:
        self._agreement.poll(now=True)
        write_all(self._fs, os.path.join(staging, MANIFEST), data)
        self._fs.flush_directory(staging)

    def _check_whole(self, path: str, manifest: Manifest) -> None:
        """Nobody has taken away what was written."""
        try:
            self._fs.size(os.path.join(path, MANIFEST))
            problem = catalog.defect(self._fs, path, manifest)
        except FileNotFoundError:
            problem = f"{MANIFEST} is missing"
        if problem is not None:
            raise CheckpointError(
                f"step {self._step} is not saved: what was written for it is gone",
                found=problem,
                phase="publish",
                path=path,
                cure="a root belongs to one job at a time: give each its own",
            )

    def _discard(self, staging: str) -> None:
        """Best effort: what stays is removed by the next save."""
        try:
            catalog.remove_tree(self._fs, staging)
        except OSError:
            pass

    def _finish(self, manifest: Manifest, replaced: str | None) -> None:
        """After the commit: make the name durable, remove what is not needed. A failure says what has been reached."""
        fs, agreement = self._fs, self._agreement
        try:
            if not fs.is_remote:
                try:
                    self._check_whole(self.path, manifest)
                except CheckpointError:
                    catalog.withdraw(fs, self._root, self._step, manifest.run_id, replaced)
                    raise
            agreement.phase = "flush the root"
            fs.flush_directory(self._root)
            agreement.phase = "remove old checkpoints"
            if replaced is not None:
                catalog.remove_tree(fs, replaced)
            if self._keep is not None:
                catalog.retain(fs, self._root, self._keep, self._step, manifest.run_id)
        except OSError as problem:
            rank, phase = self._world.rank, agreement.phase
            what = f"step {self._step} is published, and rank {rank} then failed to {phase}"
            raise from_os_error(problem, what, phase=phase, path=self._root, rank=rank) from problem


def _check_options(options: dict[str, Any]) -> None:
    step, keep = options["step"], options["keep"]
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST_STEP:
        raise ConfigError(f"step must be a whole number from 0 to {LARGEST_STEP}", found=repr(step))
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ConfigError("keep must be a whole number of at least 1, or None to keep all", found=repr(keep))
