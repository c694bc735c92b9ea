"""``fsdp.auto``: how to wrap a model, chosen by plans and simulated steps.

Too fine a wrapping pays latency for every unit, too coarse a one holds large units in full and leaves nothing to hide
gathers behind. Which is which depends on links, arithmetic and memory; so candidates are planned, simulated and
compared. Wrapping by block is always one of them, and nothing that is slower than it, or larger where it does not fit,
is chosen.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from ..errors import ConfigError, FSDPError, PolicyError, UnknownOptionError
from ..events import format_bytes
from ..keywords import refuse_unknown
from ..policy import Policy, by_class
from ..recompute.budget import parse_bytes
from ..structure import tensors_in
from .blueprint import Named
from .boundaries import blocks_of, classes_of, ways_to_wrap
from .prediction import Plan, answer, apart
from .question import DEFAULTS, Question, ask
from .report import planned_for
from .simulation import simulate
from .timeline import Timeline
from .topology import Link, Topology

__all__ = ["Auto", "Choice", "auto"]

_CLOSE = 1.005  # steps this close are equal, and the smaller peak decides


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to wrap, planned and simulated.

    Attributes:
        name: What kind of units it makes.
        options: For ``fsdp_wrap``: ``policy``, ``prefetch``, ``reshard_after_forward``, ``recompute``.
    """

    name: str
    options: dict[str, Any]
    plan: Plan
    timeline: Timeline

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    @property
    def peak_bytes(self) -> int:
        return self.plan.peak_bytes

    def describe(self) -> str:
        """In a few words."""
        parts = [self.name, f"prefetch {self.options['prefetch']}"]
        if self.options["reshard_after_forward"] is not None:
            parts.append("root freed" if self.options["reshard_after_forward"] else "all kept")
        if self.options["recompute"] is not None:
            parts.append("blocks recomputed" if isinstance(self.options["recompute"], Policy) else "sqrt segments")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen and why; ``print`` explains it.

    Attributes:
        best: The chosen way.
        by_block: Wrapping by block with defaults, to compare with.
        considered: All that was simulated, fastest first.
        budget_bytes: Or None.
    """

    best: Candidate
    by_block: Candidate
    considered: tuple[Candidate, ...]
    budget_bytes: int | None

    @property
    def options(self) -> dict[str, Any]:
        """For ``fsdp_wrap(model, **choice.options)``."""
        return dict(self.best.options)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
        table.add_column("wrapping", overflow="fold")
        for heading in ("step", "exposed", "peak"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        shown = list(dict.fromkeys([self.best, self.by_block, *self.considered]))[:12]
        for candidate in shown:
            fits = self.budget_bytes is None or candidate.peak_bytes <= self.budget_bytes
            mark = "chosen" if candidate is self.best else "" if fits else "too large"
            times = (f"{seconds * 1e3:,.2f} ms" for seconds in (candidate.step_s, candidate.timeline.exposed_s))
            table.add_row(candidate.describe(), *times, format_bytes(candidate.peak_bytes), mark)
        console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=False, highlight=False)
        console.print(planned_for(self.best.plan), markup=False)
        console.print(table)
        console.print(self._reason(), markup=False)
        return console.file.getvalue()

    def _reason(self) -> str:
        best, base = self.best, self.by_block
        nothing = self.budget_bytes is not None and best.peak_bytes > self.budget_bytes
        verdict = "; nothing fits the budget: this is the smallest" if nothing else ""
        if best is base:
            return f"wrapping by block is best of {len(self.considered)} ways{verdict}"
        time = f"{100 * (best.step_s / base.step_s - 1):+.1f}% time" if base.step_s else "no time to compare"
        memory = f"{100 * (best.peak_bytes / base.peak_bytes - 1):+.1f}% memory"
        base_fits = self.budget_bytes is None or base.peak_bytes <= self.budget_bytes
        by_block = "wrapping by block" if base_fits else "wrapping by block, which does not fit the budget"
        return f"beside {by_block}: {time}, {memory}; {len(self.considered)} ways were simulated{verdict}"


class Auto(Policy):
    """What :func:`auto` returns: a policy, and :meth:`choose` for everything else."""

    def __init__(self, budget_bytes: int | None, topology: Topology, options: dict[str, Any]) -> None:
        self._budget_bytes = budget_bytes
        self._topology = topology
        self._options = options

    def knowing(self, **options: Any) -> Auto:
        """The same, for a model that runs like this; what :func:`auto` was given itself comes first."""
        own = self._options
        if "world_size" in own or "mesh" in own:
            options = {name: value for name, value in options.items() if name not in ("world_size", "mesh")}
        return Auto(self._budget_bytes, self._topology, options | own)

    def describe(self) -> str:
        given = [(tuple(t.shape), t.dtype) for t in tensors_in(self._options.get("inputs"))]
        rest = {name: value for name, value in sorted(self._options.items()) if name not in ("inputs", "loss_of")}
        return f"auto(budget={self._budget_bytes}, inputs={given}, {rest}, {self._topology})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Auto) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self.describe())

    def _identity(self) -> tuple[str, Any]:
        return self.describe(), self._options.get("loss_of")

    def bind(self, root: nn.Module) -> Policy:
        chosen = self.choose(root).options["policy"]
        return Named(()) if chosen is None else chosen.bind(root)

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        raise PolicyError("auto() has to see the whole model first", cure="pass it to fsdp_wrap or fsdp.plan")

    @apart
    def choose(self, model: Any) -> Choice:
        """Plan and simulate ways to wrap a model (a module, or what builds one), and pick one.

        Raises:
            ConfigError: An option given to :func:`auto` cannot be used.
        """
        options = dict(self._options)
        if "world_size" not in options and "mesh" not in options:
            options["world_size"] = _world_size()
        search = _Search(ask(model, options.pop("world_size", None), options), self._topology, self._budget_bytes)
        return search.run()


_NUMBERS = 5e10, 1e-5, 4e14  # bandwidth, latency, flops


def auto(
    *,
    budget: int | str | None = None,
    bandwidth: float = _NUMBERS[0],
    latency: float = _NUMBERS[1],
    flops: float = _NUMBERS[2],
    topology: Topology | None = None,
    **options: Any,
) -> Auto:
    """Let a cost model choose unit boundaries, prefetch, what is kept and what is recomputed.

    As a policy, ``fsdp_wrap(model, fsdp.auto(...))``, it chooses the units. ``fsdp.auto(...).choose(model)`` chooses
    and explains everything: ``fsdp_wrap(model, **choice.options)``.

    Args:
        budget: Memory of a rank, bytes or text such as ``"80GiB"``. None: only time counts.
        bandwidth: Bytes per second that a rank sends to others.
        latency: Seconds for a message between two ranks.
        flops: Achieved floating point operations per second of a rank.
        topology: Instead of the three: a whole :class:`~fsdplite.Topology`.
        options: As for ``fsdp.plan``, above all ``inputs=``, without which there is no computation to weigh against;
            ``world_size`` is that of the process group if left out.

    Raises:
        ConfigError, UnknownOptionError: An option cannot be used; says what can.
    """
    _refuse_unknown(options)
    if topology is None:
        # One rank a node: the bandwidth is what each rank has, wherever the others are.
        link = Link(bandwidth, latency)
        topology = replace(Topology(), ranks_per_node=1, flops=flops, intra=link, inter=link)
    elif (bandwidth, latency, flops) != _NUMBERS:
        raise ConfigError("bandwidth, latency and flops are those of the topology", cure="leave them out, or topology")
    if not isinstance(topology, Topology):
        raise ConfigError("topology is a Topology", expected="fsdp.Topology(...)", found=repr(topology))
    limit = None if budget is None else parse_bytes(budget, "a memory budget")
    return Auto(limit, topology, options)


_CHOSEN = ("policy", "prefetch", "reshard_after_forward", "recompute")


def _refuse_unknown(options: dict[str, Any]) -> None:
    for name in options:
        if name in _CHOSEN:
            raise UnknownOptionError(f"auto chooses {name} itself", cure=f"leave {name} out")
    known = ["budget", "bandwidth", "latency", "flops", "topology", "world_size", *DEFAULTS]
    refuse_unknown("auto", options, [name for name in known if name not in _CHOSEN])


def _world_size() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Search:
    def __init__(self, question: Question, topology: Topology, budget_bytes: int | None) -> None:
        self.question = question
        self.topology = topology
        self.budget_bytes = budget_bytes
        self.found: list[Candidate] = []

    def run(self) -> Choice:
        """Unit boundaries with every prefetch and what is kept; then recomputation of the best of them."""
        model = self.question.model
        blocks = blocks_of(model)
        policies = list(ways_to_wrap(model, blocks))
        self._watch_for(policy for _, policy in policies)
        for name, policy in policies:
            # One unit has nothing to prefetch, and keeps itself unless told not to.
            ways = [(p, r) for p in (1, 0, 2) for r in (None, True, False)] if policy else [(1, None), (1, True)]
            for prefetch, reshard in ways:
                self._try(name, policy, prefetch, reshard, None)
        by_block = self.found[0]
        if blocks and self.question.batch is not None and not self._fits(self._best(by_block)):
            smallest = sorted(self.found, key=lambda c: c.peak_bytes)[:2]
            for candidate in [*smallest, by_block]:
                for again in ("sqrt", by_class(*classes_of(blocks))):
                    self._try(**_fields(candidate), recompute=again)
        return Choice(
            best=self._best(by_block),
            by_block=by_block,
            considered=tuple(sorted(self.found, key=lambda c: c.step_s)),
            budget_bytes=self.budget_bytes,
        )

    def _watch_for(self, policies: Iterator[Policy | None]) -> None:
        """One fake step for all of them: whatever any would make a unit is watched."""
        names: dict[str, None] = {}
        for policy in policies:
            with contextlib.suppress(FSDPError):
                names |= dict.fromkeys(unit.name for unit in self.question.blueprint(policy).partition.units)
        self.question = self.question.but(watched=tuple(names))

    def _try(self, name: str, policy: Any, prefetch: int, reshard: bool | None, recompute: Any) -> None:
        options = {"policy": policy, "prefetch": prefetch, "reshard_after_forward": reshard, "recompute": recompute}
        try:
            planned = answer(self.question.but(**options))
        except FSDPError:
            if not self.found:
                raise
            return
        self.found.append(Candidate(name, options, planned, simulate(planned, self.topology)))

    def _fits(self, candidate: Candidate) -> bool:
        return self.budget_bytes is None or candidate.peak_bytes <= self.budget_bytes

    def _best(self, by_block: Candidate) -> Candidate:
        """The fastest that fits (of equally fast ones the smallest), or the smallest if nothing does."""
        fitting = [candidate for candidate in self.found if self._fits(candidate)]
        if not fitting:
            return min(self.found, key=lambda c: (c.peak_bytes, c.step_s))
        limit = min(c.step_s for c in fitting) * _CLOSE
        if self._fits(by_block):
            limit = min(limit, by_block.step_s)
        close = [c for c in fitting if c.step_s <= limit]
        return min(close, key=lambda c: (c.peak_bytes, c.step_s, c is not by_block))


def _fields(candidate: Candidate) -> dict[str, Any]:
    options = candidate.options
    return {"name": candidate.name, "policy": options["policy"], "prefetch": options["prefetch"],
            "reshard": options["reshard_after_forward"]}  # fmt: skip
