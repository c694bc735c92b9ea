"""Strangers in a root: what people, and other jobs, put where checkpoints are."""

from __future__ import annotations

import errno
import os
import stat
import warnings

import pytest

import fsdplite as fsdp
from fsdplite.checkpoint import background, storage
from fsdplite.checkpoint import save as saving
from fsdplite.errors import CheckpointError, ConfigError
from tests.harness import Vec, expect_loud

from .faults import Fault, FaultyFileSystem

LEFTOVER = ".step-7.0123456789abcdef.saving"


def save(root, step, value=None, **options):
    return fsdp.save_checkpoint(root, Vec(4, float(step if value is None else value)), step=step, **options)


def loaded(root, **options):
    model = Vec(4, -1.0)
    report = fsdp.load_checkpoint(root, model, **options)
    return report.step, set(model.w.tolist())


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_file_systems_that_do_not_flush_directories(tmp_path, monkeypatch, code):
    flush = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if code == errno.EIO:
        expect_loud(lambda: save(tmp_path, 5), "errno 5", str(tmp_path))
        return
    save(tmp_path, 5)
    assert loaded(tmp_path) == (5, {5.0})


def test_no_root_in_a_step(tmp_path):
    save(tmp_path, 5)
    for place in ("step-5", "step-5/run", "step-5/a/b"):
        needles = ("the directory of a checkpoint, of step 5", f"give the root, {tmp_path}")
        expect_loud(lambda: save(tmp_path / place, 6), *needles)
    save(tmp_path / "step-05" / "run", 6)  # the name of no step
    assert sorted(os.listdir(tmp_path / "step-5")) == ["manifest.json", "rank-0-of-1.safetensors"]


def test_folders_in_a_step_do_not_stop_later_saves(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    save(root, 5)
    fsdp.export_safetensors(root / "step-5", root / "step-5" / "hf")
    (root / "step-5" / "hf" / "link").symlink_to(elsewhere)
    save(root, 5, 6.0)
    assert os.listdir(root) == ["step-5"] and loaded(root) == (5, {6.0})
    (root / "step-5" / "deep" / "er").mkdir(parents=True)
    (root / "step-5" / "deep" / "er" / "x").write_text("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(root, 6, keep=1)
    assert os.listdir(root) == ["step-6"] and os.listdir(elsewhere) == ["mine"]


def test_what_looks_like_a_leftover(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    for kind in ("folder", "file", "link"):
        root = tmp_path / kind
        save(root, 3)
        if kind == "folder":
            (root / LEFTOVER / "sub").mkdir(parents=True)
            save(root, 4)
            assert sorted(os.listdir(root)) == ["step-3", "step-4"]
            continue
        if kind == "file":
            (root / LEFTOVER).write_text("mine")
        else:
            (root / LEFTOVER).symlink_to(elsewhere)
        with pytest.warns(UserWarning, match=LEFTOVER):
            save(root, 4)
        assert sorted(os.listdir(root)) == [LEFTOVER, "step-3", "step-4"] and loaded(root) == (4, {4.0})
    assert os.listdir(elsewhere) == ["mine"]


@pytest.mark.parametrize("step", [2**63, 10**30, -1, True, 1.0, "1"])
def test_a_step_that_no_reader_accepts_is_refused(tmp_path, step):
    root = tmp_path / "root"
    model = Vec(4, 1.0)
    expect_loud(lambda: fsdp.save_checkpoint(root, model, step=step, keep=1), "step", repr(step))
    assert not root.exists()


def test_the_largest_step(tmp_path):
    save(tmp_path, 2**63 - 1, 1.0)
    assert loaded(tmp_path) == (2**63 - 1, {1.0})


def test_a_manifest_that_no_reader_accepts_is_not_published(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(saving.time, "time", lambda: 2.0**40)  # some thirty thousand years from now
    expect_loud(lambda: save(tmp_path, 2, keep=1), "manifest", "created")
    assert os.listdir(tmp_path) == ["step-1"]


def make_manifest_folder(step):
    (step / "manifest.json").mkdir(parents=True)


def make_manifest_huge(step):
    step.mkdir()
    with open(step / "manifest.json", "w") as file:
        file.truncate(2**42)


def make_manifest_pipe(step):
    step.mkdir()
    os.mkfifo(step / "manifest.json")


def make_manifest_loop(step):
    step.mkdir()
    (step / "manifest.json").symlink_to("manifest.json")


def make_loop(step):
    step.symlink_to(step.name)


def make_device(step):
    step.symlink_to("/dev/zero")


def make_file(step):
    step.write_text("mine")


def make_dangling(step):
    step.symlink_to("nowhere")


FOLDERS = [make_manifest_folder, make_manifest_huge, make_manifest_pipe, make_manifest_loop]
OTHERS = [make_loop, make_device, make_file, make_dangling]


@pytest.mark.parametrize("make", FOLDERS + OTHERS)
def test_a_stranger_does_not_hide_the_steps(tmp_path, make):
    save(tmp_path, 3)
    try:
        make(tmp_path / "step-7")
    except OSError as problem:
        pytest.skip(f"needs a file system that can hold such a stranger: {problem}")
    assert fsdp.latest_step(tmp_path) == 3 and loaded(tmp_path) == (3, {3.0})
    expect_loud(lambda: fsdp.load_checkpoint(tmp_path, Vec(4, 0.0), step=7), "step 7", "not published")
    save(tmp_path, 4, keep=2)
    assert [c.step for c in fsdp.list_checkpoints(tmp_path)] == [3, 4]
    if make in OTHERS:
        with storage.using(FaultyFileSystem()) as fs:
            text = expect_loud(lambda: save(tmp_path, 7), "step-7 is a")
        assert str(tmp_path / "step-7") in text and fs.bytes_written == 0
        assert fsdp.latest_step(tmp_path) == 4 and sorted(os.listdir(tmp_path)) == ["step-3", "step-4", "step-7"]
    else:
        save(tmp_path, 7)
        assert loaded(tmp_path) == (7, {7.0}) and sorted(os.listdir(tmp_path)) == ["step-3", "step-4", "step-7"]


def test_a_step_that_cannot_be_read_is_not_passed_over(tmp_path):
    """Then a run would go on from an older one."""
    for step in (3, 7):
        save(tmp_path, step)
    fault = Fault("fail", 1, errno.EIO)
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: name == "open" and "step-7" in path)):
        text = expect_loud(lambda: fsdp.latest_step(tmp_path), "step-7")
    assert "errno" in text


def test_roots_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    calls = (fsdp.latest_step, fsdp.list_checkpoints, lambda root: loaded(root), lambda root: save(root, 1))
    for call in calls:
        for root, kind in ((None, ConfigError), (3, ConfigError), ("", ConfigError), ("a\0b", CheckpointError)):
            with pytest.raises(kind, match="path"):
                call(root)
        for root in (tmp_path / "loop", tmp_path / ("x" * 300)):
            with pytest.raises(CheckpointError, match=root.name):
                call(root)
    assert os.listdir(tmp_path) == ["loop"]


def test_a_fork_does_not_answer_for_a_save(tmp_path):
    with storage.using(FaultyFileSystem(Fault("slow", 1, 1.0), only=lambda name, path: name == "create")):
        handle = save(tmp_path, 1, background=True)
        child = os.fork()
        if child == 0:
            try:
                expect_loud(handle.wait, "forked")
                expect_loud(lambda: handle.done, "forked")
                assert "another process" in repr(handle)
                background.drain()
                os._exit(0)
            finally:
                os._exit(1)
        handle.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handle.done and loaded(tmp_path) == (1, {1.0})


class Meddler(FaultyFileSystem):
    """At the rename that publishes, once, something else happens first."""

    def __init__(self, before) -> None:
        super().__init__()
        self._before = before

    def rename(self, old, new):
        if self._before is not None and old.endswith(".saving"):
            before, self._before = self._before, None
            before(old)
        super().rename(old, new)


def test_another_job_leaves_a_save_in_flight_alone(tmp_path):
    save(tmp_path, 1)
    seen = []

    def other_job(staging):
        child = os.fork()
        if child == 0:
            try:
                with storage.using(storage.FileSystem()), warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    save(tmp_path, 11)
                os._exit(0 if "another save is writing it" in str(caught[0].message) else 2)
            finally:
                os._exit(1)
        seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with storage.using(Meddler(other_job)):
        save(tmp_path, 10)
    assert seen == [0] and [c.step for c in fsdp.list_checkpoints(tmp_path)] == [1, 10, 11]


@pytest.mark.parametrize("gone", ["manifest.json", "rank-0-of-1.safetensors"])
@pytest.mark.parametrize("step", [1, 2])
def test_what_was_taken_away_is_not_saved(tmp_path, gone, step):
    save(tmp_path, 1, 1.0)
    with storage.using(Meddler(lambda staging: os.unlink(os.path.join(staging, gone)))):
        expect_loud(lambda: save(tmp_path, step, 5.0, keep=1), f"step {step} is not saved", gone, "one job at a time")
    assert os.listdir(tmp_path) == ["step-1"] and loaded(tmp_path) == (1, {1.0})
