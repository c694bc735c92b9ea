"""What the tests of `fsdplite ckpt` share: the command, checkpoints to run it on, and ways to damage them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.cli import main
from tests.harness import MLP, here, seeded

from .parts import filled, take_steps

Ckpt = Callable[..., Any]


@pytest.fixture
def ckpt(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Ckpt:
    """Runs a command; returns its text, or with --json what it printed, and checks the exit code."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: Any, code: int = 0) -> Any:
        found = main(["ckpt", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert found == code, f"exit {found}\n{out}\n{err}"
        assert "\x1b" not in out + err and "Traceback" not in err
        if "--json" not in arguments:
            assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line), out
        if code == 2:
            return err
        return json.loads(out) if "--json" in arguments else out + err

    return call


def save_trained(root: str, steps: int, stage: int = 3, per_rank: bool = False) -> None:
    model = fsdp.fsdp_wrap(seeded(MLP), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    take_steps(model, optimizer, range(steps))
    own = {"rank": here.rank, "noise": torch.arange(3 + here.rank)} if per_rank else None
    extra = {"[red]loss": 1.5, "best": (1, float("inf")), "text": "\x1b[31mred", "t": torch.arange(4)}
    fsdp.save_checkpoint(root, model, optimizer, step=steps, extra=extra, per_rank=own)


def save_filled(root: str, step: int, value: float, n: int = 11) -> None:
    model, optimizer = filled(value, n)
    fsdp.save_checkpoint(root, model, optimizer, step=step)


def save_plain(root: Any, step: int = 1, *, extra: Any = None, **tensors: Any) -> Path:
    """A module that holds these tensors, saved as a world of one."""
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return Path(fsdp.save_checkpoint(str(root), model, step=step, extra=extra).path)


def reseal(folder: Path, change: Callable[[dict], Any], number: str = "777") -> None:
    """Change a manifest and give it the checksum that fits, as docs/checkpoints.md says. `number` replaces 777."""
    body = json.loads((folder / "manifest.json").read_text())
    change(body)
    body.pop("crc32")
    text = '{"crc32": "00000000", ' + json.dumps(body)[1:].replace("777", number)
    checksum = f"{zlib.crc32(text.encode()):08x}"
    (folder / "manifest.json").write_text(text.replace("00000000", checksum, 1))


def flip(path: Path, index: int) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 16
    path.write_bytes(data)


def data_place(path: Path, name: str) -> int:
    """Where a tensor's bytes begin in a file."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    return begin + json.loads(raw[8:begin])[name]["data_offsets"][0]
