"""Every warning points at a line of the user's program."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdplite as fsdp
from fsdplite.offload import files


class Layers(nn.Module):
    """Four layers, called from here."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def an_entry_without_a_match(_: Any) -> None:
    fsdp.fsdp_wrap(Layers(), fsdp.by_class("Sequential", "Decoder"))


def one_unit(_: Any) -> None:
    fsdp.fsdp_wrap(Layers())


def sixteen_bits(_: Any) -> None:
    fsdp.fsdp_wrap(Layers(torch.bfloat16), fsdp.by_class("Sequential"))


def a_budget_that_cannot_be_met(_: Any) -> None:
    model = fsdp.fsdp_wrap(Layers(), fsdp.by_class("Sequential"), recompute=fsdp.recompute_within(1))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def a_plain_optimizer(_: Any) -> None:
    offload = fsdp.Offload(optimizer="cpu")
    model = fsdp.fsdp_wrap(Layers(), fsdp.by_class("Sequential"), offload=offload)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def files_of_a_dead_process(folder: Any) -> None:
    offload = fsdp.Offload(optimizer="nvme", path=str(folder))
    model = fsdp.fsdp_wrap(Layers(), fsdp.by_class("Sequential"), offload=offload)
    fsdp.offloaded(torch.optim.AdamW, model).close()


@pytest.mark.parametrize(
    "program, text",
    [(an_entry_without_a_match, "Decoder"), (one_unit, "one unit"), (sixteen_bits, "16 bits"),
     (a_budget_that_cannot_be_met, "budget"), (a_plain_optimizer, "fsdp.offloaded"),
     (files_of_a_dead_process, "ended without removing")],
)  # fmt: skip
def test_a_warning_names_the_line_that_caused_it(
    program: Callable[[Any], None], text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = files.Leftover(os.path.join(tmp_path, "state"), 4096, "process 1 (rank 0)")
    monkeypatch.setattr(files, "leftovers", lambda folder: [left])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(tmp_path)
    found = [warning for warning in caught if text in str(warning.message)]
    assert found and all(warning.filename == __file__ for warning in found), [(w.filename, w.lineno) for w in caught]
