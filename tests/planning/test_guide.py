"""What docs/planning.md shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fsdplite as fsdp
from fsdplite.parity import check_parity
from tests.planning.models import GPT, Block

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def test_the_snippets_of_the_guide_run() -> None:
    def build(config: object = None) -> GPT:
        return GPT(2, 16, 64, 8, tied=True)

    tokens = torch.zeros(4, 8, dtype=torch.long)
    names = {"torch": torch, "fsdp": fsdp, "GPT": build, "Block": Block, "config": None, "batch": tokens, "trace": None}
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    for code in blocks:
        names["model"] = build()
        if "compare" in code:  # wrapped as planned
            fsdp.fsdp_wrap(names["model"], fsdp.by_class(Block), precision="bf16")
            names["plan"] = names["plan"].but(world_size=1)
            names["train_one_step"] = lambda: names["model"](tokens).backward()
        exec(compile(code, str(GUIDE), "exec"), names)
    target = names["build"]  # what the guide calls a target serves both commands
    assert fsdp.plan(target, world_size=2, device="cpu").has_activations
    assert check_parity(target, steps=1).passed
