"""The files themselves: headers that every reader accepts, checksums, ranges, and who writes what."""

from __future__ import annotations

import json
import random
import zlib

import pytest
import torch
from safetensors import safe_open

from fsdplite.checkpoint import manifest as contract
from fsdplite.checkpoint import safetensors_file as st
from fsdplite.checkpoint.dtypes import widens
from fsdplite.checkpoint.placement import written_ranges
from fsdplite.checkpoint.reading import BUFFER_BYTES, RankFile, Request, refuse_damage
from fsdplite.checkpoint.storage import FileSystem
from fsdplite.checkpoint.tensor_bytes import bytes_of
from fsdplite.checkpoint.values import decode_value, encode_value, pack, unpack
from fsdplite.checkpoint.writer import Part, write_rank_file
from fsdplite.errors import CheckpointError
from fsdplite.layout import FlatLayout


def odd_parts() -> list[Part]:
    torch.manual_seed(3)
    return [
        Part("a", "F32", torch.randn(7)),
        Part("ab.weight", "U8", torch.arange(5, dtype=torch.uint8)),
        Part("x" * 33, "F64", torch.randn(3, dtype=torch.float64)),
        Part("größe", "BF16", torch.randn(11).bfloat16()),
        Part("mask", "BOOL", torch.tensor([True, False, True])),
        Part("long", "F32", torch.randn(20_000)),
    ]


def test_K85_rank_file_header(tmp_path):
    path = tmp_path / "f.safetensors"
    parts = odd_parts()
    written = write_rank_file(FileSystem(), str(path), parts)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0 and raw[8:9] == b"{" and len(raw) == written.size_bytes
    text = raw[8 : 8 + length].decode()
    assert text.rstrip(" ").endswith("}")
    pairs = json.loads(text, object_pairs_hook=list)
    assert len({name for name, _ in pairs}) == len(pairs)
    header = json.loads(text)
    assert header.pop("__metadata__")["format"] == "pt"
    end = 0
    for entry in sorted(header.values(), key=lambda e: e["data_offsets"]):
        begin, stop = entry["data_offsets"]
        size = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1, "BOOL": 1}[entry["dtype"]]
        assert begin == end and begin % size == 0
        end = stop
    assert 8 + length + end == len(raw)
    with safe_open(str(path), "pt") as file:
        for part in parts:
            assert torch.equal(file.get_tensor(part.name), part.data)


def test_checksums_are_of_the_chunks(tmp_path):
    path = tmp_path / "f.safetensors"
    long = torch.randn(20_000)
    write_rank_file(
        FileSystem(), str(path), [Part("long", "F32", long), Part("b", "U8", torch.ones(2, dtype=torch.uint8))]
    )
    fs = FileSystem()
    file = fs.open(str(path))
    header = st.read_header(fs, file)
    fs.close(file)
    data = path.read_bytes()[header.size_bytes :]
    spec = header.tensors["long"]
    assert st.chunk_count(spec.size_bytes) == 4
    for chunk in range(4):
        start = spec.begin + chunk * st.CHUNK_BYTES
        expected = zlib.crc32(data[start : min(start + st.CHUNK_BYTES, spec.end)])
        assert header.chunk_checksum("long", chunk) == expected
    assert header.chunk_checksum("b", 0) == zlib.crc32(b"\1\1")


def test_many_small_tensors_are_few_writes(tmp_path):
    class Counting(FileSystem):
        writes = 0

        def write_at(self, file, offset, data):
            self.writes += 1
            return super().write_at(file, offset, data)

    fs = Counting()
    write_rank_file(fs, str(tmp_path / "f"), [Part(f"p{i}", "F32", torch.ones(3)) for i in range(500)])
    assert fs.writes == 2  # data, header


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: b"\xff" * 8 + raw[8:],
        lambda raw: raw[:8] + b" " + raw[9:],
        lambda raw: b"\x80\x04K\x01.",
        lambda raw: b"",
        lambda raw: raw.replace(b'"F32"', b'"F31"'),
        lambda raw: raw.replace(b"[7]", b"[6]"),
    ],
)
def test_damaged_headers_are_named(tmp_path, damage):
    path = tmp_path / "f.safetensors"
    write_rank_file(FileSystem(), str(path), odd_parts())
    path.write_bytes(damage(path.read_bytes()))
    fs = FileSystem()
    file = fs.open(str(path))
    with pytest.raises(CheckpointError, match="f.safetensors"):
        st.read_header(fs, file)
    fs.close(file)


def small_manifest() -> contract.Manifest:
    return contract.Manifest(
        step=7, world_size=2, mesh=(1, 2), run_id="ab", created=1.5,
        files=[contract.FileRecord(contract.rank_file(r, 2), 100, 80, 0xDEADBEEF) for r in range(2)],
        tensors={
            "w": contract.TensorRecord("F32", (5,), "sharded", (contract.Range(0, 0, 3), contract.Range(1, 3, 2))),
        },
        aliases={"v": "w"}, extra={"a": 1}, optimizer=None,
    )  # fmt: skip


def test_manifest_round_trip_and_every_flipped_bit():
    raw = contract.encode(small_manifest())
    assert contract.decode(raw, "m") == small_manifest()
    assert json.loads(raw)["tensors"]["w"]["ranges"] == [[0, 0, 3], [1, 3, 2]]
    for index in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[index] ^= 1 << bit
            with pytest.raises(CheckpointError, match="m"):
                contract.decode(bytes(flipped), "m")
    for cut in range(len(raw)):
        with pytest.raises(CheckpointError):
            contract.decode(raw[:cut], "m")


@pytest.mark.parametrize(
    "ranges", [[(0, 0, 3)], [(0, 0, 3), (1, 2, 3)], [(0, 0, 3), (0, 3, 2)], [(0, 0, 3), (2, 3, 2)], []]
)
def test_ranges_that_do_not_tile_are_refused(ranges):
    manifest = small_manifest()
    manifest.tensors["w"] = contract.TensorRecord("F32", (5,), "sharded", tuple(contract.Range(*r) for r in ranges))
    with pytest.raises(CheckpointError, match="'w'"):
        contract.encode(manifest)


def test_a_manifest_names_no_other_files():
    manifest = small_manifest()
    manifest.files[1] = contract.FileRecord("../../secret.safetensors", 100, 80, 0)
    with pytest.raises(CheckpointError, match="one file per rank"):
        contract.encode(manifest)


def test_intersect():
    tensor = small_manifest().tensors["w"]
    assert contract.intersect(tensor, 1, 4) == [contract.Piece(0, 1, 1, 2), contract.Piece(1, 0, 3, 1)]
    assert contract.intersect(tensor, 2, 2) == []


@pytest.mark.parametrize("shards,replicas", [(1, 1), (1, 4), (2, 2), (3, 1), (4, 3), (5, 7)])
@pytest.mark.parametrize("shapes", [[(7, 5), (5,)], [(1,)], [(), (0, 5), (3,), (17,)], [(2,), (13,), (1,), (1, 1)]])
def test_every_element_is_written_once(shards, replicas, shapes):
    layout = FlatLayout(shapes, world_size=shards, alignment=4)
    seen: dict[int, list[tuple[int, int]]] = {}
    counts = []
    for shard in range(shards):
        held = sum(high - low for low, high in (layout.local_range(i, shard) for i in range(len(shapes))))
        for replica in range(replicas):
            ranges = written_ranges(layout, range(len(shapes)), shard, replica, replicas)
            counts.append((held // replicas, sum(count for *_, count in ranges)))
            assert len({index for index, *_ in ranges}) == len(ranges)
            for index, first, count in ranges:
                seen.setdefault(index, []).append((first, first + count))
    assert all(least <= found <= least + 1 for least, found in counts)
    for index, slot in enumerate(layout.slots):
        end = 0
        for first, stop in sorted(seen.get(index, [])):
            assert first == end
            end = stop
        assert end == slot.numel


def test_values_round_trip():
    value = {
        "lr": 0.1, "betas": (0.9, (1, None)), "names": ["a", True], 3: {"__tuple__": 1}, "inf": [float("inf")],
        "rng": torch.arange(5, dtype=torch.uint8), "scalar": torch.tensor(2.5).bfloat16(), "empty": torch.empty(0, 3),
    }  # fmt: skip
    tensors: dict = {}
    tree = json.loads(json.dumps(encode_value(value, "extra", tensors), allow_nan=False))
    for found in (decode_value(tree, tensors, "extra"), unpack(pack(value, "per_rank"), "p", "per_rank")):
        assert list(found) == list(value)
        for key in ("lr", "betas", "names", 3, "inf"):
            assert found[key] == value[key] and type(found[key]) is type(value[key])
        for key in ("rng", "scalar", "empty"):
            assert torch.equal(found[key], value[key]) and found[key].dtype == value[key].dtype


@pytest.mark.parametrize("thing", [object(), {1, 2}, b"x", torch.float32, lambda: 0])
def test_values_that_need_code_are_refused_by_key(thing):
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\]"):
        encode_value({"a": [0, thing]}, "extra", {})


def test_widening():
    assert widens("BF16", "F32") and widens("F16", "F32") and widens("F8_E4M3", "F16") and widens("I32", "I64")
    assert widens("F32", "BF16") is False and widens("F16", "BF16") is False and widens("BF16", "F16") is False
    assert widens("F32", "I64") is None and widens("I64", "I32") is None and widens("BOOL", "U8") is None


@pytest.mark.parametrize("seed", range(8))
def test_any_ranges_are_read_right_and_sparsely(tmp_path, seed):
    generator = random.Random(seed)
    dtypes = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
    parts = []
    for index in range(generator.randint(1, 12)):
        name = generator.choice(list(dtypes))
        numel = generator.choice([1, 7, 300, 24 * 1024, 40_000, 1_000_003])
        data = torch.randint(0, 200, (numel,), dtype=torch.uint8).to(dtypes[name])
        parts.append(Part(f"t{index}", name, data))
    path = str(tmp_path / "f")
    written = write_rank_file(FileSystem(), path, parts)
    record = contract.FileRecord("f", written.size_bytes, written.header_bytes, written.header_crc32)
    for is_foreign in (False, True):
        file = RankFile(FileSystem(), path, None if is_foreign else record)
        requests, found, expected, most = [], {}, {}, 0
        for part in parts:
            low = generator.randint(0, part.data.numel() - 1)
            high = generator.randint(low + 1, part.data.numel())
            size = part.data.element_size()
            found[part.name] = bytearray((high - low) * size)
            expected[part.name] = bytes(bytes_of(part.data)[low * size : high * size])

            def take(offset, view, into=found[part.name]):
                into[offset : offset + len(view)] = view

            requests.append(Request(part.name, low * size, high * size, take))
            wanted = (high - low) * size
            most += wanted + (64 * 1024 if wanted < 2**20 else wanted // 20)
        file.read(requests, memoryview(bytearray(BUFFER_BYTES)), refuse_damage)
        file.close()
        assert found == expected and file.bytes_read <= most
