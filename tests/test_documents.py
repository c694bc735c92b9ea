"""What the documents show runs, and what they refer to is there."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import fsdplite as fsdp

from .recipe_module import recipe  # noqa: F401

REPOSITORY = Path(__file__).resolve().parent.parent


def code_blocks(document: str) -> list[tuple[str, str]]:
    """(heading, code) of each Python block of a document."""
    blocks = []
    for section in re.split(r"^#+ ", (REPOSITORY / document).read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        blocks += [(heading, code) for code in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)]
    return blocks


@pytest.fixture
def names(recipe: types.ModuleType) -> dict:
    """What the snippets take for granted: a small GPT, its block, data."""
    torch.manual_seed(0)
    rows = torch.randint(256, (3, 2, 9))
    size = recipe.SIZES["tiny"]
    return {
        "contextlib": contextlib, "torch": torch, "nn": torch.nn, "fsdp": fsdp, "Block": recipe.Block, "config": size,
        "GPT": lambda config=size: recipe.GPT(config, 8),
        "batches": lambda device=None, start=0: [(row[:, :-1], row[:, 1:]) for row in rows[start:]],
    }  # fmt: skip


def test_the_example_of_the_readme_runs(names: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = types.ModuleType("my_project")
    project.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "my_project", project)
    monkeypatch.chdir(tmp_path)
    ((_, code),) = code_blocks("README.md")
    twice(code, {}, "runs/a")


def test_the_whole_script_of_the_guide_resumes(names: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, code),) = (block for block in code_blocks("docs/training.md") if block[0] == WHOLE)
    first, second = twice(code, names, "runs/b")
    for one, other in zip(first["ema"].parameters(), second["ema"].parameters()):
        assert torch.equal(one.detach(), other.detach())
    assert first["scheduler"].state_dict() == second["scheduler"].state_dict()


def twice(code: str, names: dict, root: str) -> tuple[dict, dict]:
    """A script that saves each 1000 steps, run for three with a save after the second, and run again, which resumes."""
    assert "step % 1000" in code
    program = compile(code.replace("step % 1000", "step % 2"), root, "exec")
    torch.manual_seed(1)
    exec(program, first := dict(names))
    deadline = time.monotonic() + 30
    while fsdp.latest_step(root) is None and time.monotonic() < deadline:
        time.sleep(0.01)  # the save was in the background
    first_state = fsdp.full_state_dict(first["model"])
    torch.manual_seed(2)  # other weights, which the checkpoint replaces
    exec(program, second := dict(names))
    assert first["start"] == 0 and second["start"] == 2 and second["step"] == 3
    for name, value in fsdp.full_state_dict(second["model"]).items():
        torch.testing.assert_close(value, first_state[name], rtol=0, atol=0, msg=name)
    return first, second


# Blocks that need a model that is wrapped already, and those that need many GPUs.
ON_WRAPPED = {"The loop", "Accumulation", "fp16 and the loss scaler", "Parameters in full"}
NOT_HERE = {"Hybrid sharding"}
WHOLE = "A whole script"  # has a test of its own


@pytest.mark.parametrize("heading, code", [b for b in code_blocks("docs/training.md") if b[0] != WHOLE])
def test_the_snippets_of_the_guide_run(names: dict, heading: str, code: str) -> None:
    if heading in NOT_HERE:
        compile(code, heading, "exec")
        return
    model = names["model"] = names["GPT"]()
    names["policy"] = fsdp.by_class(names["Block"])
    if "batches:" in code:
        names["batches"] = names["batches"]()
    names["microbatches"] = names["batches"]() if callable(names["batches"]) else names["batches"]
    if heading in ON_WRAPPED:
        fsdp.fsdp_wrap(model, names["policy"], precision="fp16" if "fp16" in heading else None)
        names["optimizer"] = torch.optim.AdamW(model.parameters())
        x, y = names["microbatches"][0]
        loss = names["loss"] = model(x, y)
        if heading == "Parameters in full":
            loss.backward()
    exec(compile(code, heading, "exec"), names)


def test_every_error_is_documented() -> None:
    from fsdplite import errors

    text = (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8")
    names = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    assert len(names) > 8 and not [name for name in names if f"`{name}`" not in text and f"fsdp.{name}`" not in text]


def test_links_in_documents_lead_somewhere() -> None:
    documents = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    broken = [
        f"{document.relative_to(REPOSITORY)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert not broken, broken
