"""Values that arrive as what they were, or a refusal by name before anything is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdplite as fsdp


class Lazy(nn.Module):
    """Buffers whose memory holds other values than they have."""

    def __init__(self, *values: complex) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        number = torch.tensor(values, dtype=torch.complex64)
        self.register_buffer("conjugate", number.conj())
        self.register_buffer("negative", number.conj().imag)


def test_views_by_conj_are_stored_and_loaded_by_their_values(tmp_path):
    saved = Lazy(1 + 2j, 3 - 4j)
    assert saved.conjugate.is_conj() and saved.negative.is_neg()
    extra = {"c": saved.conjugate, "n": saved.negative}
    fsdp.save_checkpoint(tmp_path, saved, step=1, extra=extra, per_rank=extra)
    plain, lazy = Lazy(0, 0), Lazy(5 + 5j, 6 + 6j)
    plain.conjugate, plain.negative = torch.zeros(2, dtype=torch.complex64), torch.zeros(2)
    for model in (plain, lazy):
        report = fsdp.load_checkpoint(tmp_path, model)
        assert model.conjugate.tolist() == [1 - 2j, 3 + 4j]
        assert model.negative.tolist() == [-2, 4]
        for values in (report.extra, report.per_rank):
            assert values["c"].tolist() == [1 - 2j, 3 + 4j]
            assert values["n"].tolist() == [-2, 4]


@pytest.mark.parametrize("through", ["checkpoint", "safetensors"])
def test_a_load_between_forward_and_backward_is_noticed(tmp_path, through):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fsdp.save_checkpoint(tmp_path / "root", model, step=1)
    fsdp.export_safetensors(tmp_path / "root", tmp_path / "folder")
    loss = model(torch.ones(1, 2)).sum()
    if through == "checkpoint":
        fsdp.load_checkpoint(tmp_path / "root", model)
    else:
        fsdp.load_safetensors(model, tmp_path / "folder")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
