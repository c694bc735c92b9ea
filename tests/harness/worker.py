"""The side of the harness that runs inside a rank: set up once, then one call after another."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankSetup:
    """What a rank needs to know to join its pool."""

    rank: int
    world_size: int
    store_port: int
    pg_timeout_s: float
    group: bool
    log_path: str


class Here:
    """Where this process stands; filled in by the worker, so it also works without a process group."""

    rank: int = 0
    world_size: int = 1
    harness_group: Any = None


here = Here()


def worker_main(setup: RankSetup, connection: Connection) -> None:
    """Body of a rank's process: join the group, answer calls until told to stop."""
    log = _redirect_output(setup.log_path)
    # A stuck rank is asked for its stacks before it is killed, so that a hang names its place.
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    faulthandler.enable(file=log)
    here.rank, here.world_size = setup.rank, setup.world_size
    torch.set_num_threads(1)
    try:
        _join(setup)
        gc.collect()
        gc.freeze()  # later collections look at a test's own objects only
        connection.send_bytes(pickle.dumps(("ok", None)))
    except BaseException:
        connection.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        return
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        if not message:
            os._exit(0)
        connection.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    _reset()
    try:
        fn, args, kwargs = pickle.loads(message)
        answer = ("ok", fn(*args, **kwargs))
        reply = pickle.dumps(answer)
    except BaseException as error:
        reply = pickle.dumps(("error", _describe(error)))
    _reset()
    return reply


def _describe(error: BaseException) -> str:
    """The traceback, from the test's own frames on."""
    report = traceback.TracebackException.from_exception(error)
    while len(report.stack) > 1 and report.stack[0].name in ("_answer", "for_each"):
        del report.stack[0]
    return "".join(line for line in "".join(report.format()).splitlines(keepends=True) if line.strip(" ^~\n"))


def _reset() -> None:
    """Undo what a test may have left behind, so that order and selection of tests do not matter."""
    gc.collect()
    torch.manual_seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    warnings.resetwarnings()
    warnings.simplefilter("default")


def _join(setup: RankSetup) -> None:
    if not setup.group:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        return
    os.environ.update(
        RANK=str(setup.rank),
        WORLD_SIZE=str(setup.world_size),
        LOCAL_RANK=str(setup.rank),
        LOCAL_WORLD_SIZE=str(setup.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.store_port),
        # The store lives in the test process, as it does in torchrun's agent: it outlives any rank.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    import fsdplite as fsdp

    fsdp.init_distributed(backend="gloo", timeout=setup.pg_timeout_s)
    # The harness moves its own objects on a group of its own, so it cannot disturb the order of what is tested. Its
    # timeout is longer: one rank's error may come late, by a timeout, while another's came at once.
    here.harness_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))


def _redirect_output(log_path: str) -> Any:
    log = open(log_path, "a", buffering=1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    return log
