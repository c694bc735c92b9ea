"""The same training with and without recomputation: the same losses, less memory, more time.

For each number of blocks and each lever it trains a few steps and prints what a step holds between forward and
backward, its peak, and its time; then a chart of the bytes against the number of blocks.

    python recipes/train_recompute.py
    torchrun --standalone --nproc-per-node 2 recipes/train_recompute.py --depths 4 16 --json
    python recipes/train_recompute.py --plot recompute.png     needs matplotlib (the extra `plot`)
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsdplite as fsdp
from fsdplite.events import format_bytes


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--depths", type=int, nargs="+", default=[4, 16, 64], help="numbers of blocks")
    add("--width", type=int, default=64, help="channels")
    add("--rows", type=int, default=2048, help="rows of a batch on each rank")
    add("--steps", type=int, default=3, help="steps of each run; the last is measured")
    add("--budget", default="40MB", help="of recompute_within")
    add("--json", action="store_true", help="one JSON line per run")
    add("--plot", metavar="FILE", help="write the chart there, with matplotlib")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made under it that are alive: on a GPU `torch.cuda.memory_allocated` would tell."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, ref in list(self._storages.items()):
            storage = None if ref.expired() else torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def train(depth: int, lever: Any, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A short run. What it reports is of its last step."""
    torch.manual_seed(0)
    model = Net(depth, args.width).to(device)
    fsdp.fsdp_wrap(model, fsdp.by_class(Block), recompute=lever)  # the only line that differs between runs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    found: dict[str, Any] = {}
    for step in range(args.steps):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(args.rows, args.width, device=device)
        target = x.sum(1, keepdim=True)
        is_last = step + 1 == args.steps
        began = time.perf_counter()
        with LiveBytes() if is_last else torch.enable_grad() as live:
            loss = (model(x) - target).square().mean()
            if is_last:
                found["held_bytes"] = live.now()
            loss.backward()
            if is_last:
                found["peak_bytes"] = live.peak
        if not is_last:
            found["step_ms"] = (time.perf_counter() - began) * 1e3  # counting bytes takes time of its own
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"depth": depth, **found, "losses": losses}


def chart(rows: list[dict[str, Any]], width: int = 40) -> str:
    """Bytes between forward and backward, as bars."""
    most = max(row["held_bytes"] for row in rows)
    return "\n".join(
        f"{row['lever']:>16} {row['depth']:4d} blocks  {'█' * max(1, round(width * row['held_bytes'] / most))} "
        f"{format_bytes(row['held_bytes'])}"
        for row in rows
    )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for number, lever in enumerate(dict.fromkeys(row["lever"] for row in rows)):
        own = [row for row in rows if row["lever"] == lever]
        # Thinner from line to line: those that coincide stay visible.
        style = {"marker": "o", "markersize": 10 - 2 * number, "linewidth": 4 - number}
        axes.loglog([r["depth"] for r in own], [r["held_bytes"] / 2**20 for r in own], label=lever, base=2, **style)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xticks(sorted({row["depth"] for row in rows}))
    axes.set_xlabel("blocks")
    axes.set_ylabel("MiB between forward and backward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    args = options()
    device = fsdp.init_distributed()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    levers = {
        "none": None,
        "each block": fsdp.by_class(Block),
        "sqrt": "sqrt",
        f"within {args.budget}": fsdp.recompute_within(args.budget),
    }
    rows = []
    for depth in args.depths:
        for name, lever in levers.items():
            row = {"lever": name, **train(depth, lever, args, device)}
            row["same_losses"] = row["losses"] == (rows[-1]["losses"] if name != "none" else row["losses"])
            rows.append(row)
            if is_first and args.json:
                print(json.dumps(row), flush=True)
            elif is_first:
                print(
                    f"{depth:3d} blocks, {name:>14}: {format_bytes(row['held_bytes']):>10} held, "
                    f"{format_bytes(row['peak_bytes']):>10} peak, {row['step_ms']:7.1f} ms, "
                    f"{'the same losses' if row['same_losses'] else 'OTHER LOSSES'}",
                    flush=True,
                )
    if is_first and not args.json:
        print("\nbytes between forward and backward\n" + chart(rows))
    if is_first and args.plot:
        plot(rows, args.plot)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
