"""Trains a byte-level GPT, sharded, on text that every machine has: the sources of Python's own standard library.

Read it from top to bottom: data, model, wrap, loop. The only lines that know about sharding are in `main` under "Wrap".

    python recipes/train_gpt.py                                            one rank
    torchrun --standalone --nproc-per-node 2 recipes/train_gpt.py          two ranks on this machine
    torchrun --standalone --nproc-per-node 2 recipes/train_gpt.py --json   JSON lines for a program to read

With `--save DIR` it leaves checkpoints, and with `--resume` beside it goes on from the newest, on any number of ranks.
Every rank count and stage sees the same global batches, so their losses can be laid side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import resource
import sys
import sysconfig
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import fsdplite as fsdp
from fsdplite.events import Event

# ------------------------------------------------------------------------------------------------------------- config

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class Size:
    """The shape of a model: `layers` blocks of `width` channels and `heads` attention heads."""

    layers: int
    width: int
    heads: int


SIZES = {"tiny": Size(2, 32, 2), "small": Size(4, 128, 4), "medium": Size(8, 384, 6), "large": Size(12, 768, 12)}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="small", help="model size")
    add("--block", type=int, default=128, help="bytes of context")
    add("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="compute dtype; the optimizer always sees fp32")
    add("--policy", choices=("block", "linear", "whole"), default="block", help="units: blocks; Linears too; the model")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--batch", type=int, default=16, help="rows in one step, over all ranks")
    add("--accumulation", type=int, default=1, help="backward passes that a step is split into")
    add("--lr", type=float, default=4e-3, help="highest learning rate")
    add("--lr-steps", type=int, default=0, help="length of its schedule; 0 is the resumed run's, or else --steps")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0, help="of weights, batches and sample")
    add("--interval", type=int, default=50, help="steps between two reports")
    add("--sample", type=int, default=300, help="bytes of text to generate at the end")
    add("--save", metavar="DIR", help="where checkpoints go: the last step's, and the one before")
    add("--save-every", type=int, default=0, metavar="N", help="steps between checkpoints; 0 saves at the end alone")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --save, if there is one")
    add("--threads", type=int, default=0, help="CPU threads of a rank; 0 shares the cores among the ranks")
    add("--json", action="store_true", help="report as JSON lines")
    args = parser.parse_args()
    least = {"block": 1, "steps": 1, "batch": 1, "accumulation": 1, "interval": 1, "lr_steps": 0, "save_every": 0}
    for name, minimum in least.items():
        if getattr(args, name) < minimum:
            parser.error(f"--{name.replace('_', '-')}: expected at least {minimum}, found {getattr(args, name)}")
    if (args.resume or args.save_every) and not args.save:
        parser.error("--resume and --save-every: expected --save DIR beside them")
    return args


# --------------------------------------------------------------------------------------------------------------- data


def source_files() -> list[Path]:
    """The standard library's modules, tests and installed packages left out, in an order that mixes its subjects."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}  # encodings: just tables
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: (zlib.crc32(path.relative_to(root).as_posix().encode()), path))


def split_files(max_bytes: int = 6_000_000, held_out_fraction: float = 0.1) -> tuple[list[Path], list[Path]]:
    """(train files, held-out files), at most `max_bytes` together. A file is in one of them, never cut between both."""
    train: list[Path] = []
    held_out: list[Path] = []
    total = 0
    for path in source_files():
        total += path.stat().st_size
        if total > max_bytes:
            break
        (held_out if total <= held_out_fraction * max_bytes else train).append(path)
    return train, held_out


def read_bytes(files: list[Path]) -> torch.Tensor:
    """All files end to end, one uint8 element per byte."""
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def unigram_entropy(text: torch.Tensor) -> float:
    """Nats per byte for who knows how often each byte occurs and nothing about their order: the loss to beat."""
    share = torch.bincount(text.int(), minlength=VOCABULARY).double() / len(text)
    share = share[share > 0]
    return -(share * share.log()).sum().item()


@dataclass(frozen=True)
class Batches:
    """Draws the rows of any global batch by its number, and gives this rank its part of them."""

    text: torch.Tensor
    block: int
    rows: int
    microbatches: int
    seed: int
    rank: int
    world_size: int
    device: torch.device

    def __call__(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # All ranks draw the same rows, whatever their count, and each then keeps its own: runs stay comparable.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        starts = torch.randint(len(self.text) - self.block, (self.rows,), generator=generator)
        windows = self.text[starts[:, None] + torch.arange(self.block + 1)].long()
        for rows in windows.chunk(self.microbatches):
            mine = rows.chunk(self.world_size)[self.rank].to(self.device)
            yield mine[:, :-1], mine[:, 1:]


# -------------------------------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer, and the natural unit: gathered just before it runs, freed right after."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(approximate="tanh"), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size: Size, block: int) -> None:
        super().__init__()
        self.block = block
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(block, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied: stored, gathered and updated once
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block_module in self.blocks:  # each layer adds to the residual stream twice: keep its variance
            nn.init.normal_(block_module.attention.out.weight, std=0.02 / math.sqrt(2 * size.layers))
            nn.init.normal_(block_module.mlp[2].weight, std=0.02 / math.sqrt(2 * size.layers))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats per byte."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> str:
        """Continues the prompt. All ranks draw with the same seed, so all of them write the same text."""
        device = next(self.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            last = self.logits(tokens[:, -self.block :])[:, -1].float().cpu()
            byte = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, byte.to(device)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


# ------------------------------------------------------------------------------------------------------------- reports


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def live_tensor_bytes(device: torch.device) -> int:
    """Bytes of all tensors alive in this process: on CUDA the allocator knows, elsewhere ask the garbage collector."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def peak_bytes(device: torch.device) -> int:
    """The most memory held at once: by tensors on CUDA, by the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Report:
    """What rank 0 says: a live bar on a terminal, one line per interval elsewhere, JSON lines for programs."""

    def __init__(self, steps: int, speaks: bool, as_json: bool) -> None:
        self.speaks, self.as_json = speaks, as_json
        self.live = None
        if speaks and not as_json and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            self.live = Progress(MofNCompleteColumn(), BarColumn(20), "{task.description}", TimeElapsedColumn())
            self.task = self.live.add_task("starting", total=steps)
            self.megabytes = self.live.add_task("", total=None, visible=False)
            self.live.start()

    def say(self, event: str, text: str, **fields: object) -> None:
        """One event: `fields` for a program, `text` for a person."""
        if self.speaks and self.as_json:
            print(json.dumps({"event": event, **fields}), flush=True)
        elif self.live is not None:
            self.live.console.print(text, highlight=False, markup=False)
        elif self.speaks:
            print(text, flush=True)

    def advance(self, steps: int, text: str, *values: torch.Tensor) -> None:
        if self.live is not None:  # without a bar no value has to leave its device
            self.live.update(self.task, advance=steps, description=text.format(*values))

    def bytes_of(self, what: str, model: nn.Module) -> contextlib.AbstractContextManager:
        """A second bar while a checkpoint is written or read: the engine's events tell how far rank 0's part is."""
        if self.live is None:
            return contextlib.nullcontext()

        def listen(event: Event) -> None:
            if event.kind in ("save", "load"):
                self.live.reset(self.megabytes, total=event.bytes / 1e6, description=what, visible=True)
            elif event.kind in ("written", "read"):
                self.live.advance(self.megabytes, event.bytes / 1e6)
        return fsdp.trace(model, on_event=listen)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


# --------------------------------------------------------------------------------------------------------- checkpoints


def save(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Each rank writes its slice. Batches are drawn by number, so the step is also the position in the data."""
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    extra = {"lr_steps": args.lr_steps}
    fsdp.save_checkpoint(args.save, model, optimizer, step=step, extra=extra, per_rank={"rng": rng}, keep=2)


def resume(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint, if there is one. Returns how many steps are done."""
    if fsdp.latest_step(args.save) is None:
        return 0
    loaded = fsdp.load_checkpoint(args.save, model, optimizer)
    args.lr_steps = args.lr_steps or loaded.extra["lr_steps"]
    if loaded.per_rank:  # a rank that the saving run did not have keeps the state it was seeded with
        torch.set_rng_state(loaded.per_rank["rng"]["cpu"])
        if torch.cuda.is_available() and "cuda" in loaded.per_rank["rng"]:
            torch.cuda.set_rng_state(loaded.per_rank["rng"]["cuda"])
    return loaded.step


# ---------------------------------------------------------------------------------------------------------------- loop


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Up over the first 50 steps (a quarter of a short run), then down along a cosine to a tenth."""
    warm_up = max(1, min(50, args.lr_steps // 4))
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, args.lr_steps - warm_up))
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, count: int = 4) -> float:
    """The mean loss on the same held-out rows every time."""
    model.eval()
    losses = [model(tokens, targets) for number in range(count) for tokens, targets in batches(number)]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


def main() -> None:
    args = options()
    device = fsdp.init_distributed()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if args.batch % (world_size * args.accumulation):
        ways = f"{world_size} ranks x {args.accumulation} microbatches"
        raise SystemExit(f"--batch: expected a multiple of {ways}, found {args.batch}")
    # Ranks on one machine share its cores; torchrun alone would give each of them a single thread.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(args.threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    torch.manual_seed(args.seed)

    # Data
    train_files, held_out_files = split_files()
    train_text, held_out_text = read_bytes(train_files), read_bytes(held_out_files)
    place = {"block": args.block, "rows": args.batch, "rank": rank, "world_size": world_size, "device": device}
    train_batches = Batches(train_text, microbatches=args.accumulation, seed=args.seed + 1, **place)
    held_out_batches = Batches(held_out_text, microbatches=1, seed=0, **place)
    entropy = unigram_entropy(train_text)

    # Model
    before_bytes = live_tensor_bytes(device)
    model = GPT(SIZES[args.size], args.block).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    # Norms and biases are not pulled to zero. Wrapping keeps the Parameter objects, so this could also stand below it.
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]

    # Wrap: from here on each rank holds its slice of every unit, and a unit is whole only while it runs.
    policy = {"block": fsdp.by_class(Block), "linear": fsdp.by_class(Block, nn.Linear), "whole": None}[args.policy]
    fsdp.fsdp_wrap(model, policy, stage=args.stage, precision=args.precision, forward_methods=("generate",))

    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))

    report = Report(args.steps, speaks=rank == 0, as_json=args.json)
    with report.bytes_of("MB loaded", model):
        first = resume(args, model, optimizer) if args.resume else 0
    args.lr_steps = args.lr_steps or args.steps
    if first >= args.steps:
        report.close()
        raise SystemExit(f"--steps: expected more than the {first} that {args.save} has behind it, found {args.steps}")
    report.advance(first, "starting")
    report.say(
        "start",
        f"{args.size} GPT, {parameters:,} parameters, stage {args.stage}, {args.precision}, "
        f"{world_size} rank(s) on {device.type}\n"
        f"{len(train_files)} files to train on ({len(train_text):,} bytes), "
        f"{len(held_out_files)} held out ({len(held_out_text):,} bytes)\n"
        f"unigram entropy {entropy:.3f} nats per byte: the loss of knowing only how often each byte occurs",
        parameters=parameters, world_size=world_size, unigram_entropy=entropy, train_bytes=len(train_text),
        held_out_bytes=len(held_out_text), **vars(args),
    )
    if first:
        report.say("resumed", f"resumed from {args.save} after step {first}", step=first, path=args.save)

    # Loop
    started = interval_started = time.perf_counter()
    interval_tokens = rest_bytes = 0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        step_loss = torch.zeros((), device=device)
        for tokens, targets in train_batches(step):
            loss = model(tokens, targets) / args.accumulation
            loss.backward()
            step_loss += loss.detach()
        norm = model.clip_grad_norm_(args.clip)
        optimizer.step()
        optimizer.zero_grad()
        interval_tokens += args.batch * args.block

        last = step + 1 == args.steps
        if step == first + 1 or (last and not rest_bytes):  # by now the optimizer has its state
            del tokens, targets, loss
            rest_bytes = live_tensor_bytes(device) - before_bytes
        report.advance(1, "loss {:.3f}  norm {:.2f}", step_loss, norm)
        if (step + 1) % args.interval == 0 or last:
            tokens_per_s = interval_tokens / (time.perf_counter() - interval_started)
            train_loss, held_out_loss = mean_over_ranks(step_loss), evaluate(model, held_out_batches)
            peak = peak_bytes(device)
            report.say(
                "step",
                f"step {step + 1:5d}  loss {train_loss:.3f}  held-out {held_out_loss:.3f}  norm {norm:.2f}  "
                f"{tokens_per_s:,.0f} tokens/s  at rest {rest_bytes / 1e6:.1f} MB  peak {peak / 1e6:.0f} MB",
                step=step + 1, loss=train_loss, held_out_loss=held_out_loss, grad_norm=norm.item(),
                lr=learning_rate(step, args), tokens_per_s=tokens_per_s, rest_bytes=rest_bytes, peak_bytes=peak,
            )
        if args.save and (last or (args.save_every and (step + 1) % args.save_every == 0)):
            with report.bytes_of("MB saved", model):
                save(args, model, optimizer, step + 1)
            report.say("saved", f"saved step {step + 1} in {args.save}", step=step + 1, path=args.save)
        if step == first or (step + 1) % args.interval == 0:  # the first step also loads and allocates: not timed
            interval_started, interval_tokens = time.perf_counter(), 0
    trained_s = time.perf_counter() - started
    report.close()

    # A sample. Every rank takes part: a sharded model is gathered by all of its ranks or by none.
    sample = model.generate(b"def ", args.sample, args.seed) if args.sample else ""
    report.say(
        "done",
        f"{trained_s:.0f} s; held-out loss {held_out_loss:.3f} nats per byte, unigram entropy {entropy:.3f}"
        + (f"\n\n{sample}" if sample else ""),
        seconds=trained_s, held_out_loss=held_out_loss, unigram_entropy=entropy, sample=sample,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
