"""One rank of a checkpoint benchmark: one pass. Started by ``launch``; rank 0 writes what was measured as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdplite as fsdp
from fsdplite.checkpoint import storage

from .memory import growth
from .state import State, by_fsdplite, by_fully_shard, bytes_in, layer_count, layers, parts_of
from .writers import Writers

QUANTITIES = ("raw", "save", "unchecked", "dcp", "copy", "stall")


def _over_ranks(values: list[float]) -> list[float]:
    """The slowest, or largest, rank's."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _empty(folder: Path) -> None:
    """An empty directory, and a disk with nothing left to do."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()
    dist.barrier()


def timing_pass(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Seconds by quantity and round, of the slowest rank. A first round is not counted."""
    ours = by_fsdplite(count)
    parts = parts_of(ours)
    writers = Writers(ours, by_fully_shard(count), parts)
    found: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for number in range(-1, rounds):
        turn = number % len(writers.all)
        for write in writers.all[turn:] + writers.all[:turn]:
            _empty(folder / "timing")
            gc.collect()
            for name, seconds in write(folder / "timing").items():
                if number >= 0:
                    found[name].append(seconds)
    _empty(folder / "timing")
    rank_bytes = bytes_in(parts)
    total = torch.tensor(rank_bytes)
    dist.all_reduce(total)
    return {"seconds": {name: _over_ranks(values) for name, values in found.items()}, "bytes": int(total)}


class _CountedReads(storage.FileSystem):
    """Counts every byte that is read: data, headers, manifest."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def read_at(self, file: storage.File, offset: int, into: memoryview) -> int:
        count = super().read_at(file, offset, into)
        self.bytes_read += count
        return count


def load_pass(folder: Path, count: int) -> dict[str, Any]:
    """Bytes that a rank reads as a share of those it holds, of the rank with the largest. Saves first if none has."""
    state = by_fsdplite(count)
    root = folder / "stored"
    dist.barrier()
    if fsdp.latest_step(root) is None:
        dist.barrier()
        fsdp.save_checkpoint(root, state.model, state.optimizer, step=1)
    needed = bytes_in(parts_of(state))
    with storage.using(_CountedReads()) as fs:
        fsdp.load_checkpoint(root, state.model, state.optimizer)
    return {"share": _over_ranks([fs.bytes_read / needed])[0], "bytes": needed}


def memory_pass(folder: Path, count: int, what: str) -> dict[str, Any]:
    """Growth of resident memory in one operation of a fresh process, of the rank with the largest."""
    if what == "export":
        with growth() as grown:
            fsdp.export_safetensors(folder / "stored" / "step-1", folder / "exported")
        return {"growth": grown[0], "shard": 0}
    if what == "import":
        model = fsdp.fsdp_wrap(layers(count), fsdp.by_class(torch.nn.Linear))
        dist.barrier()
        with growth() as grown:
            fsdp.load_safetensors(model, folder / "exported")
        return {"growth": _over_ranks([grown[0]])[0], "shard": 0}
    state: State = by_fsdplite(count)
    _empty(folder / "memory")
    with growth() as grown:
        is_background = what == "background"
        fsdp.save_checkpoint(
            folder / "memory", state.model, state.optimizer, step=1, background=is_background
        ).wait()
    return {"growth": _over_ranks([grown[0]])[0], "shard": bytes_in(parts_of(state))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", required=True)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="a file that does not exist yet")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.rendezvous}", rank=args.rank, world_size=args.world_size
    )
    count = layer_count(args.megabytes)
    if args.measure == "timing":
        found = timing_pass(args.folder, count, args.rounds)
    elif args.measure == "loads":
        found = load_pass(args.folder, count)
    else:
        found = memory_pass(args.folder, count, args.measure)
    if args.rank == 0:
        args.output.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
