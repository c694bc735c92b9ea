"""Step times of all contenders, interleaved: each round gives every contender one step, in an order that rotates.

A machine that gets busier or slower does so for all of them within a round, so ratios are taken within rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .contenders import Contender
from .models import Case

# What is measured in each step, in milliseconds. `host` is the CPU time of the main thread alone, where
# Python and autograd run: collectives wait and add in threads of their own.
QUANTITIES = ("step", "forward_backward", "optimizer", "host", "host_forward_backward")


@dataclass
class Clock:
    """Milliseconds of one contender, one entry per round."""

    rounds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in QUANTITIES})

    def measure(self, contender: Contender, batch: torch.Tensor) -> None:
        start, start_cpu = time.perf_counter(), time.thread_time()
        contender.forward_backward(batch)
        middle, middle_cpu = time.perf_counter(), time.thread_time()
        contender.update()
        stop, stop_cpu = time.perf_counter(), time.thread_time()
        seconds = (stop - start, middle - start, stop - middle, stop_cpu - start_cpu, middle_cpu - start_cpu)
        for name, value in zip(QUANTITIES, seconds, strict=True):
            self.rounds[name].append(1000 * value)


def measure(contenders: list[Contender], case: Case, rounds: int, warm_up: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by contender, quantity and round; wall times of the slowest rank, host times averaged over ranks.

    Every rank calls it.
    """
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    clocks = {contender.name: Clock() for contender in contenders}
    for number in range(-warm_up, rounds):
        if number == 0:
            gc.collect()
            gc.freeze()  # what was built stays out of the collections that steps trigger
        batch = case.make_batch(generator)
        first = number % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            dist.barrier()
            if number < 0:
                Clock().measure(contender, batch)
            else:
                clocks[contender.name].measure(contender, batch)
    gc.unfreeze()
    mine = torch.tensor([clock.rounds[name] for clock in clocks.values() for name in QUANTITIES], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)  # not all_gather_object, which needs numpy
    everyone = torch.stack(ranks).view(len(ranks), len(clocks), len(QUANTITIES), rounds)
    return {
        name: {
            quantity: _over_ranks(quantity, everyone[:, position, row]).tolist()
            for row, quantity in enumerate(QUANTITIES)
        }
        for position, name in enumerate(clocks)
    }


def _over_ranks(quantity: str, values: torch.Tensor) -> torch.Tensor:
    return values.mean(0) if quantity.startswith("host") else values.amax(0)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def paired_ratios(values: list[float], reference: list[float]) -> Spread:
    """Spread of the ratio within each round."""
    return Spread.of([value / other for value, other in zip(values, reference, strict=True)])
