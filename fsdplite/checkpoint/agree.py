"""How the ranks of one save or load hear of each other: small notes in the process group's store.

Never a collective, which training may be using. Every rank looks for a failure of the others between its writes; the
first failure wins and is the same error everywhere. Publishing and giving up go through one key that is set once, so
a rank that loses patience and a rank 0 that publishes cannot both have their way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError, FSDPError
from ..liveness import has_rank_ended, register
from .failure import SharedFailure, failure_of, from_os_error, record_of
from .world import World

__all__ = ["Agreement"]

_BEAT_S = 0.5
# A process elsewhere that shows no sign of life for so long is gone (or for the group's timeout, if shorter).
_DEAD_S = 30.0
_FAREWELL_S = 2.0
_POLL_S = 0.02
_COMMIT = b"commit"


_stores: dict[int, tuple[Any, Any]] = {}
_calls: dict[tuple[int, tuple[int, ...]], int] = {}


def _own_connection() -> tuple[int, Any]:
    """A connection to the default store of our own: another user's blocking read would hold the shared one."""
    store = dist.distributed_c10d._get_default_store()
    if id(store) not in _stores:
        try:
            ours = store.clone()
        except (RuntimeError, NotImplementedError, AttributeError):
            ours = store  # this kind of store has no connections
        _stores[id(store)] = (store, ours)
        with contextlib.suppress(RuntimeError):  # it is gone: the first note says so
            register(ours, dist.get_rank())
    return id(store), _stores[id(store)][1]


class Agreement:
    """One call that all ranks of ``world`` make. Create it in the same order on every rank, and use as a context.

    Attributes:
        phase: What this rank does at the moment, for messages.
        path: The file or directory it works on.
    """

    def __init__(self, world: World, call: str) -> None:
        self.world = world
        self.call = call
        self.phase = "prepare"
        self.path: str | None = None
        self._store: Any = None
        self._progress = 0
        self._polled = 0.0
        self._seen: dict[int, tuple[bytes, float, bytes, float]] = {}
        self._gone: set[int] = set()
        self._collected: list[str] = []
        self._told: list[str] = []
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None
        if world.size > 1:
            owner, store = _own_connection()
            key = (owner, world.ranks)
            _calls[key] = number = _calls.get(key, 0) + 1
            scope = "-".join(map(str, world.ranks))
            if world.size > 8:
                scope = hashlib.blake2b(scope.encode(), digest_size=8).hexdigest()
            self._store = dist.PrefixStore(f"fsdplite/checkpoint/{scope}/{number}", store)
            self._default_store = store

    # ------------------------------------------------------------------ the context

    @contextlib.contextmanager
    def open(self) -> Iterator[Agreement]:
        """Everything inside fails on all ranks or on none. Any exception becomes the error that all ranks raise."""
        if self._store is not None:
            self._beating = threading.Thread(target=self._beat, name="fsdplite-checkpoint-beat", daemon=True)
            self._beating.start()
        try:
            yield self
        except BaseException as problem:
            failure = self.fail(problem)
            self._leave(hurry=True)
            if isinstance(failure, SharedFailure):
                raise failure.error from failure.__cause__
            raise
        else:
            self._leave(hurry=False)

    def _beat(self) -> None:
        ticks = 0
        while not self._stop.is_set():
            ticks += 1
            try:
                self._store.set(f"beat/{self.world.index}", f"{self._progress} {ticks} {self.call}")
            except RuntimeError:
                return  # the store is gone; whoever waits for something will say so
            self._stop.wait(_BEAT_S)

    def _leave(self, *, hurry: bool) -> None:
        """The store may live in rank 0's process: it stays until the others have read what they need."""
        self._stop.set()
        if self._store is None:
            return
        self._beating.join(1.0)
        try:
            self._store.set(f"left/{self.world.index}", b"1")
            if self.world.is_first:
                patience_s = _FAREWELL_S if hurry else min(_DEAD_S, self.world.timeout_s)
                deadline = time.monotonic() + patience_s
                look = time.monotonic() + _BEAT_S
                keys = {index: f"left/{index}" for index in range(self.world.size) if index not in self._gone}
                while not (everyone := self._store.check(list(keys.values()))) and time.monotonic() < deadline:
                    time.sleep(0.002)
                    if time.monotonic() > look:
                        look += _BEAT_S
                        keys = {index: key for index, key in keys.items() if not self._has_ended(index)}
                if everyone and len(keys) == self.world.size:
                    self._clear()
        except RuntimeError:
            pass  # the store is gone, and with it whoever could read

    def _clear(self) -> None:
        for name in ("beat", "left", *map(self._key, self._collected)):
            for index in range(self.world.size):
                self._store.delete_key(f"{name}/{index}")
        for name in ("decision", *map(self._key, self._told)):
            self._store.delete_key(name)

    def _key(self, name: str) -> str:
        """Notes of different calls are different notes: ranks that make them at the same time do not mix them up."""
        return f"{self.call}/{name}"

    # ------------------------------------------------------------------ notes

    def post(self, name: str, value: Any) -> None:
        """Leave this rank's note ``name``."""
        if self._store is not None:
            with self._reaching():
                self._store.set(f"{self._key(name)}/{self.world.index}", json.dumps(value))

    def collect(self, name: str, own: Any) -> list[Any]:
        """Post ``own`` and wait for everybody's note ``name``; in rank order."""
        if self._store is None:
            return [own]
        self._collected.append(name)
        self.post(name, own)
        keys = {index: f"{self._key(name)}/{index}" for index in range(self.world.size)}
        return self._wait(keys)

    def tell(self, name: str, value: Any) -> None:
        """Rank 0 says something to all."""
        self._told.append(name)
        if self._store is not None:
            with self._reaching():
                self._store.set(self._key(name), json.dumps(value))

    def hear(self, name: str) -> Any:
        """Wait for what rank 0 says."""
        return self._wait({0: self._key(name)})[0]

    def _wait(self, keys: dict[int, str]) -> list[Any]:
        pause_s = 0.0005
        started = last_look = time.monotonic()
        wanted = list(keys.values())
        while True:
            with self._reaching():
                if self._store.check(wanted):
                    return [json.loads(value) for value in self._store.multi_get(wanted)]
            self.poll(now=True)
            now = time.monotonic()
            if now - last_look > _BEAT_S:
                last_look = now
                with self._reaching():
                    missing = {index: key for index, key in keys.items() if not self._store.check([key])}
                    self._look_for_life(missing, started)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_S)

    def _look_for_life(self, missing: dict[int, str], started: float) -> None:
        """Raise if a rank that is waited for, for the note under the key here, is dead or stuck."""
        now = time.monotonic()
        # Rank 0 waits for the others and sees first who is stuck; the others, who wait for rank 0, let it say so.
        patience_s = self.world.timeout_s * (1.0 if self.world.is_first else 1.5)
        for index, awaited in missing.items():
            if index == self.world.index:
                continue
            if self._has_ended(index) and not self._store.check([awaited]):
                self._lose(index, "is gone: its process has ended")
            key = f"beat/{index}"
            if not self._store.check([key]):
                if now - started > patience_s:
                    self._lose(index, f"did not call {self.call} within {patience_s:g} s of the others")
                continue
            progress, ticks, call = self._store.get(key).split(b" ", 2)
            if call.decode() != self.call:
                self._lose(index, f"called {call.decode()} instead")
            before = self._seen.get(index)
            if before is None:
                self._seen[index] = (progress, now, ticks, now)
                continue
            moved = now if progress != before[0] else before[1]
            lived = now if ticks != before[2] else before[3]
            if progress != before[0]:
                self._progress += 1  # waiting for somebody who works is progress: others may be waiting for us
            self._seen[index] = (progress, moved, ticks, lived)
            dead_s = min(_DEAD_S, self.world.timeout_s)
            if now - lived > dead_s:
                self._lose(index, f"has shown no sign of life for {dead_s:g} s: its process is gone or stopped")
            if now - moved > patience_s:
                self._lose(index, f"has made no progress for {patience_s:g} s")

    def _has_ended(self, index: int) -> bool:
        return has_rank_ended(self._default_store, self.world.ranks[index])

    def _lose(self, index: int, what: str) -> None:
        self._gone.add(index)
        rank = self.world.ranks[index]
        error = CheckpointError(
            f"rank {rank} {what}, while rank {self.world.rank} was waiting for it in {self.call}",
            rank=rank,
            phase=self.phase,
            path=self.path,
            cure=f"look at the output of rank {rank}; what is published is untouched, see fsdplite.latest_step(root)",
        )
        raise SharedFailure(self._give_up(record_of(error)))

    # ------------------------------------------------------------------ failing together

    def advance(self) -> None:
        """Say that work goes on, and hear whether it is still wanted."""
        self._progress += 1
        self.poll()

    def poll(self, *, now: bool = False) -> None:
        """Raise what another rank has failed with, if one has."""
        if self._store is None:
            return
        time_now = time.monotonic()
        if not now and time_now - self._polled < _POLL_S:
            return
        self._polled = time_now
        with self._reaching():
            if not self._store.check(["decision"]):
                return
            decision = self._store.get("decision")
        if decision != _COMMIT:
            raise SharedFailure(failure_of(json.loads(decision)))

    def commit(self) -> None:
        """Rank 0: from here on nobody can give up any more. Raises if somebody has."""
        if self._store is None:
            return
        with self._reaching():
            decision = self._store.compare_set("decision", "", _COMMIT.decode())
        if decision != _COMMIT:
            raise SharedFailure(failure_of(json.loads(decision)))

    def fail(self, problem: BaseException) -> BaseException:
        """Tell the others, before anything is cleaned up. Returns what to raise."""
        if isinstance(problem, SharedFailure):
            return problem
        error = self._give_up(self._record(problem))
        if not isinstance(problem, Exception):
            return problem  # KeyboardInterrupt, SystemExit
        failure = SharedFailure(error)
        failure.__cause__ = problem
        return failure

    def _give_up(self, record: dict[str, Any]) -> BaseException:
        """Make ``record`` everybody's error, unless another one came first."""
        if self._store is None:
            return failure_of(record)
        try:
            decision = self._store.compare_set("decision", "", json.dumps(record))
            if decision == _COMMIT and self.world.is_first:
                self._told.append("outcome")
                self._store.set(self._key("outcome"), json.dumps({"error": record}))
            elif decision != _COMMIT:
                record = json.loads(decision)
        except RuntimeError:
            pass  # nobody can be told
        return failure_of(record)

    def _record(self, problem: BaseException) -> dict[str, Any]:
        rank = self.world.rank
        what = f"rank {rank} failed to {self.phase} in {self.call}"
        if isinstance(problem, FSDPError):
            record = record_of(problem)
            if problem.rank is None and self.world.size > 1:
                record["text"] += f"\n  on: rank {rank}"
                record["rank"] = rank
            return record
        if isinstance(problem, OSError):
            error = from_os_error(problem, what, phase=self.phase, path=self.path, rank=rank)
        else:
            error = CheckpointError(
                f"{what}: {type(problem).__name__}: {problem}", rank=rank, phase=self.phase, path=self.path
            )
        return record_of(error)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as problem:
            if isinstance(problem, FSDPError):
                raise
            raise SharedFailure(
                CheckpointError(
                    f"rank {self.world.rank} cannot reach the store of the process group in {self.call}: the process "
                    f"that holds it is gone (torchrun's agent, or without torchrun rank 0's)",
                    found=str(problem).splitlines()[0],
                    rank=self.world.rank,
                    phase=self.phase,
                    path=self.path,
                    cure="look at that process's output, and start the job again: what is published is untouched",
                )
            ) from None  # the rest of the cause is the transport's frames
