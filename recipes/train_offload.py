"""The same training with everything in place, with shards in host memory, and with optimizer state on a disk.

For each lever it trains a few steps in a process of its own and prints its losses (the same), the memory it takes and
the time of a step, and then a chart.

    python recipes/train_offload.py                         files go to a temporary directory here
    python recipes/train_offload.py --path /mnt/nvme0 --blocks 32
    torchrun --standalone --nproc-per-node 2 recipes/train_offload.py --only nvme    one lever, sharded
    python recipes/train_offload.py --plot offload.png      needs matplotlib (the extra `plot`)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdplite as fsdp
from fsdplite.events import format_bytes

LEVERS = ("none", "params in host memory", "optimizer in host memory", "nvme", "params in host memory, nvme")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--blocks", type=int, default=24, help="blocks of the model")
    add("--width", type=int, default=512, help="channels")
    add("--steps", type=int, default=4, help="steps of each run")
    add("--path", help="directory for files of optimizer state, on the disk that is to be used")
    add("--buffer-mib", type=int, default=1, help="size of a buffer of state in MiB")
    add("--only", choices=LEVERS, help="run this one in this process")
    add("--json", action="store_true", help="JSON lines")
    add("--plot", metavar="FILE", help="write the chart there, with matplotlib")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def offload_of(lever: str, args: argparse.Namespace, folder: str) -> fsdp.Offload | None:
    """The lever as `fsdp_wrap` takes it."""
    if lever == "none":
        return None
    files = {"path": folder, "buffer_bytes": args.buffer_mib * 2**20} if "nvme" in lever else {}
    return fsdp.Offload(
        params="cpu" if "params" in lever else None,
        optimizer="nvme" if "nvme" in lever else "cpu" if "optimizer" in lever else None,
        **files,
    )


def memory_bytes(device: torch.device) -> dict[str, int]:
    """What the process holds: of the device where there is one, and of host memory that no file stands behind."""
    found = {}
    if device.type == "cuda":
        found["device_bytes"] = torch.cuda.memory_allocated(device)
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="ascii") as file:
            found["host_bytes"] = next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
    return found


def train(lever: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    device = fsdp.init_distributed()
    warm = nn.Linear(8, 8, device=device)  # what a process loads once does not count
    warm(torch.ones(1, 8, device=device)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    before = memory_bytes(device)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.blocks))).to(device)
    offload = offload_of(lever, args, folder)
    fsdp.fsdp_wrap(model, fsdp.by_class(Block), offload=offload)
    if offload is None or offload.optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=1e-3)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses, seconds = [], []
    for step in range(args.steps):
        x = torch.randn(32, args.width, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        optimizer.zero_grad()
        losses.append(loss.item())
    held = {key: count - before[key] for key, count in memory_bytes(device).items()}
    row = {"lever": lever, **held, "update_ms": min(seconds) * 1e3, "losses": losses}
    if hasattr(optimizer, "close"):
        optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return row if rank == 0 else {}


def in_a_process(lever: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A run whose memory is its own. Freed memory goes back to the system at once, so that it is not counted."""
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--only", lever, "--json", "--path", folder]
    for name in ("blocks", "width", "steps", "buffer_mib"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(row: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(row), flush=True)
        return
    memory = ", ".join(f"{format_bytes(row[k])} of {k[:-6]} memory" for k in ("device_bytes", "host_bytes") if k in row)
    print(f"{row['lever']:>28}: {memory or 'memory is not known here'}, update {row['update_ms']:.1f} ms, "
          f"last loss {row['losses'][-1]:.6f}", flush=True)  # fmt: skip


def chart(rows: list[dict[str, Any]], key: str, width: int = 40) -> str:
    most = max(row[key] for row in rows)
    return "\n".join(
        f"{row['lever']:>28} {'█' * max(1, round(width * row[key] / most))} {format_bytes(row[key])}" for row in rows
    )


def plot(rows: list[dict[str, Any]], key: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3))
    bars = axes.barh([row["lever"] for row in rows], [row[key] / 2**20 for row in rows])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()  # the first at the top, as in the table
    axes.margins(x=0.1)
    axes.set_xlabel(f"MiB of {key[:-6]} memory")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    args = options()
    with tempfile.TemporaryDirectory(prefix="fsdplite-state-", dir=os.getcwd()) if args.path is None else Given(
        args.path
    ) as folder:
        if args.only:
            row = train(args.only, args, folder)
            if row:
                show(row, args)
            return
        rows = []
        for lever in LEVERS:
            rows.append(in_a_process(lever, args, folder))
            show(rows[-1], args)
    if any(row["losses"] != rows[0]["losses"] for row in rows):
        raise SystemExit("the losses differ")
    key = "device_bytes" if "device_bytes" in rows[0] else "host_bytes"
    if not args.json and key in rows[0]:
        print(f"the same losses in all runs\n\n{key[:-6]} memory after {args.steps} steps, above the start\n" + chart(rows, key))
    if args.plot:
        plot(rows, key, args.plot)


class Given:
    """A directory of the user's, which stays."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> str:
        return self._path

    def __exit__(self, *exc: object) -> None:
        return None


if __name__ == "__main__":
    main()
