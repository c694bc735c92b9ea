"""`fsdplite ckpt` beside what people must be able to rely on: what prune never removes, hostile files, no torch."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdplite as fsdp
from fsdplite.checkpoint.storage import FileSystem
from tests.harness import run

from .ckpt import Ckpt, ckpt, data_place, flip, reseal, save_filled, save_plain, save_trained  # noqa: F401
from .parts import filled

REPOSITORY = Path(__file__).resolve().parents[2]


def steps_in(root: Path) -> list[int]:
    return [c.step for c in fsdp.list_checkpoints(root)]


def actions(found: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["action"] for entry in found["entries"]}


# ---------------------------------------------------------------------- prune


def test_prune_shows_first_and_removes_when_told(tmp_path: Path, ckpt: Ckpt) -> None:
    for step in (1, 2, 3, 10):
        run(2, save_filled, str(tmp_path), step, 1.0)
    (tmp_path / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-01")
    before = sorted(tmp_path.rglob("*"))
    for options in ([], ["--dry-run"]):
        text = ckpt("prune", tmp_path, "--keep", 2, *options)
        assert "nothing was removed; --yes removes 2" in text and sorted(tmp_path.rglob("*")) == before
    size = sum(p.stat().st_size for step in (1, 2) for p in (tmp_path / f"step-{step}").glob("rank-*"))
    found = ckpt("prune", tmp_path, "--keep", 2, "--yes", "--json")
    assert actions(found) == {"step-1": "remove", "step-2": "remove", "step-3": "keep", "step-10": "keep"}
    assert found["removed_bytes"] == size and [e["removed"] for e in found["entries"]] == [True, True, False, False]
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-01", "step-10", "step-3"]
    assert "none to remove" in ckpt("prune", tmp_path, "--keep", 2)
    assert all(fsdp.verify_checkpoint(tmp_path / f"step-{step}").ok for step in (3, 10))


def test_prune_counts_only_what_is_intact(tmp_path: Path, ckpt: Ckpt) -> None:
    for step in range(1, 6):
        run(2, save_filled, str(tmp_path), step, 1.0)
    for step in (4, 5):
        path = tmp_path / f"step-{step}" / "rank-0-of-2.safetensors"
        flip(path, data_place(path, "w"))
    (tmp_path / "step-3" / "mine.txt").write_text("does not belong, and does no harm")
    found = ckpt("prune", tmp_path, "--keep", 1, "--yes", "--json", code=1)
    assert list(actions(found).values()) == ["remove", "remove", "keep", "spare", "spare"]
    assert set(found["damaged"]) == {str(tmp_path / "step-4"), str(tmp_path / "step-5")}
    assert steps_in(tmp_path) == [3, 4, 5]
    path = tmp_path / "step-3" / "rank-1-of-2.safetensors"
    flip(path, data_place(path, "w"))
    found = ckpt("prune", tmp_path, "--keep", 1, "--yes", "--json", code=1)
    assert set(actions(found).values()) == {"spare"} and steps_in(tmp_path) == [3, 4, 5]
    assert "damaged" in ckpt("prune", tmp_path, "--keep", 1, code=1)


def test_prune_leaves_links_and_other_peoples_files_alone(tmp_path: Path, ckpt: Ckpt) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for step in (1, 2, 3):
        save_plain(root, step, w=torch.ones(3))
    elsewhere.mkdir()
    (root / "step-1").rename(elsewhere / "step-1")
    (root / "step-1").symlink_to(elsewhere / "step-1")
    (root / "step-2" / "results.csv").write_text("mine")
    found = ckpt("prune", root, "--keep", 1, "--yes", "--json")
    assert actions(found) == {"step-1": "spare", "step-2": "spare", "step-3": "keep"} and steps_in(root) == [1, 2, 3]
    assert [e["why"] for e in found["entries"][:2]] == ["a symbolic link", "holds other files: results.csv"]
    assert fsdp.verify_checkpoint(elsewhere / "step-1").ok


def test_leftovers_go_when_asked_for_and_idle(tmp_path: Path, ckpt: Ckpt) -> None:
    save_plain(tmp_path, 1, w=torch.ones(3))
    working = {}
    for number, purpose in enumerate(("saving", "replaced", "removing", "saving", "saving")):
        working[number] = tmp_path / f".step-{number % 2}.000000000000000{number}.{purpose}"
        shutil.copytree(tmp_path / "step-1", working[number])
    (working[4] / "mine.txt").write_text("mine")
    now = time.time()
    for number in (0, 1, 2, 4):
        for path in (*working[number].iterdir(), working[number]):
            os.utime(path, (now - 7200, now - 7200))
    os.utime(working[3], (now - 7200, now - 7200))
    os.utime(working[3] / "manifest.json", (now - 7200, now - 7200))
    os.utime(working[3] / "rank-0-of-1.safetensors", (now - 1800, now - 1800))  # a file is being written
    before = sorted(os.listdir(tmp_path))
    assert list(actions(ckpt("prune", tmp_path, "--keep", 1, "--yes", "--json"))) == ["step-1"]
    ckpt("prune", tmp_path, "--keep", 1, "--leftovers")
    assert sorted(os.listdir(tmp_path)) == before
    found = ckpt("prune", tmp_path, "--keep", 1, "--leftovers", "--yes", "--json")
    left = sorted(name for name in os.listdir(tmp_path) if name.startswith("."))
    assert left == sorted([working[3].name, working[4].name]), found
    assert "may be in use: it changed 30 minutes ago" in {e["why"] for e in found["entries"]}
    ckpt("prune", tmp_path, "--keep", 1, "--leftovers", "--idle-minutes", 20, "--yes")
    assert not working[3].exists() and working[4].exists() and steps_in(tmp_path) == [1]


def test_prune_leaves_what_a_save_of_another_process_holds(tmp_path: Path, ckpt: Ckpt) -> None:
    save_plain(tmp_path, 1, w=torch.ones(3))
    working = [tmp_path / f".step-2.000000000000000{number}.saving" for number in (0, 1)]
    for folder in working:
        shutil.copytree(tmp_path / "step-1", folder)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, 0))
    arguments = ("prune", tmp_path, "--keep", 1, "--leftovers", "--json")
    with FileSystem().held(str(working[0])):  # as a save does
        for options in ([], ["--yes"]):
            found = {e["name"]: e for e in ckpt(*arguments, *options)["entries"]}
            assert found[working[0].name]["action"] == "spare" and "another save" in found[working[0].name]["why"]
            assert found[working[1].name]["action"] == "remove"
        assert working[0].exists() and not working[1].exists()
    ckpt(*arguments, "--yes")
    assert steps_in(tmp_path) == [1] and os.listdir(tmp_path) == ["step-1"]


def test_prune_stops_at_an_error(tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save_plain(tmp_path, step, w=torch.ones(3))
    remove = FileSystem.remove

    def refuse(self: FileSystem, path: str) -> None:
        if "step-2" in path:
            raise PermissionError(13, "Permission denied", path)
        remove(self, path)

    monkeypatch.setattr(FileSystem, "remove", refuse)
    found = ckpt("prune", tmp_path, "--keep", 1, "--yes", "--json", code=1)
    assert "Permission denied" in found["error"] and [e["removed"] for e in found["entries"]] == [True, False, False]
    assert steps_in(tmp_path) == [3], "a half-removed one does not count"


# ---------------------------------------------------------------------- hostile files


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def huge_ranges(body: dict) -> None:
    body["tensors"]["w"].update(shape=[10**18], numel=10**18, ranges=[[0, 0, 10**18]])


HOSTILE = {
    "step is a list": lambda body: body.update(step=[1]),
    "huge step": lambda body: body.update(step=10**400),
    "ranks out of thin air": lambda body: body.update(world_size=10**9),
    "shape repeats text": lambda body: body["tensors"]["w"].update(shape=["a", 10**12]),
    "shape of floats": lambda body: body["tensors"]["w"].update(shape=[3.0]),
    "negative shape": lambda body: body["tensors"]["w"].update(shape=[-3, -1]),
    "ranges of floats": lambda body: body["tensors"]["w"].update(ranges=[[0.0, 0, 3]]),
    "ranges beyond the file": huge_ranges,
    "a file elsewhere": lambda body: body["files"][0].update(name="/etc/passwd"),
    "size is text": lambda body: body["files"][0].update(size="1"),
    "created never": lambda body: body.update(created=1e300),
    "created is text": lambda body: body.update(created="\x1b[31m"),
    "optimizer is text": lambda body: body.update(optimizer="Adam"),
    "groups of numbers": lambda body: body.update(optimizer={"class": "X", "groups": [1], "scalars": {}}),
    "aliases of numbers": lambda body: body.update(aliases={"v": 3}),
    "left out is a number": lambda body: body.update(left_out=3),
    "mesh is empty": lambda body: body.update(mesh=[]),
    "another version": lambda body: body.update(version=10**6),
    "a version that equals 1": lambda body: body.update(version=True),
    "number of elements": lambda body: body["tensors"]["w"].update(numel=2),
    "a checksum in other digits": lambda body: body["files"][0].update(header_crc32="0x12345f"),
    "another name of itself": lambda body: body.update(aliases={"w": "w"}),
    "another name of a value": lambda body: body.update(aliases={"v": "extra/0"}),
    "left out and there": lambda body: body.update(left_out=["w"]),
    "left out twice": lambda body: body.update(left_out=["v", "v"]),
    "a weight of one rank": lambda body: body["tensors"]["w"].update(kind="per_rank"),
    "state without an optimizer": lambda body: body["tensors"].update({"optimizer/w/m": body["tensors"]["w"]}),
    "a member that is not there": lambda body: body.update(optimizer=grouped(["v"])),
    "a member twice": lambda body: body.update(optimizer=grouped(["w", "w"])),
    "a member of two groups": lambda body: body.update(optimizer=grouped(["w"], ["w"])),
    "scalars of no member": lambda body: body.update(optimizer=grouped(["w"], scalars={"v": {"step": {"value": 1}}})),
    "a scalar of two kinds": lambda body: body.update(
        optimizer=grouped(["w"], scalars={"w": {"step": {"value": 1, "tensor": {}}}})
    ),
}


def grouped(*groups: list[str], scalars: Any = None) -> dict[str, Any]:
    listed = [{"members": members, "settings": {}, "tensors": {}} for members in groups]
    return {"class": "SGD", "groups": listed, "scalars": scalars or {}}


@pytest.mark.parametrize("case", HOSTILE)
def test_manifests_with_a_right_checksum_and_wrong_contents(tmp_path: Path, ckpt: Ckpt, case: str) -> None:
    good, bad = (save_plain(tmp_path / name, w=torch.ones(3), extra={"n": 1}) for name in ("good", "bad"))
    reseal(bad, HOSTILE[case])
    for arguments in (
        ["inspect", bad], ["verify", bad], ["verify", bad.parent, "--all-steps"], ["diff", good, bad],
        ["diff", bad, good], ["export", bad, tmp_path / "out"], ["ls", bad.parent],
    ):  # fmt: skip
        if case == "ranges beyond the file" and arguments[0] in ("inspect", "ls"):
            continue  # what a manifest says of a file is not checked by these
        text = ckpt(*arguments, code=1)
        assert "manifest" in text or "rank-0-of-1.safetensors" in text, text
    assert "none to remove" in ckpt("prune", tmp_path / "good", "--keep", 1) and not (tmp_path / "out").exists()


def test_odd_values_are_shown_and_run_nothing(tmp_path: Path, ckpt: Ckpt) -> None:
    folder = save_plain(tmp_path / "run", w=torch.ones(3), extra={"n": 1})
    odd = {"d": {"__dict__": 3}, "deep": json.loads("[" * 200 + "]" * 200), "[bold]k\x1b": {"__tensor__": "nowhere"},
           "float": {"__float__": "boo"}, "\u202e": {"__tuple__": None}, "line\nbreak": "\n\t\0"}  # fmt: skip
    scalars = {"w": {"a": {"value": {"__tuple__": 3}}, "b": {"tensor": 3},
                     "c": {"tensor": {"bits": "zz", "dtype": "F32", "shape": []}},
                     "d": {"tensor": {"bits": "00", "dtype": "F32", "shape": 3}}}}  # fmt: skip
    group = {"members": ["w"], "settings": {"lr": {"__tensor__": "0"}}, "tensors": {"0": [1]}}
    optimizer = {"class": "[red]Adam\x1b]0;title\x07", "groups": [group], "scalars": scalars}
    reseal(folder, lambda body: body.update(extra=odd, optimizer=optimizer, aliases={"[/]v\x9b": "w"}))
    text = ckpt("inspect", folder)
    assert "[red]Adam\\x1b]0;title\\x07" in text and "[/]v\\x9b" in text and "[bold]k" in text
    assert ckpt("inspect", folder, "--json")["extra"]["[bold]k\x1b"] == {"__tensor__": "nowhere"}
    assert ckpt("diff", folder, folder, "--json")["equal"]
    plain = save_plain(tmp_path / "other", w=torch.ones(3))
    ckpt("diff", folder, plain, code=1)
    reseal(plain, lambda body: body.update(extra={"big": 777}), "1e999")
    assert ckpt("inspect", plain, "--json")["extra"] == {"big": "inf"}
    reseal(plain, lambda body: body.update(extra={"big": 777}), "NaN")
    assert "NaN is not JSON" in ckpt("inspect", plain, code=1)
    reseal(plain, lambda body: body.update(extra={"big": 777}), "[" * 100_000 + "]" * 100_000)
    assert "nested" in ckpt("inspect", plain, code=1) or "not valid" in ckpt("inspect", plain, code=1)


def test_files_replaced_by_something_else(tmp_path: Path, ckpt: Ckpt) -> None:
    marker = tmp_path / "marker"
    poison = pickle.dumps(Marker(marker))
    good = save_plain(tmp_path / "good", 1, w=torch.ones(3), extra={"n": 1})

    def replace(path: Path, kind: str) -> None:
        raw = path.read_bytes()
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "dangling link":
            path.symlink_to(tmp_path / "nowhere")
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            content = {"pickle": poison, "empty": b"", "short": raw[: len(raw) // 2], "header": b"\xff" * len(raw),
                       "padded pickle": poison + bytes(max(0, len(raw) - len(poison)))}  # fmt: skip
            path.write_bytes(content[kind])

    kinds = ("pickle", "padded pickle", "empty", "short", "header", "pipe", "directory", "dangling link", "device")
    for name in ("manifest.json", "rank-0-of-1.safetensors"):
        for kind in kinds:
            root = tmp_path / f"{kind} {name}"
            bad = save_plain(root, 1, w=torch.ones(3), extra={"n": 1})
            replace(bad / name, kind)
            for arguments in (["verify", bad], ["diff", good, bad], ["export", bad, tmp_path / "out"]):
                assert name in ckpt(*arguments, code=1), (kind, arguments)
            if name == "manifest.json":
                ckpt("inspect", bad, code=1)
            # of the right size it is published; its contents are for verify
            ckpt("ls", root, code=int(name == "manifest.json" or kind not in ("padded pickle", "header")))
    assert not marker.exists() and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- as a program


def test_no_command_imports_torch_or_unpickles(tmp_path: Path) -> None:
    run(2, save_trained, str(tmp_path / "run"), 1, per_rank=True)
    run(3, save_trained, str(tmp_path / "run"), 2, per_rank=True)
    root, one = str(tmp_path / "run"), str(tmp_path / "run" / "step-1")
    names = ("ls", "inspect", "verify", "diff", "export", "prune")
    commands = [
        (["--help"], 0), (["ckpt"], 2), (["ckpt", "--help"], 0), *((["ckpt", name, "--help"], 0) for name in names),
        (["ckpt", "ls", root], 0), (["ckpt", "ls", root, "--json"], 0), (["ckpt", "inspect", root, "--all"], 0),
        (["ckpt", "inspect", root, "--json"], 0), (["ckpt", "verify", root, "--all-steps"], 0),
        (["ckpt", "diff", root, one], 1), (["ckpt", "export", root, str(tmp_path / "out")], 0),
        (["ckpt", "prune", root, "--keep", "1", "--yes", "--leftovers"], 0), (["ckpt", "ls", root + "/nothing"], 2),
    ]  # fmt: skip
    code = f"""
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
from fsdplite.cli import main
for arguments, code in {commands!r}:
    assert main(arguments) == code, arguments
    assert "torch" not in sys.modules, arguments
assert not seen, seen
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_in(tmp_path / "run") == [2]


def test_whoever_reads_may_stop_early(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, **{f"t{i}": torch.ones(1) for i in range(2000)})
    command = f"{sys.executable} -m fsdplite ckpt inspect {folder} --all | head -n 3"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.startswith("step 1 in") and done.stderr == ""


def test_remote_roots(tmp_path: Path, ckpt: Ckpt) -> None:
    import fsspec

    root = "memory://ckpt-command/run"
    model, optimizer = filled(1.0, wrap=False)
    for step in (1, 2, 3):
        fsdp.save_checkpoint(root, model, optimizer, step=step, per_rank={"n": step})
    memory = fsspec.filesystem("memory")
    memory.pipe(f"{root}/step-9/rank-0-of-2.safetensors", b"half")
    found = ckpt("ls", root, "--json")
    assert found["latest"] == 3 and [e["state"] for e in found["entries"]] == ["published"] * 3 + ["leftover"]
    assert ckpt("inspect", root, "--json")["per_rank"] == {"0": {"value": {"n": 3}, "tensors": {}}}
    assert ckpt("verify", f"{root}/step-1", "--json")["ok"]
    assert ckpt("diff", f"{root}/step-1", f"{root}/step-2", "--ignore", "per_rank/*", "--json")["equal"]
    ckpt("export", root, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    found = ckpt("prune", root, "--keep", 1, "--leftovers", "--yes", "--json")
    assert actions(found) == {"step-1": "remove", "step-2": "remove", "step-3": "keep", "step-9": "spare"}
    assert [c.step for c in fsdp.list_checkpoints(root)] == [3] and memory.exists(f"{root}/step-9")
    assert "no directory" in ckpt("ls", "memory://ckpt-command/nothing", code=2)
