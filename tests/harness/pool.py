"""Pools of warm ranks, and `run`, which calls a function on each of them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.worker import RankSetup, worker_main

PG_TIMEOUT_S = 15.0
GRACE_S = 4.0
START_TIMEOUT_S = 60.0
PRELOADED = ("tests.harness.preload",)


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not answer; the text holds what every rank had to say."""


class Pool:
    """`world_size` processes with a process group between them, kept for many calls."""

    def __init__(self, world_size: int, *, pg_timeout_s: float, group: bool) -> None:
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="fsdplite-ranks-"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if group else None
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        context = _forkserver()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            setup = RankSetup(
                rank=rank,
                world_size=world_size,
                store_port=self.store.port if self.store is not None else 0,
                pg_timeout_s=pg_timeout_s,
                group=group,
                log_path=str(self.log_path(rank)),
            )
            process = context.Process(target=worker_main, args=(setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self.collect(START_TIMEOUT_S, frozenset(), "joining the process group")

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def call(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, timeout_s: float, absent: Collection[int]
    ) -> list[Any]:
        self.send(fn, args, kwargs)
        return self.collect(timeout_s, absent, getattr(fn, "__qualname__", repr(fn)))

    def send(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        """Start a call without waiting for its answers, which `collect` does."""
        message = pickle.dumps((fn, args, kwargs))
        for connection in self.connections:
            connection.send_bytes(message)

    def collect(self, timeout_s: float, absent: Collection[int], what: str) -> list[Any]:
        """Wait for every rank's answer, and for no longer than needed once one has failed."""
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        expected = [rank for rank in range(self.world_size) if rank not in absent]
        failed = False
        while any(rank not in answers for rank in expected):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            waiting = {self.connections[rank]: rank for rank in range(self.world_size) if rank not in answers}
            for ready in wait(list(waiting), timeout=left_s):
                rank = waiting[ready]
                answers[rank] = self._receive(rank, may_exit=rank in absent)
                if answers[rank][0] == "error" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        late = [rank for rank in expected if rank not in answers]
        for rank in late:
            answers[rank] = ("error", f"no answer within {timeout_s:g} s\n" + self._stacks(rank))
        for rank in absent:
            # Sleeping is what it was told to do; dying of a signal is not.
            answers.setdefault(rank, ("ok", None))
        if any(state == "error" for state, _ in answers.values()):
            raise RanksFailed(self._report(answers, what))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _receive(self, rank: int, *, may_exit: bool) -> tuple[str, Any]:
        try:
            return pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(5)
            code = process.exitcode
            if may_exit and code is not None and code >= 0:
                return ("ok", None)
            death = f"killed by signal {signal.Signals(-code).name}" if code and code < 0 else f"exited with {code}"
            return ("error", death)

    def _stacks(self, rank: int) -> str:
        process = self.processes[rank]
        if process.pid is None or not process.is_alive():
            return "its process is gone"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return "its stacks are in the log below"

    def _report(self, answers: dict[int, tuple[str, Any]], what: str) -> str:
        parts = [f"{what} on {self.world_size} ranks"]
        for rank in sorted(answers):
            state, text = answers[rank]
            parts.append(f"----- rank {rank}: {'fine' if state == 'ok' else text}")
            log = self.log_path(rank)
            if state == "error" and log.exists() and log.stat().st_size:
                parts.append(f"----- rank {rank}, end of its output:\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)

    def close(self) -> None:
        for connection in self.connections:
            try:
                connection.send_bytes(b"")
            except OSError:
                pass  # the rank is gone already
        for process in self.processes:
            process.join(0.3)
            if process.is_alive():
                process.kill()
                process.join(5)
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: dict[tuple[int, bool], Pool] = {}


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    fresh: bool = False,
    pg_timeout_s: float = PG_TIMEOUT_S,
    absent: Collection[int] = (),
    group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

    Args:
        world_size: Number of ranks.
        fn: A module-level function; it, its arguments and its result travel by pickle.
        timeout_s: A rank that has not answered by then has failed. A collective that hangs ends earlier, by the
            timeout of its group: this is for what hangs elsewhere, and may cover many combinations.
        fresh: Use new processes for this call and throw them away after it.
        pg_timeout_s: Timeout of the process group; other than the default only with `fresh`.
        absent: Ranks expected to sleep or to leave; their result is None. Only with `fresh`.
        group: False starts ranks without a process group and without torchrun's variables (`world_size` 1).

    Raises:
        RanksFailed: Some rank raised, died of a signal, exited unasked or was late. The pool is thrown away.
    """
    if not fresh and (absent or pg_timeout_s != PG_TIMEOUT_S):
        raise ValueError("absent ranks and other timeouts need fresh=True")
    if not group and world_size != 1:
        raise ValueError("only one rank can do without a process group")
    key = (world_size, group)
    if fresh:
        pool = Pool(world_size, pg_timeout_s=pg_timeout_s, group=group)
    else:
        if key not in _pools:
            _pools[key] = Pool(world_size, pg_timeout_s=pg_timeout_s, group=group)
        pool = _pools[key]
    healthy = False
    try:
        results = pool.call(fn, args, kwargs, timeout_s, absent)
        healthy = not fresh
        return results
    finally:
        if not healthy:
            _pools.pop(key, None) if not fresh else None
            pool.close()


def run_together(
    world_size: int,
    fn: Callable[..., Any],
    calls: list[tuple[tuple, Collection[int]]],
    *,
    timeout_s: float = 60.0,
    pg_timeout_s: float = PG_TIMEOUT_S,
) -> list[list[Any]]:
    """Several calls at the same time, each on fresh ranks of its own: for calls that spend their time waiting.

    Args:
        world_size: Number of ranks of each call.
        fn: A module-level function.
        calls: Of each call its arguments and the ranks that are absent in it.
        timeout_s: For each call, from when the one before it has answered.
        pg_timeout_s: Timeout of the process groups.

    Returns:
        For each call the results in rank order.
    """
    pools: list[Pool] = []
    try:
        for _ in calls:
            pools.append(Pool(world_size, pg_timeout_s=pg_timeout_s, group=True))
        for pool, (args, _) in zip(pools, calls):
            pool.send(fn, args, {})
        return [pool.collect(timeout_s, absent, fn.__qualname__) for pool, (_, absent) in zip(pools, calls)]
    finally:
        for pool in pools:
            pool.close()


def close_pools() -> None:
    """End all warm ranks."""
    while _pools:
        _pools.popitem()[1].close()


def _forkserver() -> Any:
    # Before the server starts: its children inherit the environment.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


atexit.register(close_pools)
