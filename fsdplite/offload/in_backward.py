"""Updates that start in backward: a unit's as soon as its gradient is final, on a thread beside the rest of backward.

Known as optimizer in backward. A gradient that has been used is freed, so gradients of few units are alive at once.
Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023; the overlap with
backward is that of Ren et al., "ZeRO-Offload", 2021.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from .. import events
from ..errors import ConfigError, GradientError, OffloadError
from ..flat_param import FlatParameter
from ..order import Pass
from ..schedule import Schedule
from ..unit import UnitState
from .homes import Home
from .stream import Job, StepReport, Workers

if TYPE_CHECKING:
    from .optimizer import OffloadedOptimizer

__all__ = ["UpdatesInBackward"]


class UpdatesInBackward:
    """What the schedule tells the optimizer in backward.

    A gradient is final when the record of the last backward has no further use of its unit. That holds on all ranks
    alike, and a use that comes all the same is an error. When backward returns, so have the updates that it started.

    Args:
        optimizer: Weak: it owns this object.
        schedule: Of the model.
    """

    def __init__(self, optimizer: OffloadedOptimizer, schedule: Schedule) -> None:
        if schedule.updates() is not None:
            raise ConfigError(
                "another optimizer of this model updates in backward",
                expected="one optimizer with in_backward=True",
                cure="call close() on the other one, or give one optimizer all parameters, in groups",
            )
        self._optimizer = weakref.ref(optimizer)
        self._schedule = weakref.ref(schedule)
        self._running: OffloadedOptimizer | None = None  # kept alive while its thread may work
        self.workers = Workers("fsdplite-update", 1)
        self._queue: deque[tuple[Home, torch.Tensor]] = deque()
        self._jobs: list[Job] = []
        self._begun: set[int] = set()  # homes
        self._final: set[int] = set()  # units
        self._has_reduced = False
        self._awaits_step = False
        self._report = StepReport()
        self._failure: Exception | None = None
        schedule.updates = weakref.ref(self)

    # ------------------------------------------------------------------ in backward

    def reduced(self, flat: FlatParameter, current: Pass | None) -> None:
        """A gradient shard has been summed. Start its update if nothing more can be added to it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        unit = flat.unit
        if self._awaits_step:
            raise GradientError(
                "a backward began before optimizer.step() had ended the last one, and that one has updated parameters",
                expected="one synchronised backward per step, because of in_backward=True",
                unit=flat.unit_name,
                rank=flat.groups.rank,
                cure="accumulate under no_sync(), or make the optimizer without in_backward",
            )
        if not self._has_reduced:
            self._has_reduced = True
            if optimizer.is_whole:
                self._prepare(optimizer)
        if current is None or not current.is_over_for(unit.index) or flat.aliases_shard:
            return
        self._final.add(unit.index)
        home = optimizer.home_of(flat)
        if home is None or not optimizer.is_whole or not all(optimizer.are_grouped(flat)):
            return
        gradient = flat.gradient.take_final()
        if gradient is None:
            return
        if events.active is not None:
            events.active.emit("update", flat.unit_name, gradient.numel() * gradient.element_size())
        self._running = optimizer
        self._begun.add(id(home))
        self._queue.append((home, gradient))
        self._jobs.append(self.workers.submit(self._work))

    def _prepare(self, optimizer: OffloadedOptimizer) -> None:
        try:
            optimizer.settle()
        except Exception as problem:  # step() says it, on all ranks
            self._failure = problem
        optimizer.number_groups()

    @property
    def is_whole(self) -> bool:
        """Whether no update in backward has failed."""
        return self._failure is None

    def _work(self) -> None:
        """On the thread: all that is waiting passes through the buffers as one stream."""
        began = time.perf_counter()
        waiting = []
        while self._queue:
            waiting.append(self._queue.popleft())
        if not waiting or self._failure is not None:
            return
        try:
            with torch.no_grad():
                self._running.update_reduced(waiting, self._report)
        except Exception as problem:
            self._failure = problem
        self._report.wall_s += time.perf_counter() - began

    def refuse_use(self, unit: UnitState) -> None:
        """Raise if a unit is about to be gathered or reduced again after its update."""
        if unit.index not in self._final:
            return
        raise GradientError(
            "a unit is used again in a backward that has updated it: the last backward had no such use",
            unit=unit.name,
            rank=unit.groups.rank,
            cure="make the optimizer without in_backward where the order of a backward changes from step to step",
        )

    def finish(self) -> None:
        """Backward is over: wait for its updates. From here on gathers bring the new values, on all ranks alike."""
        self._awaits_step |= self._has_reduced
        self._settle()

    def abandon(self) -> None:
        """Backward died. What it has updated cannot be taken back."""
        if self._begun and self._failure is None:
            self._failure = OffloadError(
                "a backward ended in an error after it had updated some units and others not",
                cure="load a checkpoint into the model and this optimizer",
            )
        self._settle()

    def _settle(self) -> None:
        for job in self._jobs:
            job.settle()
        optimizer = self._optimizer()
        if optimizer is not None and self._has_reduced:
            for home in optimizer.homes():
                if id(home) not in self._begun:
                    home.begin()
                if self._failure is None:
                    home.end()
                home.flat.mark_updated()
        self._jobs.clear()
        self._queue.clear()
        self._begun.clear()
        self._final.clear()
        self._running = None
        self._has_reduced = False

    # ------------------------------------------------------------------ the rest of a step

    def end_step(self) -> None:
        """``step()`` ends the step. Raises what went wrong in backward."""
        self._awaits_step = False
        if self._failure is not None:
            raise self._failure

    def take_report(self) -> StepReport:
        """What the updates in backward moved."""
        report, self._report = self._report, StepReport()
        return report

    def forget_failure(self) -> None:
        """A checkpoint was loaded."""
        self._failure = None
        self._awaits_step = False

    def refusal(self, what: str, unit: str) -> GradientError:
        """The error for a call that needs all gradients before the first update."""
        return GradientError(
            f"{what} needs the gradients of all units, and this optimizer updates each unit in backward",
            unit=unit,
            cure="make the optimizer without in_backward: fsdp.offloaded(cls, model, ...)",
        )

    def close(self) -> None:
        """The model has no such optimizer any more."""
        schedule = self._schedule()
        if schedule is not None and schedule.updates() is self:
            schedule.updates = lambda: None
