"""A program looks at a root while another saves into it, removes older steps, or saves a step again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import fsdplite as fsdp
from fsdplite.checkpoint import storage
from fsdplite.checkpoint.storage import FileSystem
from tests.checkpoint.parts import filled
from tests.harness import expect_loud


class Meanwhile(FileSystem):
    """Calls `what` once: after the first listing of `name`, or before it is first opened."""

    def __init__(self, name: str, what: Callable[[], object]) -> None:
        self._name = name
        self._what: Callable[[], object] | None = what

    def _now(self, path: str) -> None:
        if path.endswith(self._name) and self._what is not None:
            what, self._what = self._what, None
            with storage.using(FileSystem()):
                what()

    def list(self, path: str) -> list[str]:
        names = super().list(path)
        self._now(path)
        return names

    def open(self, path: str) -> storage.File:
        self._now(path)
        return super().open(path)


def save(root: Path, step: int, value: float, keep: int | None = None) -> nn.Module:
    model, optimizer = filled(value, wrap=False)
    fsdp.save_checkpoint(root, model, optimizer, step=step, keep=keep)
    return model


def test_there_is_always_a_latest_step(tmp_path: Path) -> None:
    root = tmp_path / "root"
    model = save(root, 1, 1.0)
    with storage.using(Meanwhile("root", lambda: save(root, 2, 2.0, keep=1))):
        assert fsdp.latest_step(root) == 2
    with storage.using(Meanwhile("root", lambda: save(root, 3, 3.0, keep=1))):
        assert fsdp.load_checkpoint(root, model).step == 3


@pytest.mark.parametrize("again, said", [(True, "was saved again while it was read"), (False, "was removed")])
def test_a_step_that_changes_while_it_is_read_is_not_called_damaged(tmp_path: Path, again: bool, said: str) -> None:
    model = save(tmp_path, 1, 1.0)
    step = tmp_path / "step-1"

    def change() -> None:
        save(tmp_path, 1 if again else 2, 2.0, keep=1)

    with storage.using(Meanwhile("rank-0-of-1.safetensors", change)):
        expect_loud(lambda: fsdp.load_checkpoint(tmp_path, model, step=1), "step 1 " + said)
    save(tmp_path, 1, 1.0)
    with storage.using(Meanwhile("rank-0-of-1.safetensors", change)):
        (problem,) = fsdp.verify_checkpoint(step).problems
    assert said in str(problem)
