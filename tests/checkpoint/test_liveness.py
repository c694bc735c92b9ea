"""Whether a process has ended: asked of the system, never guessed from its silence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import fsdplite as fsdp
from fsdplite.checkpoint.agree import Agreement
from fsdplite.liveness import has_ended, identity
from tests.checkpoint.parts import filled
from tests.harness import expect_loud, here, run, run_together

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: elsewhere nobody is known to have ended")
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("liveness", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.identity(), flush=True)
sys.stdin.read()
"""


def test_a_process_that_ended():
    from fsdplite import liveness

    arguments = [sys.executable, "-c", PROGRAM, liveness.__file__]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    who = child.stdout.readline().strip()
    assert who.split()[1] == str(child.pid) and not has_ended(who)
    child.kill()
    child.stdout.read()  # it is over, and nobody has asked for its exit code
    while not has_ended(who):
        pass
    child.communicate()
    assert has_ended(who), "nor is it there after somebody has"


def test_who_is_alive_or_cannot_be_known():
    place, pid, started = identity().rsplit(" ", 2)
    assert not has_ended(identity())
    assert has_ended(f"{place} {pid} {int(started) + 1}"), "its number belongs to another process now"
    assert has_ended(f"{place} {2**22 + 1} 1"), "there are no such numbers"
    for elsewhere in ("", f"elsewhere/{place} {pid} {int(started) + 1}", f"{place[:-2]}x {pid} 1"):
        assert not has_ended(elsewhere)


def never_arrives(root, call):
    model, optimizer = filled(1.0)
    if call != "first save":
        fsdp.save_checkpoint(root, model, optimizer, step=1)
    if here.rank == 1:
        os._exit(0)
    calls = {
        "first save": lambda: fsdp.save_checkpoint(root, model, optimizer, step=1),
        "save": lambda: fsdp.save_checkpoint(root, model, optimizer, step=2),
        "background": lambda: fsdp.save_checkpoint(root, model, optimizer, step=2, background=True).wait(),
        "load": lambda: fsdp.load_checkpoint(root, model, optimizer),
    }
    return expect_loud(calls[call], "rank 1 is gone: its process has ended")


@pytest.mark.slow
def test_a_rank_that_died_before_the_call_is_named_without_waiting_for_the_timeout(tmp_path):
    kinds = ["first save", "save", "background", "load"]
    calls = [((str(tmp_path / kind), kind), {1}) for kind in kinds]
    for kind, texts in zip(kinds, run_together(3, never_arrives, calls, pg_timeout_s=60)):
        assert texts[0] == texts[2]
        assert fsdp.latest_step(tmp_path / kind) == (None if kind == "first save" else 1), kind


def dies_at_the_end(root):
    model, optimizer = filled(1.0)
    fsdp.save_checkpoint(root, model, optimizer, step=1)
    if here.rank == 1:
        Agreement._leave = lambda self, *, hurry: os._exit(0)
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=3), "rank 1 is gone: its process has ended")


def test_a_rank_that_dies_when_all_is_published_is_not_waited_for(tmp_path):
    run(2, dies_at_the_end, str(tmp_path), fresh=True, pg_timeout_s=60, timeout_s=20, absent={1})
    assert fsdp.latest_step(tmp_path) == 2


def test_a_process_may_have_any_name():
    with open("/proc/self/comm", "rb") as file:
        before = file.read().strip()
    try:
        with open("/proc/self/comm", "wb") as file:
            file.write(b"\xff) Z 1")
        assert not has_ended(identity()) and identity().split()[1] == str(os.getpid())
    finally:
        with open("/proc/self/comm", "wb") as file:
            file.write(before)
