"""A plan as text and as plain values."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..errors import unit_label
from ..events import format_bytes

if TYPE_CHECKING:
    from .blueprint import PlannedUnit
    from .prediction import Plan

__all__ = ["as_dict", "as_table", "planned_for"]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_OPTIMIZERS = {"none": "no optimizer", "<lambda>": "an optimizer of a function"}


def planned_for(plan: Plan) -> str:
    """What the numbers hold for: ranks, stage, precision, optimizer and kind of device."""
    question = plan.question
    replicas, shards = question.mesh
    ranks = f"{question.world_size:,} rank" + "s" * (question.world_size != 1)
    ranks += f" ({replicas} replicas of {shards})" if replicas > 1 else ""
    optimizer = _OPTIMIZERS.get(plan.optimizer, plan.optimizer)
    return f"planned for {ranks}, stage {question.stage}, {_precision(plan)}, {optimizer}, on {question.device}"


def _precision(plan: Plan) -> str:
    """The dtype of the computation, the model's own ones if no other is asked for, and that of reductions if given."""
    precision = plan.question.precision
    own = {flat.dtype for unit in plan.units for flat in unit.flats}
    computed = own if precision.param_dtype is None else {precision.param_dtype}
    text = " and ".join(sorted(map(_short, computed))) or "no dtype"
    return text if precision.reduce_dtype is None else f"{text} (reduced in {_short(precision.reduce_dtype)})"


def _short(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def as_dict(plan: Plan) -> dict[str, Any]:
    """Plain values, for JSON. Bytes are those of one rank."""
    question = plan.question
    return {
        "world_size": question.world_size,
        "mesh": list(question.mesh),
        "stage": question.stage,
        "precision": question.precision.describe(),
        "optimizer": plan.optimizer,
        "device": question.device,
        "rank": question.rank,
        "prefetch": question.prefetch,
        "microbatches": question.microbatches,
        "numel": plan.numel,
        "padding_numel": plan.padding_numel,
        "has_activations": plan.has_activations,
        "notes": list(plan.notes),
        "peak_bytes": plan.peak_bytes,
        "peak_phase": plan.peak_phase,
        "peak_unit": plan.peak_unit,
        "full_peak_bytes": plan.full_peak_bytes,
        "resting_bytes": {**asdict(plan.resting), "total": plan.resting.total},
        "peaks": {phase: asdict(peak) for phase, peak in plan.peaks.items()},
        "traffic": {
            kind: {"calls": plan.traffic.count(kind), "elements": plan.traffic.numel(kind),
                   "bytes": plan.traffic.bytes(kind)}
            for kind in plan.traffic.kinds
        },
        "sent_bytes": plan.traffic.sent_bytes,
        "to_device_bytes": plan.to_device_bytes,
        "to_host_bytes": plan.to_host_bytes,
        "disk_bytes": plan.disk_bytes,
        "units": [
            {"name": unit.name, "class": unit.module_class, "numel": unit.numel, "padding_numel": unit.padding_numel,
             "shard_bytes": unit.shard_bytes, "full_bytes": unit.full_bytes, "reduction_bytes": unit.buffer_bytes}
            for unit in plan.units
        ],
    }  # fmt: skip


def as_table(plan: Plan, width: int = 80) -> str:
    """Units, memory by phase and traffic, in ``width`` columns. Equal units that follow each other share a row."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    console.print(planned_for(plan), markup=False)
    for title, table in (("units", _units(plan)), ("between steps", _resting(plan)), ("in a step", _peaks(plan)),
                         ("on the wire, per step and rank", _traffic(plan))):  # fmt: skip
        console.print(f"\n{title}", markup=False)
        console.print(table)
    console.print()
    console.print(_verdict(plan), markup=False)
    return console.file.getvalue()


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
    for position, heading in enumerate(columns):
        is_text = heading in ("unit", "module", "phase", "what", "mostly")
        table.add_column(
            heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold" if is_text else "crop"
        )
    return table


def _units(plan: Plan) -> Table:
    table = _table("unit", "module", "params", "pad", "shard", "full", "reduction")
    rows: list[tuple[Any, list[PlannedUnit]]] = []
    for unit in plan.units:
        sizes = unit.shard_bytes, unit.full_bytes, unit.buffer_bytes
        shape = (unit.module_class, unit.numel, unit.padding_numel, *sizes)
        if rows and rows[-1][0] == shape:
            rows[-1][1].append(unit)
        else:
            rows.append((shape, [unit]))
    for shape, units in rows:
        cls, numel, padding, *sizes = shape
        name = units[0].name or "(root)"
        if len(units) > 1:
            name = f"{name} to {units[-1].name.rpartition('.')[2]}, each"
        table.add_row(name, cls, f"{numel:,}", f"{padding:,}", *map(format_bytes, sizes))
    return table


def _resting(plan: Plan) -> Table:
    table = _table("what", "bytes")
    resting = plan.resting
    names = {
        "parameters": "parameter shards",
        "optimizer": f"state of {plan.optimizer}",
        "gathered": "gathered parameters, which stay at this stage",
        "gradients": "gradient shards, until zero_grad",
        "buffers": "buffers and other tensors of modules",
        "ignored": "ignored parameters",
    }
    for name, text in names.items():
        if getattr(resting, name):
            table.add_row(text, format_bytes(getattr(resting, name)))
    table.add_row("together", format_bytes(resting.total))
    for name, text in (("host", "offloaded to host memory"), ("disk", "offloaded to disk")):
        if getattr(resting, name):
            table.add_row(text, format_bytes(getattr(resting, name)))
    return table


def _peaks(plan: Plan) -> Table:
    table = _table("phase", "peak", "unit", "mostly")
    for phase, peak in plan.peaks.items():
        largest = sorted(peak.parts.items(), key=lambda item: -item[1])[:3]
        mostly = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in largest)
        table.add_row(phase, format_bytes(peak.bytes), peak.unit or "(root)", mostly)
    return table


def _traffic(plan: Plan) -> Table:
    table = _table("what", "calls", "elements", "bytes")
    for kind in plan.traffic.kinds:
        count, numel, size = plan.traffic.count(kind), plan.traffic.numel(kind), plan.traffic.bytes(kind)
        table.add_row(kind.replace("_", "-"), f"{count:,}", f"{numel:,}", format_bytes(size))
    return table


def _verdict(plan: Plan) -> str:
    question = plan.question
    padding = f"{100 * plan.padding_numel / plan.numel:.2f}% padding" if plan.numel else "no parameters"
    text = (
        f"{len(plan.units)} unit{'s' * (len(plan.units) != 1)}, {plan.numel:,} parameters, {padding}: at most "
        f"{format_bytes(plan.peak_bytes)} on rank {question.rank}, in {plan.peak_phase} at unit "
        f"{unit_label(plan.peak_unit)}"
    )
    return "; ".join([text, *plan.notes])
