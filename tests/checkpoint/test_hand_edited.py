"""Manifests that somebody has edited and given a right checksum: what contradicts itself, or the model, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from tests.harness import gather, run, seeded

from .ckpt import reseal


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 5)
        self.body = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def trained():
    model = fsdp.fsdp_wrap(seeded(Tied))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return model, optimizer


def save(root):
    model, optimizer = trained()
    fsdp.save_checkpoint(root, model, optimizer, step=1)


def refused(root):
    model, optimizer = trained()
    before = {name: value.clone() for name, value in gather(model).items()}
    with pytest.raises(fsdp.CheckpointError) as caught:
        fsdp.load_checkpoint(root, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in gather(model).items())
    return str(caught.value)


def other_tie(body):
    body["aliases"]["head.weight"] = "body.weight"


def half_a_state(body):
    """The moment's elements in the second file vanish, and its shape says so."""
    record = body["tensors"]["optimizer/embed.weight/exp_avg"]
    record["ranges"] = record["ranges"][:1]
    record["numel"] = record["ranges"][0][2]
    record["shape"] = [record["numel"]]


def swapped_shape(body):
    for name in ("embed.weight", "body.weight"):
        body["tensors"][f"optimizer/{name}/exp_avg"]["shape"] = [25, 1]


@pytest.mark.parametrize(
    "change, says",
    [(other_tie, "'head.weight' is 'embed.weight' in the model, and 'body.weight' in the checkpoint"),
     (half_a_state, "no published checkpoint"), (swapped_shape, "no published checkpoint")],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_a_load(tmp_path: Path, change, says):
    run(2, save, str(tmp_path))
    reseal(tmp_path / "step-1", change)
    texts = run(2, refused, str(tmp_path / "step-1"))
    assert texts[0] == texts[1] and says in texts[0], texts[0]
    if change is not other_tie:
        problems = fsdp.verify_checkpoint(tmp_path / "step-1").problems
        assert "is not the state of a parameter" in str(problems[0]), problems


def test_fields_of_somebody_else_are_left_alone(tmp_path: Path):
    run(2, save, str(tmp_path))
    reseal(tmp_path / "step-1", lambda body: (body.update(note=[1]), body["files"][0].update(note=1)))
    assert fsdp.verify_checkpoint(tmp_path).ok
    fsdp.load_checkpoint(tmp_path, Tied())
