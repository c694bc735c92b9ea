"""A rank that waits for long says so, and goes on."""

from __future__ import annotations

import contextlib
import io
import time

import pytest

import fsdplite as fsdp
from fsdplite import patience
from tests.harness import Vec, here, run


def one_rank_is_late() -> str:
    model = fsdp.fsdp_wrap(Vec(4, 1.0))
    model(1.0).backward()
    patience._PATIENCE_S, patience._LOOK_S, patience._patience = 0.2, 0.02, None
    if here.rank == here.world_size - 1:
        time.sleep(1.0)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model(1.0).backward()
    return said.getvalue()


@pytest.mark.parametrize("world_size", [2, 4])
def test_long_waits_are_told_by_two_ranks_at_most(world_size: int) -> None:
    told = run(world_size, one_rank_is_late, fresh=True)
    late = world_size - 1
    for rank, text in enumerate(told):
        assert text.count("has waited for 0.2 s in") == (rank < 2 and rank != late), told
    assert told[0].startswith("fsdplite: rank 0 has waited") and "forward" in told[0] and "in step 1" in told[0]
