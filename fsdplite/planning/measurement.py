"""A real step of a wrapped model, measured: live bytes at every operator, collectives from the engine's trace."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ConfigError
from ..events import format_bytes
from ..fsdp_unit import state_of
from ..inspect import trace, units
from ..local_slice import engine_access, info_of

if TYPE_CHECKING:
    from .prediction import Plan

__all__ = ["Comparison", "Row", "compare"]

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Row:
    """One quantity, predicted and measured.

    Attributes:
        what: The quantity, with its unit in the name where it is bytes.
        predicted, measured: Its two values.
    """

    what: str
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        """Predicted over measured; 1 where both are nothing."""
        if self.measured == 0:
            return 1.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured


@dataclass(frozen=True)
class Comparison:
    """Prediction beside measurement, on this rank.

    Attributes:
        rows: The quantities.
        step_ms: How long the measured step took on the host; counting makes it slower.
    """

    rows: tuple[Row, ...]
    step_ms: float | None = None

    def __getitem__(self, what: str) -> Row:
        return next(row for row in self.rows if row.what == what)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = {row.what: {"predicted": row.predicted, "measured": row.measured} for row in self.rows}
        return {"rows": rows, "step_ms": self.step_ms}

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
        table.add_column("what", overflow="fold")
        for heading in ("predicted", "measured", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            show = format_bytes if row.what.endswith("bytes") else "{:,}".format
            table.add_row(row.what.replace("_", " "), show(row.predicted), show(row.measured), f"{row.ratio:.3f}")
        console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=False)
        console.print(table)
        return console.file.getvalue()


def compare(plan: Plan, model: nn.Module, step: Callable[[], Any] | None, warm_up: int) -> Comparison:
    """See :meth:`Plan.compare`."""
    if not isinstance(model, nn.Module) or not (step is None or callable(step)):
        expected = "a wrapped model, and a function that runs one step or None"
        found = f"{type(model).__name__}, {type(step).__name__}"
        raise ConfigError("compare takes a model and a step", expected=expected, found=found)
    if isinstance(warm_up, bool) or not isinstance(warm_up, int) or warm_up < 0:
        raise ConfigError("warm_up is a number of steps", expected="an int >= 0", found=repr(warm_up))
    found = {info.name: info for info in units(model)}
    predicted = {unit.name: unit for unit in plan.units}
    if found.keys() != predicted.keys():
        raise ConfigError(
            "the model is not wrapped as it was planned",
            expected=f"units {sorted(predicted)[:20]}",
            found=f"units {sorted(found)[:20]}",
            cure="plan and wrap with the same policy",
        )
    groups, setup = state_of(units(model)[0].module).groups, plan.question.setup
    stages = plan.question.stage, units(model)[0].stage
    planned, wrapped = (setup.replicate_size, setup.shard_size), (groups.replicate_size, groups.shard_size)
    if planned != wrapped or stages[0] != stages[1]:
        raise ConfigError(
            "the model is not wrapped as it was planned",
            expected=f"stage {stages[0]}, (replicas, shards) {planned}",
            found=f"stage {stages[1]}, (replicas, shards) {wrapped}",
            cure="plan.but(stage=..., mesh=(replicas, shards))",
        )
    vectors = [flat.masters.vector for info in found.values() for flat in info.flats]
    shards = sum(vector.numel() * vector.element_size() for vector in vectors if vector is not None)
    full = sum(flat.full_bytes for info in found.values() for flat in info.flats)
    rows = [
        Row("units", len(predicted), len(found)),
        Row("parameter_shard_bytes", plan.resting.parameters, shards),
        Row("full_bytes", sum(unit.full_bytes for unit in plan.units), full),
    ]
    if step is None:
        return Comparison(tuple(rows))
    peak, step_ms, calls = _measure(model, step, warm_up)
    rows.insert(0, Row("peak_bytes", plan.peak_bytes, peak))
    for kind in _KINDS:
        of_kind = [event for event in calls if event.kind == kind]
        if of_kind or plan.traffic.count(kind):
            rows.append(Row(f"{kind}_calls", plan.traffic.count(kind), len(of_kind)))
            rows.append(Row(f"{kind}_bytes", plan.traffic.bytes(kind), sum(event.bytes for event in of_kind)))
    return Comparison(tuple(rows), step_ms)


def _measure(model: nn.Module, step: Callable[[], Any], warm_up: int) -> tuple[int, float, list[Any]]:
    """Peak bytes of one step, its time, and the engine's events in it."""
    device = next(iter(units(model)[0].flats), None)
    if device is not None and device.device.type == "cuda":
        for _ in range(warm_up):
            step()
        torch.cuda.reset_peak_memory_stats(device.device)
        with trace(model) as events:
            step()
        return torch.cuda.max_memory_allocated(device.device), events.events[-1].time_ms, events.events
    with _Counted() as counted:
        with engine_access():  # also what no operator of the step touches: a unit that is not used
            shards = [flat.masters.vector for info in units(model) for flat in info.flats]  # None: in a file
            counted.touch([*shards, *(p for p in model.parameters() if info_of(p) is None), *model.buffers()])
        for _ in range(warm_up):
            step()
        counted.peak = counted.live()
        with trace(model) as events:
            step()
    return counted.peak, events.events[-1].time_ms if events.events else 0.0, events.events


class _Counted(TorchDispatchMode):
    """Bytes of every storage that an operator has touched and that still exists, at its present size.

    The engine resizes storages in place, so sizes are read again at every operator: slow, and right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for values in (args, tuple((kwargs or {}).values()), result):
            self.touch(values)
        self.peak = max(self.peak, self.live())
        return result

    def touch(self, values: Any) -> None:
        """Count the storages of these tensors from here on."""
        if isinstance(values, torch.Tensor) and values.layout is torch.strided:
            storage = torch.Tensor.untyped_storage(values)  # on the base class: slices hide their storage
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)
        elif isinstance(values, (tuple, list)):
            for value in values:
                self.touch(value)

    def live(self) -> int:
        """Bytes alive now."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total
