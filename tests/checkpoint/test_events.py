"""Saves and loads tell a trace how far they are."""

from __future__ import annotations

import fsdplite as fsdp
from fsdplite.events import Event
from tests.harness import here, run

from .parts import filled


def body(root: str) -> None:
    numel = 8 // here.world_size
    expected = 3 * 4 * numel  # one fp32 parameter and two moments, this rank's part of each
    model, optimizer = filled(1.0)
    heard: list[Event] = []
    for background in (False, True):
        heard.clear()
        with fsdp.trace(model, on_event=heard.append) as trace:
            fsdp.save_checkpoint(root, model, optimizer, step=int(background), background=background).wait()
        assert trace.events == heard
        assert [(e.kind, e.bytes) for e in heard if e.kind == "save"] == [("save", expected)]
        assert sum(e.bytes for e in heard if e.kind == "written") == expected
    heard.clear()
    with fsdp.trace(model, on_event=heard.append) as trace:
        fsdp.load_checkpoint(root, model, optimizer)
    assert [(e.kind, e.bytes) for e in heard if e.kind == "load"] == [("load", expected)]
    assert sum(e.bytes for e in heard if e.kind == "read") == expected
    assert f"begins to read {expected} B of a checkpoint" in str(trace)


def test_a_trace_hears_how_far_saves_and_loads_are(tmp_path):
    run(1, body, str(tmp_path / "one"))
    run(2, body, str(tmp_path / "two"))
