"""SWEEP: every fault at every file-system operation of a save. Cases K38, K39, K45 and section 2 of the cases."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

import fsdplite as fsdp
from fsdplite.checkpoint import agree, background, storage
from fsdplite.checkpoint.agree import Agreement
from fsdplite.checkpoint.world import world_of
from fsdplite.errors import FSDPError
from tests.harness import all_gather_objects, here, run

from .faults import Crash, Fault, FaultyFileSystem
from .parts import filled, in_memory, values_in

tmp_path = in_memory  # of all tests here
SCENARIOS = {
    "new": (20, {}),
    "over": (10, {}),
    "background": (20, {"background": True}),
    "keep": (20, {"keep": 1}),
    "over-keep": (10, {"keep": 1}),
}


def attempt(root: str, step: int, value: float, fault: Fault, options: dict) -> tuple[str | None, FaultyFileSystem]:
    """Save; returns the error's text, if there was one."""
    model, optimizer = filled(value)
    with storage.using(FaultyFileSystem(fault)) as fs:
        try:
            fsdp.save_checkpoint(root, model, optimizer, step=step, **options).wait()
        except (FSDPError, Crash) as problem:
            return f"{type(problem).__name__}: {problem}", fs
    return None, fs


def look(root: str) -> tuple[int, float]:
    """ATOMIC: what a fresh process would load."""
    infos = fsdp.list_checkpoints(root)
    assert infos, os.listdir(root)
    (value,) = values_in(infos[-1].path)
    assert fsdp.verify_checkpoint(infos[-1].path).ok
    return infos[-1].step, value


def start_from(good: str, root: str) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(good, root)


def assert_one_commit(outcomes: list, old: tuple, new: tuple) -> None:
    assert set(outcomes) <= {old, new}, set(outcomes)
    changes = sum(a != b for a, b in zip(outcomes, outcomes[1:]))
    assert changes <= 1 and outcomes[0] == old, outcomes


def assert_next_save_cleans(root: str, options: dict) -> None:
    text, _ = attempt(root, 30, 3.0, Fault("count"), options)
    assert text is None and look(root) == (30, 3.0)
    names = os.listdir(root)
    assert all(name.startswith("step-") for name in names), names
    for name in names:
        assert sorted(os.listdir(os.path.join(root, name)))[0] == "manifest.json"
    if "keep" in options:
        assert names == ["step-30"]


FAULTS = [
    *(Fault("fail", 0, code) for code in (errno.ENOSPC, errno.EIO, errno.EACCES)),
    Fault("crash_before", mock=True),
    Fault("crash_after", mock=True),
    Fault("short", 0, 0.4),
    Fault("lie", 0, 0.4),
    Fault("lie", 0, 0.0),
    *(Fault("power_cut", 0, seed, mock=True) for seed in range(5)),
]


@pytest.mark.parametrize(
    "scenario", [s if s == "new" else pytest.param(s, marks=pytest.mark.slow) for s in SCENARIOS]
)
def test_K38_sweep_of_one_rank(tmp_path, scenario):
    step, options = SCENARIOS[scenario]
    good, root = str(tmp_path / "good"), str(tmp_path / "run")
    assert attempt(good, 10, 1.0, Fault("count"), {})[0] is None
    start_from(good, root)
    text, dry = attempt(root, step, 2.0, Fault("count"), options)
    assert text is None and look(root) == (step, 2.0) and len(dry.threads) == 1
    count = dry.count
    assert 15 < count < 80
    old, new = (10, 1.0), (step, 2.0)
    for fault in FAULTS:
        outcomes = []
        for n in range(1, count + 1):
            start_from(good, root)
            text, fs = attempt(root, step, 2.0, Fault(fault.kind, n, fault.detail, fault.mock), options)
            where = (scenario, fault, n, fs.log[n - 1], text)
            found = look(root)
            outcomes.append(found)
            assert found in (old, new), where
            is_write = fs.log[n - 1][0] == "write_at"
            if fault.kind == "short" or (fault.kind == "lie" and not is_write):
                assert text is None and found == new, where
            elif fault.kind in ("fail", "lie"):
                assert text is not None, where
                assert "rank 0" in text and "phase" in text and "errno" in text and str(tmp_path) in text, where
                assert (f"step {step} is published" in text) == (found == new), where
            assert_next_save_cleans(root, options)
        if fault.kind != "lie":
            assert_one_commit(outcomes, old, new) if fault.kind != "short" else None


def fail_everywhere(good: str, root: str, scenario: str, kinds: list[Fault]) -> int:
    """On two ranks: each fault at each operation of each rank, in one set of processes."""
    step, options = SCENARIOS[scenario]
    if here.rank == 0:
        start_from(good, root)
    all_gather_objects(0)
    text, dry = attempt(root, step, 2.0, Fault("count"), options)
    assert text is None
    counts = all_gather_objects(dry.count)
    old, new = (10, 1.0), (step, 2.0)
    for faulty in range(here.world_size):
        for fault in kinds:
            outcomes = []
            for n in range(1, counts[faulty] + 1):
                if here.rank == 0:
                    start_from(good, root)
                all_gather_objects(0)
                planned = Fault(fault.kind, n, fault.detail) if here.rank == faulty else Fault("count")
                started = time.monotonic()
                text, fs = attempt(root, step, 2.0, planned, options)
                took = time.monotonic() - started
                texts = all_gather_objects(text)
                operation = all_gather_objects(fs.log[n - 1] if here.rank == faulty else None)[faulty]
                where = (scenario, faulty, fault, n, operation, texts)
                assert took < 10, where
                assert all(t == texts[0] for t in texts), where
                found = all_gather_objects(look(root) if here.rank == 0 else None)[0]
                outcomes.append(found)
                if fault.kind in ("short", "slow") or (fault.kind == "lie" and operation[0] != "write_at"):
                    assert text is None and found == new, where
                else:
                    assert text is not None and f"rank {faulty}" in text and "phase" in text and "errno" in text, where
                    assert (f"step {step} is published" in text) == (found == new), where
                text, _ = attempt(root, 30, 3.0, Fault("count"), options)
                assert text is None, where
                names = sorted(os.listdir(root))
                assert all(name.startswith("step-") for name in names), (where, names)
                all_gather_objects(0)
            if fault.kind == "fail":
                assert_one_commit(outcomes, old, new)
    return sum(counts)


def save_good(root: str) -> None:
    assert attempt(root, 10, 1.0, Fault("count"), {})[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["new", "over", "background", "keep"])
def test_K38_sweep_of_two_ranks_that_live(tmp_path, scenario):
    run(2, save_good, str(tmp_path / "good"))
    kinds = [Fault("fail", 0, errno.ENOSPC), Fault("lie", 0, 0.3)]
    if scenario == "new":
        kinds += [Fault("short", 0, 0.4), Fault("slow", 0, 0.05)]
    run(2, fail_everywhere, str(tmp_path / "good"), str(tmp_path / "run"), scenario, kinds, timeout_s=240)


def crash_one(root: str, step: int, options: dict, faulty: int, fault: Fault) -> str | None:
    """Save, and a process ends in the middle: a fork of the faulty rank, which takes part in its place."""
    if here.rank != faulty:
        beat_s, agree._BEAT_S = agree._BEAT_S, 0.01  # looks for life at once, rather than twice a second
        try:
            return attempt(root, step, 2.0, Fault("count"), options)[0]
        finally:
            agree._BEAT_S = beat_s
    model, optimizer = filled(2.0)
    child = os.fork()
    if child == 0:
        agree._stores.clear()  # its own connection
        with storage.using(FaultyFileSystem(fault)):
            try:
                fsdp.save_checkpoint(root, model, optimizer, step=step, **options).wait()
            finally:
                os._exit(0)  # it lived, which no fault of these permits
    Agreement(world_of(model), "save_checkpoint")  # calls are counted, and this one was the fork's
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (41, 42)
    return None


def count_operations(root: str, step: int, options: dict) -> int:
    return attempt(root, step, 2.0, Fault("count"), options)[1].count


def next_save(root: str) -> None:
    agree._stores.clear()  # this process says that it is the rank, not a fork of it that has ended
    text, _ = attempt(root, 30, 3.0, Fault("count"), {})
    assert text is None


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_K38_every_crash_of_two_ranks(tmp_path, scenario):
    step, options = SCENARIOS[scenario]
    good, root = str(tmp_path / "good"), str(tmp_path / "run")
    run(2, save_good, good)
    start_from(good, root)
    counts = run(2, count_operations, root, step, options)
    old, new = (10, 1.0), (step, 2.0)
    for faulty in range(2):
        outcomes = []
        for n in range(1, counts[faulty] + 1):
            start_from(good, root)
            fault = Fault("crash_before" if n % 2 else "crash_after", n)
            survivor = run(2, crash_one, root, step, options, faulty, fault)[1 - faulty]
            found = look(root)
            outcomes.append(found)
            where = (scenario, faulty, fault, found, survivor)
            assert found in (old, new), where
            named = f"rank {faulty} is gone: its process has ended" in (survivor or "")
            assert survivor is None and found == new or named, where
            run(2, next_save, root)
            assert all(name.startswith("step-") for name in os.listdir(root)), where
        assert_one_commit(outcomes, old, new)


def K39_body(root):
    assert attempt(root, 5, 1.0, Fault("count"), {})[0] is None
    model, optimizer = filled(2.0)
    fault = Fault("fail", 1, errno.ENOSPC) if here.rank == 1 else Fault("count")
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: name == "write_at")):
        with pytest.raises(FSDPError, match="rank 1"):
            fsdp.save_checkpoint(root, model, optimizer, step=5)
    model, optimizer = filled(7.0)
    fsdp.load_checkpoint(root, model, optimizer, step=5)
    return sorted(os.listdir(root))


def test_K39_saving_over_an_existing_step(tmp_path):
    assert run(2, K39_body, str(tmp_path)) == [["step-5"]] * 2
    assert values_in(tmp_path / "step-5") == {1.0}


class NoExchange(FaultyFileSystem):
    """A file system that cannot swap two names."""

    def exchange(self, one, other):
        raise OSError(errno.ENOSYS, "no exchange", one)


def test_K39_where_names_cannot_be_exchanged(tmp_path):
    good, root = str(tmp_path / "good"), str(tmp_path / "run")
    attempt(good, 5, 1.0, Fault("count"), {})
    count = None
    for kind in ("crash_before", "crash_after"):
        for n in range(1, 80):
            start_from(good, root)
            model, optimizer = filled(2.0)
            with storage.using(NoExchange(Fault(kind, n, mock=True))) as fs:
                try:
                    fsdp.save_checkpoint(root, model, optimizer, step=5)
                except Crash:
                    crashed = True
                else:
                    crashed, count = False, fs.count
            if not crashed:
                break
            assert look(root) in ((5, 1.0), (5, 2.0)), (kind, n, fs.log[-1])
            with storage.using(NoExchange()):
                fsdp.save_checkpoint(root, *filled(3.0), step=6)
            assert sorted(os.listdir(root)) == ["step-5", "step-6"]
            assert values_in(Path(root) / "step-5") in ({1.0}, {2.0})
    assert count and look(root) == (5, 2.0)


def K45_held(root):
    """Step 20 is held in its writer when the process ends."""
    assert attempt(root, 10, 1.0, Fault("count"), {"keep": 1})[0] is None
    model, optimizer = filled(2.0)
    with storage.using(FaultyFileSystem(Fault("slow", 1, 1.0), only=lambda name, path: name == "write_at")):
        fsdp.save_checkpoint(root, model, optimizer, step=20, keep=1, background=True)
    assert look(root) == (10, 1.0)  # on return the process is ended


def K45_resume(root):
    model, optimizer = filled(0.0)
    assert fsdp.load_checkpoint(root, model, optimizer).step == 10
    for value in (2.0, 2.5):
        assert attempt(root, 20, value, Fault("count"), {"keep": 1})[0] is None
        assert sorted(os.listdir(root)) == ["step-20"] and look(root) == (20, value)
    for broken in ({"keep": 1}, {"keep": 1, "background": True}):
        text, _ = attempt(root, 30, 3.0, Fault("fail", 12 if here.rank == 0 else 4, errno.EIO), broken)
        assert text is not None and look(root) == (20, 2.5)
    for keep in (0, -1):
        text, fs = attempt(root, 40, 4.0, Fault("count"), {"keep": keep})
        assert text is not None and "keep" in text and fs.count == 0
    assert all(handle.done for handle in background._untold)


@pytest.mark.parametrize("world_size", [1, 2])
def test_K45_retention_never_deletes_the_last_good_one(tmp_path, world_size):
    run(world_size, K45_held, str(tmp_path), fresh=True)
    assert look(str(tmp_path)) == (10, 1.0)
    run(world_size, K45_resume, str(tmp_path))


def test_keep_counts_published_steps(tmp_path):
    for step in (1, 2, 3, 7, 5):
        attempt(str(tmp_path), step, float(step), Fault("count"), {"keep": 2})
    assert [c.step for c in fsdp.list_checkpoints(tmp_path)] == [5, 7]
    attempt(str(tmp_path), 1, 1.0, Fault("count"), {"keep": 2})
    assert [c.step for c in fsdp.list_checkpoints(tmp_path)] == [1, 5, 7]  # saved last, and stays
