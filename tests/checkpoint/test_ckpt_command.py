"""`fsdplite ckpt`: what it lists, shows, checks, compares and exports."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fsdplite as fsdp
from fsdplite.cli import main
from tests.harness import run

from .ckpt import Ckpt, ckpt, data_place, flip, reseal, save_filled, save_plain, save_trained  # noqa: F401
from .parts import same_bits
from .reader import manifest_of, read

# ---------------------------------------------------------------------- ls


def test_ls_says_what_counts_and_why_the_rest_does_not(tmp_path: Path, ckpt: Ckpt) -> None:
    for step in (9, 10, 100):
        run(2, save_filled, str(tmp_path), step, 1.0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-12").mkdir()
    shutil.copytree(tmp_path / "step-100", tmp_path / "step-0200")
    shutil.copytree(tmp_path / "step-100", tmp_path / "step-300")
    shutil.copytree(tmp_path / "step-100", tmp_path / ".step-400.0123456789abcdef.saving")
    shutil.copytree(tmp_path / "step-9", tmp_path / "step-11")
    reseal(tmp_path / "step-11", lambda body: body.update(step=11))
    (tmp_path / "step-11" / "rank-1-of-2.safetensors").unlink()
    found = ckpt("ls", tmp_path, "--json", code=1)
    assert found["latest"] == 100 == fsdp.latest_step(tmp_path)
    entries = {entry["name"]: entry for entry in found["entries"]}
    assert [name for name, e in entries.items() if e["state"] == "published"] == ["step-9", "step-10", "step-100"]
    entry, size = entries["step-9"], sum(p.stat().st_size for p in (tmp_path / "step-9").glob("rank-*"))
    assert (entry["world_size"], entry["total_bytes"], entry["dtypes"], entry["tensor_count"]) == (2, size, ["F32"], 3)
    assert entry["created"] == manifest_of(tmp_path / "step-9")["created"]
    states = {name: (e["state"], e["why"]) for name, e in entries.items() if e["state"] != "published"}
    assert states["step-11"] == ("incomplete", "rank-1-of-2.safetensors is missing")
    assert "no manifest" in states["step-12"][1] and states["step-300"][1] == "its manifest is of step 100"
    assert states["step-0200"][0] == states["notes"][0] == "stranger" and "zeros" in states["step-0200"][1]
    assert states[".step-400.0123456789abcdef.saving"][0] == "leftover" and len(states) == 6
    text = ckpt("ls", tmp_path, code=1)
    (line,) = [line for line in text.splitlines() if "latest" in line and line.split()[0] == "100"]
    assert "F32" in line and "notes" in text and "is not named step-<n>" in text


def test_a_version_set_aside_counts(tmp_path: Path, ckpt: Ckpt) -> None:
    root = tmp_path / "run"
    save_plain(root, 3, w=torch.ones(3))
    (root / "step-3").rename(root / ".step-3.0123456789abcdef.replaced")
    (entry,) = ckpt("ls", root, "--json")["entries"]
    assert entry["state"] == "published" and "set aside" in entry["why"] and fsdp.latest_step(root) == 3
    assert ckpt("prune", root, "--keep", 1, "--leftovers", "--yes", "--json")["entries"][0]["action"] == "keep"
    shutil.copytree(save_plain(tmp_path / "other", 3, w=torch.ones(3)), root / "step-3")
    assert [e["state"] for e in ckpt("ls", root, "--json")["entries"]] == ["published", "leftover"]
    shutil.rmtree(root / "step-3")
    (root / ".step-3.0123456789abcdef.replaced" / "rank-0-of-1.safetensors").unlink()
    (entry,) = ckpt("ls", root, "--json", code=1)["entries"]
    assert entry["state"] == "incomplete" and "the only one of its step" in entry["why"]
    assert ckpt("prune", root, "--keep", 1, "--leftovers", "--yes", "--json")["entries"] == []


@pytest.mark.parametrize(
    "arguments, needle",
    [
        (["ls", "nothing"], "cure: give the root"),
        (["ls", "run/step-1"], "/run, the directory above it"),
        (["ls", "run/latest"], "/run: its latest step, 1,"),
        (["inspect", "run/step-2"], "/run are 1"),
        (["inspect", "nothing"], "no directory"),
        (["inspect", "run/step-1/manifest.json"], "is a file"),
        (["inspect", "run/step-1", "--step", "1"], "leave --step out"),
        (["verify", "run", "--all-steps", "--step", "1"], "exclude"),
        (["export", "run", "run/step-1/out"], "inside the checkpoint"),
        (["export", "run", "out", "--dtype", "int8"], "invalid choice"),
        (["export", "run", "out", "--max-shard-bytes", "many"], "500MB"),
        (["export", "run", "memory://out"], "written to a directory"),
        (["prune", "run"], "--keep"),
        (["prune", "run", "--keep", "0"], "at least 1"),
        (["prune", "run", "--keep", "1", "--yes", "--dry-run"], "not allowed with"),
        (["diff", "run"], "required: B"),
        (["ls", "nosuchprotocol://x"], "cannot be reached"),
        (["lsx"], "invalid choice"),
    ],
)
def test_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ckpt: Ckpt, arguments: list[str], needle: str
) -> None:
    save_plain(tmp_path / "run", w=torch.ones(2))
    monkeypatch.chdir(tmp_path)
    assert needle in ckpt(*arguments, code=2)
    assert not (tmp_path / "out").exists() and fsdp.latest_step("run") == 1


def test_a_parent_of_roots_names_them(tmp_path: Path, ckpt: Ckpt) -> None:
    for name in ("a", "b"):
        save_plain(tmp_path / name, w=torch.ones(2))
    (tmp_path / "notes").mkdir()
    whys = {entry["name"]: entry["why"] for entry in ckpt("ls", tmp_path, "--json")["entries"]}
    assert whys["notes"] == "is not named step-<n>"
    assert all(whys[name] == f"a root of checkpoints itself: give {tmp_path / name}" for name in ("a", "b"))
    assert f"give {tmp_path / 'a'} or {tmp_path / 'b'}" in ckpt("inspect", tmp_path, code=1)
    assert f"there are {tmp_path / 'a'} or {tmp_path / 'b'}" in ckpt("inspect", tmp_path / "c", code=2)


def test_a_step_that_is_not_there(tmp_path: Path, ckpt: Ckpt) -> None:
    save_plain(tmp_path, w=torch.ones(2))
    assert "step 7 is not published" in ckpt("inspect", tmp_path, "--step", 7, code=1)
    assert "not published" in ckpt("verify", tmp_path, "--step", 7, "--json", code=1)["error"]
    (tmp_path / "empty").mkdir()
    assert "no published checkpoint" in ckpt("verify", tmp_path / "empty", code=1)
    assert ckpt("ls", tmp_path / "empty", "--json")["latest"] is None


# ---------------------------------------------------------------------- inspect


def test_inspect_tells_what_the_manifest_says(tmp_path: Path, ckpt: Ckpt) -> None:
    run(3, save_trained, str(tmp_path), 2, per_rank=True)
    folder = tmp_path / "step-2"
    manifest = manifest_of(folder)
    found = ckpt("inspect", tmp_path, "--json")
    assert (found["step"], found["world_size"], found["path"]) == (2, 3, str(folder))
    for name, record in manifest["tensors"].items():
        shown = found["tensors"].pop(name)
        assert [[r["file"], r["first"], r["count"]] for r in shown["ranges"]] == record["ranges"]
        assert all(shown[key] == record[key] for key in ("dtype", "shape", "kind", "numel"))
    assert not found["tensors"] and found["optimizer"] == manifest["optimizer"] and found["extra"] == manifest["extra"]
    for rank in range(3):
        own = found["per_rank"][str(rank)]
        assert own["value"]["rank"] == rank and list(own["tensors"].values()) == [{"dtype": "I64", "shape": [3 + rank]}]
    text = ckpt("inspect", folder)
    for needle in ("0.weight", "5x7", "F64", "AdamW", "weight_decay: 0.01", "betas: (0.9, 0.999)", "(1, inf)",
                   "[red]loss", r"\x1b[31mred", "<tensor 'extra/0' of I64, 4>", "{'rank': 2, "):  # fmt: skip
        assert needle in text, needle
    assert [line.split() for line in text.splitlines() if line.startswith("step ")][-1] == ["step", "2", "4"]
    text = ckpt("inspect", folder, "--ranges", "--match", "0.w*")
    first, *others = [f"{file}: {start} + {count}" for file, start, count in manifest["tensors"]["0.weight"]["ranges"]]
    assert others and all(part in text for part in (first, *others)) and "1 of 16 tensors" in text


def test_many_tensors_and_long_names(tmp_path: Path, ckpt: Ckpt) -> None:
    names = {f"layer_{i}_" + "x" * 90: torch.ones(i + 1) for i in range(50)}
    folder = save_plain(tmp_path, **names)
    text = ckpt("inspect", folder)
    assert "and 10 more tensors; --all shows them" in text and "layer_40_" not in text
    text = ckpt("inspect", folder, "--all")
    assert "layer_49_" in text and "more tensors" not in text


# ---------------------------------------------------------------------- verify


def test_verify_names_the_chunk(tmp_path: Path, ckpt: Ckpt) -> None:
    run(2, save_filled, str(tmp_path), 1, 1.0, 40_000)
    run(2, save_filled, str(tmp_path), 2, 1.0, 40_000)
    assert ckpt("verify", tmp_path, "--json")["ok"] and "intact" in ckpt("verify", tmp_path, "--all-steps")
    path = tmp_path / "step-1" / "rank-1-of-2.safetensors"
    flip(path, data_place(path, "optimizer/w/exp_avg") + 30_000)  # element 7,500 of this part, in its chunk 1
    assert ckpt("verify", tmp_path, "--json")["ok"], "the latest is step 2"
    found = ckpt("verify", tmp_path, "--all-steps", "--json", code=1)
    assert [c["ok"] for c in found["checkpoints"]] == [False, True]
    (problem,) = found["checkpoints"][0]["problems"]
    assert problem["file"] == path.name and problem["tensor"] == "optimizer/w/exp_avg"
    first = 20_000 + 24 * 1024 // 4
    assert (problem["first"], problem["count"]) == (first, 24 * 1024 // 4)
    text = ckpt("verify", tmp_path, "--step", 1, code=1)
    assert "1 problem" in text and f"{first} to {first + 6144}" in text
    assert "chunk 1 is damaged" in " ".join(text.split())


def test_progress_is_for_terminals(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_plain(tmp_path, w=torch.ones(2))
    assert main(["ckpt", "verify", str(folder)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["ckpt", "verify", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] and "reading step-1" in err


# ---------------------------------------------------------------------- diff


def test_equal_at_other_world_sizes_and_stages(tmp_path: Path, ckpt: Ckpt) -> None:
    for world_size, stage in ((1, 3), (2, 0), (3, 3), (3, 1)):
        run(world_size, save_trained, str(tmp_path / f"{world_size}{stage}"), 0, stage)
    for other in ("20", "33", "31"):
        found = ckpt("diff", tmp_path / "13", tmp_path / other, "--json")
        assert found["equal"] and found["tensors_equal"] == found["tensors_compared"] == 5
    assert "5 of 5 tensors in both are equal, bit for bit; nothing else differs" in ckpt(
        "diff", tmp_path / "13", tmp_path / "33"
    )
    run(2, save_trained, str(tmp_path / "own"), 0, per_rank=True)
    assert "per_rank/1  only in B" in ckpt("diff", tmp_path / "13", tmp_path / "own", code=1)
    assert ckpt("diff", tmp_path / "13", tmp_path / "own", "--ignore", "per_rank/*", "--json")["equal"]


def test_trained_further(tmp_path: Path, ckpt: Ckpt) -> None:
    run(2, save_trained, str(tmp_path / "a"), 1)
    run(3, save_trained, str(tmp_path / "b"), 3)
    a, b = read(tmp_path / "a" / "step-1"), read(tmp_path / "b" / "step-3")
    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json", code=1)
    values = {d["name"]: d["details"] for d in found["differences"] if d["kind"] == "values"}
    assert set(values) == {name for name in a if not torch.equal(a[name], b[name])} and len(values) == 12
    for name, details in values.items():
        assert details["differing"] == int((a[name] != b[name]).sum())
        assert details["largest_difference"] == float((a[name] - b[name]).abs().max())
        assert details["first"] == int((a[name] != b[name]).reshape(-1).nonzero()[0])
    texts = {d["name"]: d["what"] for d in found["differences"] if d["kind"] == "setting"}
    assert texts == {f"optimizer/{n}/step": "1 in A, 3 in B" for n in ("0.weight", "0.bias", "2.weight", "2.bias")}
    rows = ckpt("diff", tmp_path / "a", tmp_path / "b", code=1).partition("difference\n")[2].splitlines()
    assert " ".join(rows[0].split()) == "optimizer/*/step 1 in A, 3 in B, for 4 parameters"
    assert {row.split()[0] for row in rows[1:5]} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "optimizer/0.bias/step" in ckpt("diff", tmp_path / "a", tmp_path / "b", "--all", code=1)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def test_largest_difference_of_every_dtype(tmp_path: Path, ckpt: Ckpt) -> None:
    torch.manual_seed(0)
    one, two = {}, {}
    for dtype in DTYPES:
        name = str(dtype)[6:].upper()
        one[name], two[name] = (torch.randn(5000).to(dtype) for _ in range(2))
        two[name][:100] = one[name][:100]
    one["ints"], two["ints"] = torch.arange(300), torch.arange(300)
    two["ints"][[7, 299]] = -1
    large = torch.randn(2_000_003)  # 8 MB, three blocks
    one["large"], two["large"] = large, large.clone()
    two["large"][1_999_999] += 2.0
    for tensors, changed in ((one, 0.0), (two, 1.0)):
        tensors["special"] = torch.tensor([float("inf"), float("nan"), changed, float("-inf"), 5.0])
    two["special"][4] = float("inf")
    one["zero"], two["zero"] = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    a, b = save_plain(tmp_path / "a", **one), save_plain(tmp_path / "b", **two)
    found = ckpt("diff", a, b, "--json", code=1)
    details = {d["name"]: d["details"] for d in found["differences"]}
    for dtype in DTYPES:
        name = str(dtype)[6:].upper()
        x, y = one[name].double(), two[name].double()
        assert details[name]["largest_difference"] == float((x - y).abs().max()), name
        bits = one[name].view(torch.uint8).view(5000, -1) != two[name].view(torch.uint8).view(5000, -1)
        assert details[name]["differing"] == int(bits.any(1).sum())
        assert details[name]["first"] == int(bits.any(1).nonzero()[0]) >= 100
    assert [details["ints"][key] for key in ("differing", "first", "largest_difference")] == [2, 7, None]
    expected = float((two["large"].double() - large.double()).abs().max())
    assert details["large"] == {"numel": 2_000_003, "differing": 1, "first": 1_999_999,
                                "largest_difference": expected, "not_finite": 0}  # fmt: skip
    assert details["special"] == {"numel": 5, "differing": 2, "first": 2, "largest_difference": 1.0, "not_finite": 1}
    assert (details["zero"]["differing"], details["zero"]["largest_difference"]) == (1, 0.0)
    assert "1999999" in ckpt("diff", a, b, "--bits", "--json", code=1)["differences"][-3]["what"]
    assert ckpt("diff", a, a, "--json")["equal"]
    rows = [line.split()[0] for line in ckpt("diff", a, b, code=1).splitlines() if " differ, first" in line]
    assert rows == sorted(rows, key=lambda name: -(details[name]["largest_difference"] or 0))


def test_structure_settings_and_extra(tmp_path: Path, ckpt: Ckpt) -> None:
    def build(lr: float, tied: bool, reverse: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
        for p in model.parameters():
            nn.init.ones_(p)
        if tied:
            model["two"].weight = model["one"].weight
        groups = [{"params": [p], "lr": lr if i == 0 else 0.5} for i, p in enumerate(model.parameters())]
        return model, torch.optim.SGD(groups[::-1] if reverse else groups)

    for folder, arguments, extra in (
        ("a", (0.1, False, False), {"epoch": 1, "same": [1, 2]}),
        ("reversed", (0.1, False, True), {"epoch": 1, "same": [1, 2]}),
        ("tied", (0.1, True, False), {"epoch": 1, "same": [1, 2]}),
        ("other", (0.2, False, False), {"epoch": 1.0, "more": True, "same": [1, 2]}),
    ):
        fsdp.save_checkpoint(tmp_path / folder, *build(*arguments), step=1, extra=extra)
    assert ckpt("diff", tmp_path / "a", tmp_path / "reversed", "--json")["equal"]
    differences = ckpt("diff", tmp_path / "a", tmp_path / "other", "--json", code=1)["differences"]
    assert {d["name"]: d["what"] for d in differences} == {
        "optimizer group 0: lr": "0.1 in A, 0.2 in B",
        "extra['epoch']": "1 in A, 1.0 in B",
        "extra['more']": "only in B",
    }
    found = ckpt("diff", tmp_path / "tied", tmp_path / "a", "--json", code=1)
    assert found["tensors_compared"] == found["tensors_equal"] == 2
    assert "in A these are one tensor: one.weight, two.weight" in [d["what"] for d in found["differences"]]
    a = save_plain(tmp_path / "x", w=torch.ones(2, 3), v=torch.ones(2), gone=torch.ones(1))
    b = save_plain(tmp_path / "y", w=torch.ones(3, 2), v=torch.ones(2, dtype=torch.float64), new=torch.ones(1))
    text = ckpt("diff", a, b, code=1)
    for needle in ("gone  only in A", "new   only in B", "shape 2x3 in A, 3x2 in B", "dtype F32 in A, F64 in B"):
        assert needle in text


def test_damage_is_not_taken_for_a_difference(tmp_path: Path, ckpt: Ckpt) -> None:
    a, b = (save_plain(tmp_path / name, v=torch.ones(5), w=torch.ones(5)) for name in "ab")
    path = b / "rank-0-of-1.safetensors"
    flip(path, data_place(path, "w"))
    (difference,) = ckpt("diff", a, b, "--json", code=1)["differences"]
    assert difference["kind"] == "damaged" and difference["name"] == "w" and difference["details"]["where"] == "b"
    path.unlink()
    assert path.name in ckpt("diff", a, b, code=1)


# ---------------------------------------------------------------------- export


def test_export(tmp_path: Path, ckpt: Ckpt) -> None:
    run(3, save_trained, str(tmp_path / "run"), 1)
    stored = {n: t for n, t in read(tmp_path / "run" / "step-1").items() if "/" not in n}
    found = ckpt("export", tmp_path / "run", tmp_path / "out", "--json")
    assert [f["path"] for f in found["files"]] == [str(tmp_path / "out" / "model.safetensors")]
    same_bits(load_file(tmp_path / "out" / "model.safetensors"), stored)
    text = ckpt("export", tmp_path / "run", tmp_path / "bf16", "--dtype", "bf16", "--max-shard-bytes", "40B")
    assert "4 tensors" in text and "model-00002-of-0000" in text
    parts = [load_file(path) for path in (tmp_path / "bf16").glob("*.safetensors")]
    same_bits({n: t for p in parts for n, t in p.items()}, {n: t.to(torch.bfloat16) for n, t in stored.items()})
    assert "finished export" in ckpt("export", tmp_path / "run", tmp_path / "out", code=2)
    path = tmp_path / "run" / "step-1" / "rank-0-of-3.safetensors"
    flip(path, data_place(path, "0.weight"))
    assert "damaged" in ckpt("export", tmp_path / "run", tmp_path / "never", "--json", code=1)["error"]
    assert not (tmp_path / "never").exists()
