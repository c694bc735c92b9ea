"""What docs/memory.md shows runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import torch

import fsdplite as fsdp
from tests.harness import assert_rested, run
from tests.memory.parts import Layer, Net, train

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


class Block(Layer):
    """The name that the guide's policy has."""


def net() -> torch.nn.Module:
    model = Net(4)
    for layer in model.layers:
        layer.__class__ = Block
    return model


def snippets_body(folder: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    wrapped = 0
    for code in blocks:
        assert ("nvme" in code) == ("/mnt/nvme0/run7" in code)
        names: dict[str, Any] = {"torch": torch, "fsdp": fsdp, "policy": fsdp.by_class(Block)}
        statements = ast.parse(code.replace("/mnt/nvme0/run7", folder)).body
        for number, statement in enumerate(statements):  # each wrap shows another way, and wants a model of its own
            is_wrap = "fsdp_wrap" in ast.unparse(statement)
            if is_wrap:
                names["model"] = net()
            exec(compile(ast.Module([statement], []), str(GUIDE), "exec"), names)
            if is_wrap and (number + 1 == len(statements) or "fsdp_wrap" in ast.unparse(statements[number + 1])):
                names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
            if "optimizer" in names:
                train(names["model"], names["optimizer"], range(2))
                assert_rested(names["model"])
                names.pop("optimizer")
                wrapped += 1
    assert wrapped == 5


def test_the_snippets_of_the_guide_run(tmp_path: Path) -> None:
    run(1, snippets_body, str(tmp_path))
