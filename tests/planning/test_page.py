"""The HTML report: well formed, self-contained, and holding what was asked for."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.cli import main
from tests.planning.models import GPT, Block

TOKENS = torch.zeros(2, 16, dtype=torch.long)


def parsed(page: str) -> ElementTree.Element:
    """The page as XML: every element that is opened is closed, every name escaped."""
    assert page.startswith("<!doctype html>\n")
    return ElementTree.fromstring(page.partition("\n")[2])


def test_everything_on_one_page() -> None:
    model = GPT(3, 32, 64, 16, tied=True)
    plan = fsdp.plan(model, world_size=1, policy=fsdp.by_class(Block), inputs=TOKENS, device="cpu")
    fsdp.fsdp_wrap(model, fsdp.by_class(Block))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()

    comparison = plan.compare(model, step)
    with fsdp.trace(model) as trace:
        step()
    page = plan.to_html(
        timeline=fsdp.simulate(plan.but(world_size=8, mesh=(1, 8))), comparison=comparison, trace=trace
    )
    root = parsed(page)
    headings = [heading.text for heading in root.iter("h2")]
    assert headings == ["Memory by phase", "Timeline", "Predicted and measured", "Units",
                        "On the wire, per step and rank", "Trace of a step"]  # fmt: skip
    memory, timeline = root.iter("svg")
    # A phase's bar is as long as its share of the peak.
    widths: dict[float, float] = {}
    for rect in memory.iter("rect"):
        widths[float(rect.get("y"))] = widths.get(float(rect.get("y")), 0.0) + float(rect.get("width"))
    shares = sorted(peak.bytes / plan.peak_bytes for peak in plan.peaks.values())
    for width, share in zip(sorted(widths.values()), shares):
        assert abs(width - 960 * share) < 1.5
    assert any("all-gather" in (title.text or "") for title in timeline.iter("title"))
    assert len(list(root.iter("table"))) == 4


def test_nothing_is_loaded_from_anywhere() -> None:
    page = fsdp.plan(nn.Linear(4, 4), world_size=2).to_html()
    parsed(page)
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=", page)


def test_names_are_escaped() -> None:
    model = nn.Sequential()
    model.add_module("<b>&\"'", nn.Linear(4, 4))
    plan = fsdp.plan(model, world_size=2, policy=fsdp.by_class("Linear"))
    cells = [cell.text for cell in parsed(plan.to_html()).iter("td")]
    assert "<b>&\"'" in cells


def test_the_command_writes_it(tmp_path: Path) -> None:
    target = ["plan", "tests.planning.test_command:build", "--world-size", "4", "--json", "--html"]
    assert main([*target, str(tmp_path / "plan.html")]) == 0
    headings = [h.text for h in parsed((tmp_path / "plan.html").read_text(encoding="utf-8")).iter("h2")]
    assert "Timeline" in headings
    assert main([*target, str(tmp_path / "absent" / "plan.html")]) == 2
