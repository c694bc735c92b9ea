"""What a newcomer forgets or swaps is an error, or a warning, that says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import fsdplite as fsdp
from fsdplite.errors import ConfigError


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank as torchrun starts it, which has joined nothing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_ranks_that_joined_no_group_do_not_wrap(second_of_two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ConfigError, match="WORLD_SIZE=2") as refused:
            fsdp.fsdp_wrap(model)
        assert "fsdp.init_distributed()" in refused.value.cure and refused.value.rank == int(rank)
        assert type(model) is nn.Linear and model.weight is weight
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    fsdp.fsdp_wrap(model)


def test_ranks_that_joined_no_group_do_not_save_over_each_other(
    second_of_two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain module: rank 0 may save it alone, and each rank may load it for itself."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="fsdp.init_distributed"):
        fsdp.save_checkpoint(tmp_path, model, step=1)
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    fsdp.save_checkpoint(tmp_path, model, step=1)
    monkeypatch.setenv("RANK", "1")
    assert fsdp.load_checkpoint(tmp_path, model).step == 1
