"""Hugging Face folders out and in. Cases K07, K30, K33, K79, K80, K81, K85 for exports, and their sweep."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fsdplite as fsdp
from fsdplite.checkpoint import storage
from fsdplite.errors import FSDPError
from tests.harness import expect_loud, gather, plain, run

from .faults import Crash, Fault, FaultyFileSystem
from .parts import in_memory, same_bits, wrapped  # noqa: F401
from .test_names import Tied, WithTable, loaded_from_meta
from .test_reshard import OddShapes


def tensors_in(folder) -> dict[str, torch.Tensor]:
    """What a plain reader finds, following the index."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        content = json.loads(index.read_text())
        files = set(content["weight_map"].values())
    found = {}
    for name in sorted(files):
        with safe_open(str(folder / name), "pt") as file:
            for key in file.keys():
                assert key not in found
                found[key] = file.get_tensor(key)
                if index.exists():
                    assert content["weight_map"][key] == name
    if index.exists():
        assert content["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
        assert set(content["weight_map"]) == set(found)
    return found


def save(tensors: dict[str, torch.Tensor]) -> bytes:
    """A safetensors file by hand (the stock function needs numpy)."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    header, data = {}, b""
    for name, t in tensors.items():
        raw = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())
        header[name] = {
            "dtype": names[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.tensor(7.0))
        self.s = nn.Parameter(torch.tensor(2.5))

    def forward(self, x):
        return x * self.s + self.b


def save_model(root, build, step=1):
    fsdp.save_checkpoint(root, wrapped(build), step=step)


def test_K79_scalars(tmp_path):
    for n in (1, 3):
        root = tmp_path / str(n)
        run(n, save_model, str(root), Scalars)
        for name, dtype in (("as-is", None), ("bf16", torch.bfloat16)):
            fsdp.export_safetensors(root / "step-1", root / name, dtype=dtype)
            found = tensors_in(root / name)
            assert found["b"].shape == () and found["b"].item() == 7.0
            assert found["s"].shape == () and found["s"].item() == 2.5
            assert found["s"].dtype == (dtype or torch.float32)


class AllKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("i", torch.tensor([257, 9007199254740993]))
        self.register_buffer("u", torch.tensor([255], dtype=torch.uint8))
        self.register_buffer("t", torch.tensor([True, False, True]))
        self.register_buffer("f8", torch.tensor([1.5]).to(torch.float8_e4m3fn))
        self.w = nn.Parameter(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 / 3]))

    def forward(self, x):
        return x * self.w


def test_K80_other_dtypes(tmp_path):
    run(2, save_model, str(tmp_path), AllKinds)
    expected = AllKinds()
    for dtype in (None, torch.bfloat16):
        out = tmp_path / f"out-{dtype}"
        fsdp.export_safetensors(tmp_path / "step-1", out, dtype=dtype)
        found = tensors_in(out)
        for name in ("i", "u", "t"):
            assert (
                torch.equal(found[name], getattr(expected, name)) and found[name].dtype == getattr(expected, name).dtype
            )
        assert found["f8"].dtype == torch.float8_e4m3fn and found["f8"].float().item() == 1.5
        assert torch.equal(found["w"], expected.w.detach().to(dtype or torch.float32))
    expect_loud(lambda: fsdp.export_safetensors(tmp_path / "step-1", tmp_path / "x", dtype=torch.int64), "int64")


@pytest.mark.parametrize("damage", ["first", "last", "old", "bit", "extra"])
def test_K81_an_export_refuses_what_is_not_intact(tmp_path, damage):
    root = str(tmp_path)
    for step in (0, 1):
        run(3, save_shifted, root, step)
    folder = tmp_path / "step-1"
    name = "rank-1-of-3.safetensors" if damage == "first" else "rank-2-of-3.safetensors"
    if damage in ("first", "last"):
        (folder / name).unlink()
    elif damage == "old":
        shutil.copy(tmp_path / "step-0" / name, folder / name)
    elif damage == "bit":
        data = bytearray((folder / name).read_bytes())
        data[-2] ^= 1
        (folder / name).write_bytes(data)
    else:
        shutil.copy(tmp_path / "step-0" / name, folder / "rank-3-of-4.safetensors")
        fsdp.export_safetensors(folder, tmp_path / "out")
        assert tensors_in(tmp_path / "out")["p0"][0, 0] == 1.0
        return
    expect_loud(lambda: fsdp.export_safetensors(folder, tmp_path / "out"), name)
    assert not (tmp_path / "out").exists()


def save_shifted(root, step):
    model = wrapped(OddShapes)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(step))
    fsdp.save_checkpoint(root, model, step=step)


def test_K07_K85_export_of_odd_shapes(tmp_path):
    run(4, save_model, str(tmp_path), OddShapes)
    (path,) = fsdp.export_safetensors(tmp_path / "step-1", tmp_path / "out")
    torch.manual_seed(0)
    same_bits(tensors_in(tmp_path / "out"), {name: p.detach() for name, p in OddShapes().named_parameters()})
    raw = Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0 and raw[8:9] == b"{"
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "pt"
    places = sorted(entry["data_offsets"] for entry in header.values())
    assert places[0][0] == 0 and places[-1][1] == len(raw) - 8 - length
    assert all(a[1] == b[0] for a, b in zip(places, places[1:]))


def test_several_files_and_an_index(tmp_path):
    run(2, save_model, str(tmp_path), Tied)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    paths = fsdp.export_safetensors(tmp_path / "step-1", out, max_shard_bytes=100)
    assert [os.path.basename(p) for p in paths] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert sorted(os.listdir(out)) == ["config.json", *map(os.path.basename, paths), "model.safetensors.index.json"]
    assert set(tensors_in(out)) == {"embed.weight", "mid.weight", "mid.bias"}
    expect_loud(lambda: fsdp.export_safetensors(tmp_path / "step-1", out), "finished export")
    run(3, import_tied, str(out), True)
    (out / paths[0]).unlink()
    expect_loud(lambda: fsdp.load_safetensors(Tied(), out), "model-00001-of-00002")


def import_tied(folder, tie, name="embed.weight"):
    torch.manual_seed(4)
    model = fsdp.fsdp_wrap(Tied(tie))
    report = fsdp.load_safetensors(model, folder)
    assert not report.missing and not report.unexpected
    expected = tensors_in(folder)
    found = gather(model)
    assert torch.equal(found["embed.weight"], expected[name])
    assert torch.equal(found["mid.bias"], expected["mid.bias"])
    if tie:
        assert model.embed.weight is model.head.weight


def test_K30_either_name_of_a_tied_weight(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    for name in ("embed.weight", "head.weight"):
        folder = tmp_path / name
        folder.mkdir()
        tensors = {
            name: model.embed.weight.detach(),
            "mid.weight": model.mid.weight.detach(),
            "mid.bias": model.mid.bias.detach(),
        }
        (folder / "model.safetensors").write_bytes(save(tensors))
        run(2, import_tied, str(folder), True, name)
        plain_model = Tied()
        fsdp.load_safetensors(plain_model, folder)
        assert torch.equal(plain_model.head.weight, model.embed.weight)


def import_with_options(folder):
    model = fsdp.fsdp_wrap(nn.Sequential(nn.Linear(3, 2)))
    expect_loud(lambda: fsdp.load_safetensors(model, folder), "0.weight", "net.w", "net.b", "drop")
    names = {"net.w": "0.weight", "net.b": "0.bias"}
    report = fsdp.load_safetensors(model, folder, rename=names, strict=False)
    assert report.unexpected == ["drop"] and report.missing == []
    fsdp.load_safetensors(model, folder, rename=lambda name: None if name == "drop" else names[name])
    found = gather(model)
    assert found["0.weight"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and found["0.bias"].tolist() == [1.0, 1.0]
    expect_loud(
        lambda: fsdp.load_safetensors(model, folder, rename={"net.w": "0.weight", "net.b": "0.weight"}), "0.weight"
    )
    low = fsdp.fsdp_wrap(nn.Sequential(nn.Linear(3, 2, dtype=torch.float16)))
    expect_loud(lambda: fsdp.load_safetensors(low, folder, rename=names, strict=False), "F32", "F16")
    return report.bytes_read


def test_rename_and_strictness(tmp_path):
    tensors = {
        "net.w": torch.arange(6.0).reshape(2, 3), "net.b": torch.ones(2, dtype=torch.bfloat16), "drop": torch.zeros(2),
    }  # fmt: skip
    (tmp_path / "weights.safetensors").write_bytes(save(tensors))
    assert sum(run(2, import_with_options, str(tmp_path))) == 28
    assert sum(run(1, import_with_options, str(tmp_path / "weights.safetensors"))) == 28


def K33_import(folder):
    loaded_from_meta(lambda model: fsdp.load_safetensors(model, folder))


class MetaOnly(nn.Module):
    """Nothing in it fills itself: every value has to come from the file, a persistent buffer among them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(5.0))
        self.register_buffer("b", torch.arange(3.0))

    def forward(self, x):
        return (self.w * x).sum() + self.b.sum()


def load_meta(root, folder):
    for load in (lambda m: fsdp.load_safetensors(m, folder), lambda m: fsdp.load_checkpoint(root, m)):
        with torch.device("meta"):
            model = MetaOnly()
        model = fsdp.fsdp_wrap(model)
        expect_loud(lambda: model(1.0), "w", "meta")
        load(model)
        assert model(1.0).item() == 13.0 and plain(model.b).tolist() == [0.0, 1.0, 2.0]


def test_K33_nothing_stays_unfilled(tmp_path):
    run(2, save_model, str(tmp_path / "a"), lambda_free_table)
    fsdp.export_safetensors(tmp_path / "a" / "step-1", tmp_path / "a" / "hf")
    run(2, K33_import, str(tmp_path / "a" / "hf"))
    run(1, save_model, str(tmp_path / "b"), MetaOnly)
    fsdp.export_safetensors(tmp_path / "b" / "step-1", tmp_path / "b" / "hf")
    run(2, load_meta, str(tmp_path / "b"), str(tmp_path / "b" / "hf"))


def lambda_free_table():
    return WithTable(True)


def complete(folder) -> bool:
    return any((Path(folder) / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))


@pytest.mark.parametrize("shard_bytes", [100, 10_000])
@pytest.mark.parametrize("exists", [False, True])
def test_sweep_of_an_export(in_memory, shard_bytes, exists):
    torch.manual_seed(0)
    model = Tied()
    fsdp.save_checkpoint(in_memory, model, step=1)
    expected = {"embed.weight": model.embed.weight, "mid.weight": model.mid.weight, "mid.bias": model.mid.bias}
    out = in_memory / "out"

    def start():
        shutil.rmtree(out, ignore_errors=True)
        if exists:
            out.mkdir()
            (out / "config.json").write_text("{}")

    start()
    with storage.using(FaultyFileSystem()) as dry:
        fsdp.export_safetensors(in_memory / "step-1", out, max_shard_bytes=shard_bytes)
    faults = [Fault("fail", 0, errno.ENOSPC), Fault("crash_before", mock=True), Fault("crash_after", mock=True),
              Fault("lie", 0, 0.4), Fault("short", 0, 0.4)]  # fmt: skip
    for fault in faults:
        for n in range(1, dry.count + 1):
            start()
            failed = False
            with storage.using(FaultyFileSystem(Fault(fault.kind, n, fault.detail, fault.mock))) as fs:
                try:
                    fsdp.export_safetensors(in_memory / "step-1", out, max_shard_bytes=shard_bytes)
                except (FSDPError, Crash):
                    failed = True
            where = (fault, n, fs.log[n - 1], sorted(os.listdir(out)) if out.exists() else None)
            assert failed or complete(out), where
            if fault.kind in ("fail", "short", "lie"):
                assert failed == (fault.kind == "fail" or fault.kind == "lie" and fs.log[n - 1][0] == "write_at"), where
            if complete(out):
                same_bits(tensors_in(out), {name: p.detach() for name, p in expected.items()})
            else:
                fsdp.export_safetensors(in_memory / "step-1", out, max_shard_bytes=shard_bytes)
                same_bits(tensors_in(out), {name: p.detach() for name, p in expected.items()})
                assert not [name for name in os.listdir(out) if name.startswith(".")], where


def test_an_index_that_lists_what_no_file_holds(tmp_path):
    fsdp.save_checkpoint(tmp_path, nn.Sequential(nn.Linear(3, 3)), step=1)
    fsdp.export_safetensors(tmp_path, tmp_path / "out", max_shard_bytes=20)
    index = tmp_path / "out" / "model.safetensors.index.json"
    model = nn.Sequential(nn.Linear(3, 3))
    assert fsdp.load_safetensors(model, index).missing == []  # the index stands for its folder
    content = json.loads(index.read_text())
    content["weight_map"]["1.weight"] = content["weight_map"]["0.bias"]
    index.write_text(json.dumps(content))
    for strict in (True, False):
        expect_loud(lambda: fsdp.load_safetensors(model, tmp_path / "out", strict=strict), "none of its files holds",
                    "'1.weight', listed in model-0000")  # fmt: skip


def test_an_export_goes_into_no_checkpoint_and_no_root(tmp_path):
    fsdp.save_checkpoint(tmp_path, nn.Linear(3, 3), step=1)
    step = tmp_path / "step-1"
    before = sorted(os.listdir(step))
    expect_loud(lambda: fsdp.export_safetensors(tmp_path, step), "the folder is a checkpoint", "folder of its own")
    expect_loud(lambda: fsdp.export_safetensors(tmp_path, tmp_path), "root of checkpoints", "folder of its own")
    assert sorted(os.listdir(step)) == before and os.listdir(tmp_path) == ["step-1"]
    (path,) = fsdp.export_safetensors(tmp_path, tmp_path / "hf")
    assert fsdp.load_safetensors(nn.Linear(3, 3), tmp_path / "hf").missing == [] and os.path.exists(path)
