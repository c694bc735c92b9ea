"""Wraps a small model by hand, unit by unit, and prints every event of one training step: what sharding does, and when.

    python recipes/wrap_by_hand.py                                       one rank: the same events, no communication
    torchrun --standalone --nproc-per-node 2 recipes/wrap_by_hand.py     two ranks

`train_gpt.py` makes the same kind of units with one call and a policy.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdplite as fsdp


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    device = fsdp.init_distributed()  # reads what torchrun set; without torchrun this is a world of one rank
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = Model(width=64, layers=3).to(device)

    # Inside out: each call takes every parameter below it that no earlier call took. So the blocks come first, one unit
    # each, and the model takes what is left: embed and head. They are used at both ends of a step, which is why the
    # root keeps them gathered from its forward to the end of its backward.
    for block in model.blocks:
        fsdp.fsdp_wrap(block)
    fsdp.fsdp_wrap(model)

    # Nothing was replaced: same classes, same names, same Parameter objects. Only, each holds this rank's slice now. The
    # cut goes through the unit as a whole, so one parameter may lie on a single rank and another one on both.
    assert isinstance(model.blocks[0], Block) and isinstance(model.blocks[0], fsdp.FSDPUnit)
    if rank == 0:
        print(fsdp.summary(model))
        for name, parameter in model.blocks[0].named_parameters():
            print(f"blocks.0.{name}: {parameter.numel():,} of {parameter.full_shape.numel():,} elements on rank 0")
        print()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + rank)  # every rank its own data, as in any data parallel run
    tokens = torch.randint(256, (8, 33), generator=generator).to(device)

    def step() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step()  # the first step finds out in which order units run; prefetch follows that order from the second one on

    # Look in the trace for: block 1 being gathered while block 0 runs, the same from the other end in backward, and
    # each reduce-scatter starting as soon as its unit's last gradient is there, while the next unit is still at work.
    with fsdp.trace(model) as trace:
        step()
    if rank == 0:
        print(trace)

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
