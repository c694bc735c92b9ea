"""What is published and what is intact. Cases K43, K81, K98, K100."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch

import fsdplite as fsdp
from tests.harness import Vec, expect_loud, here, plain, run

from .parts import filled, values_in
from .reader import read


def save_filled(root, step, value, n=8, keep=None):
    model, optimizer = filled(value, n)
    return fsdp.save_checkpoint(root, model, optimizer, step=step, keep=keep).path


@pytest.mark.slow
def test_K43_the_latest_step_is_a_number(tmp_path):
    for step in (100, 9, 10):
        save_filled(tmp_path, step, float(step))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    shutil.copytree(tmp_path / "step-100", tmp_path / "step-0200")
    shutil.copytree(tmp_path / "step-100", tmp_path / "step-300")
    (tmp_path / "step-12").mkdir()
    found = fsdp.list_checkpoints(tmp_path)
    assert [c.step for c in found] == [9, 10, 100] and fsdp.latest_step(tmp_path) == 100
    assert found[0].world_size == 1 and found[0].path == str(tmp_path / "step-9")
    assert found[0].total_bytes == (tmp_path / "step-9" / "rank-0-of-1.safetensors").stat().st_size
    save_filled(tmp_path, 101, 1.0, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-0200", "step-101", "step-12", "step-300"]
    assert fsdp.latest_step(tmp_path / "nothing") is None
    expect_loud(lambda: fsdp.load_checkpoint(tmp_path / "nothing", Vec(8, 0.0)), "no published checkpoint")
    expect_loud(lambda: fsdp.load_checkpoint(tmp_path, Vec(8, 0.0), step=12), "step 12", "not published", "101")
    expect_loud(lambda: fsdp.save_checkpoint("s3://bucket/run", Vec(2, 0.0), step=1), "s3://bucket/run")


def K81_load(root, needle):
    model, optimizer = filled(7.0, 12)
    expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer, step=1), needle)
    assert set(plain(model.w).tolist()) <= {7.0}
    assert all(set(plain(t).tolist()) <= {7.0, 3.0} for t in optimizer.state[model.w].values() if t.dim())


def test_retention_does_not_follow_links(tmp_path):
    """A step kept elsewhere and linked into the root is not this root's to empty."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    save_filled(elsewhere, 1, 1.0)
    save_filled(root, 2, 2.0)
    (root / "step-1").symlink_to(elsewhere / "step-1")
    save_filled(root, 3, 3.0, keep=1)
    assert sorted(os.listdir(root)) == ["step-1", "step-3"]
    assert fsdp.verify_checkpoint(elsewhere / "step-1").ok
    assert 1.0 in values_in(elsewhere / "step-1")


@pytest.mark.parametrize("damage", ["first", "last", "old", "extra"])
def test_K81_missing_old_and_foreign_files(tmp_path, damage):
    root = str(tmp_path)
    run(3, save_filled, root, 0, 2.0, 12)
    run(3, save_filled, root, 1, 1.0, 12)
    folder = tmp_path / "step-1"
    name = "rank-1-of-3.safetensors" if damage == "first" else "rank-2-of-3.safetensors"
    if damage in ("first", "last"):
        (folder / name).unlink()
    elif damage == "old":
        old = tmp_path / "step-0" / name
        assert old.stat().st_size == (folder / name).stat().st_size
        shutil.copy(old, folder / name)
    else:
        name = "rank-3-of-4.safetensors"
        run(4, save_filled, root, 2, 9.0, 12)
        shutil.copy(tmp_path / "step-2" / name, folder / name)
    result = fsdp.verify_checkpoint(folder)
    assert not result.ok and [p.file for p in result.problems] == [name]
    if damage == "extra":
        model, _ = filled(7.0, 12, wrap=False)
        assert fsdp.load_checkpoint(root, model, step=1).step == 1
        assert set(model.w.tolist()) == {1.0}
        return
    run(3, K81_load, root, name)
    model = Vec(12, 7.0, torch.float32)
    expect_loud(lambda: fsdp.load_checkpoint(root, model, step=1), name)
    assert set(model.w.tolist()) == {7.0}


def save_small(root):
    model, optimizer = filled(1.0, 40)
    fsdp.save_checkpoint(
        root, model, optimizer, step=1, extra={"e": torch.arange(3), "n": 1}, per_rank={"r": here.rank}
    )


def load_damaged(root, *needles):
    model, optimizer = filled(5.0, 40)
    return expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer), *needles)


def test_K100_every_flipped_bit(tmp_path):
    root = str(tmp_path)
    run(2, save_small, root)
    folder = tmp_path / "step-1"
    assert fsdp.verify_checkpoint(folder).ok
    count = 0
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        with open(path, "r+b", buffering=0) as file:
            for index, byte in enumerate(data):
                file.seek(index)
                file.write(bytes([byte ^ (1 << (index % 8))]))
                result = fsdp.verify_checkpoint(folder)
                assert not result.ok and path.name in {p.file for p in result.problems}, (path.name, index)
                file.seek(index)
                file.write(bytes([byte]))
                count += 1
    assert count > 2000 and fsdp.verify_checkpoint(folder).ok


def flip(path, index):
    data = bytearray(path.read_bytes())
    data[index] ^= 4
    path.write_bytes(data)


def test_K100_a_load_names_what_is_damaged(tmp_path):
    name = "rank-1-of-2.safetensors"
    for place in ("payload", "header", "manifest"):
        root = tmp_path / place
        run(2, save_small, str(root))
        path = root / "step-1" / ("manifest.json" if place == "manifest" else name)
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        flip(path, {"payload": begin + 3, "header": 40, "manifest": 200}[place])
        if place == "manifest":
            run(2, load_damaged, str(root), "no published checkpoint")
            assert fsdp.latest_step(root) is None
            continue
        needles = (name, "chunk 0 of 'optimizer/w/exp_avg'") if place == "payload" else (name, "header")
        texts = run(2, load_damaged, str(root), *needles)
        assert texts[0] == texts[1]


def load_damaged_then_run(root, good):
    model, optimizer = filled(5.0, 40)
    expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer), "damaged")
    expect_loud(lambda: model(1.0), "w")  # it may hold a mixture
    fsdp.load_checkpoint(good, model, optimizer)
    model(1.0)


def test_a_model_half_loaded_refuses_its_forward(tmp_path):
    run(2, save_small, str(tmp_path / "a"))
    run(2, save_small, str(tmp_path / "b"))
    path = tmp_path / "a" / "step-1" / "rank-1-of-2.safetensors"
    flip(path, len(path.read_bytes()) - 100)
    run(2, load_damaged_then_run, str(tmp_path / "a"), str(tmp_path / "b"))


class Marker:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def load_watched(root):
    events = []
    sys.addaudithook(lambda event, args: events.append(event) if event == "pickle.find_class" else None)
    model, optimizer = filled(0.0, 40)
    fsdp.load_checkpoint(root, model, optimizer)
    fsdp.verify_checkpoint(os.path.join(root, "step-1"))
    return events


def test_K98_nothing_in_a_checkpoint_can_run(tmp_path):
    root, marker = tmp_path / "run", tmp_path / "marker"
    run(1, save_small, str(root))
    assert run(1, load_watched, str(root), fresh=True) == [[]]
    poison = pickle.dumps(Marker(str(marker)))
    folder = root / "step-1"
    (folder / "state.pkl").write_bytes(poison)
    assert [p.file for p in fsdp.verify_checkpoint(folder).problems] == ["state.pkl"]
    assert run(1, load_watched, str(root), fresh=True) == [[]]
    (folder / "state.pkl").unlink()
    for name in ("rank-0-of-1.safetensors", "manifest.json"):
        good = (folder / name).read_bytes()
        for content in (poison, poison + bytes(len(good) - len(poison)) if len(good) > len(poison) else poison):
            (folder / name).write_bytes(content)
            assert [p.file for p in fsdp.verify_checkpoint(folder).problems] == [name]
            model, _ = filled(0.0, 40, wrap=False)
            expect_loud(lambda: fsdp.load_checkpoint(root, model, step=1), name)
        (folder / name).write_bytes(good)
    assert not marker.exists()
    model, _ = filled(0.0, 4, wrap=False)
    expect_loud(
        lambda: fsdp.save_checkpoint(root, model, step=2, extra={"m": [1, Marker("x")]}), "extra['m'][1]", "Marker"
    )
    expect_loud(lambda: fsdp.save_checkpoint(root, model, step=2, per_rank={"m": b"x"}), "per_rank['m']", "bytes")
    sources = os.path.join(os.path.dirname(fsdp.__file__), "checkpoint")
    for name in os.listdir(sources):
        if name.endswith(".py"):
            with open(os.path.join(sources, name)) as file:
                text = file.read()
            assert "pickle" not in text and "torch.load" not in text and "torch.save" not in text, name


def test_looking_at_checkpoints_does_not_import_torch(tmp_path):
    save_filled(tmp_path, 1, 1.0)
    code = (
        "import sys, fsdplite as fsdp\n"
        f"assert fsdp.latest_step({str(tmp_path)!r}) == 1\n"
        f"assert fsdp.verify_checkpoint({str(tmp_path / 'step-1')!r}).ok\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_values_survive_a_plain_load(tmp_path):
    save_filled(tmp_path, 3, 2.5)
    assert values_in(tmp_path / "step-3") == {2.5}
    model, optimizer = filled(0.0, 8, wrap=False)
    fsdp.load_checkpoint(tmp_path, model, optimizer)
    assert set(model.w.tolist()) == {2.5} and optimizer.state[model.w]["step"].item() == 3.0
    assert set(read(tmp_path / "step-3")) == {"w", "optimizer/w/exp_avg", "optimizer/w/exp_avg_sq"}
