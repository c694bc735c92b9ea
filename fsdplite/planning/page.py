"""A plan as one HTML file: tables and drawings inside, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, unit_label
from ..events import Trace, format_bytes
from .measurement import Comparison
from .report import planned_for
from .timeline import Span, Timeline

if TYPE_CHECKING:
    from .prediction import Plan

__all__ = ["as_page"]

# Colours that stay apart for most kinds of colour vision (Okabe and Ito).
_PARTS = {
    "parameter shards": "#0072b2", "optimizer state": "#56b4e9", "gathered parameters": "#e69f00",
    "reduction buffers": "#d55e00", "gradient shards": "#009e73", "transport copies": "#f0e442",
    "activations": "#cc79a7", "optimizer temporaries": "#999999", "module buffers": "#666666",
    "ignored parameters": "#444444", "batch": "#bbbbbb",
    "offloaded, beside": "#003f5c",
}  # fmt: skip
_KINDS = {
    "compute": "#009e73", "copy": "#7bc8ae", "allocate": "#bbbbbb", "update": "#56b4e9", "control": "#666666",
    "wait": "#d55e00", "to_device": "#003f5c", "to_host": "#8c6d31", "all_gather": "#e69f00",
    "reduce_scatter": "#0072b2", "all_reduce": "#cc79a7",
}  # fmt: skip
_WIDTH = 960
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } th { background: #222; } }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; white-space: normal; }
th { position: sticky; top: 0; background: #fff; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px sans-serif; fill: currentColor; }
.key span { display: inline-block; margin-right: 1em; } .key b { display: inline-block; width: .8em; height: .8em; }
.rows { max-height: 28rem; overflow: auto; }
"""


def as_page(
    plan: Plan, timeline: Timeline | None = None, comparison: Comparison | None = None, trace: Trace | None = None
) -> str:
    """The text of the file.

    Raises:
        ConfigError: A part is of another kind.
    """
    for name, given, kind, source in (
        ("timeline", timeline, Timeline, "fsdp.simulate(plan)"),
        ("comparison", comparison, Comparison, "plan.compare(model, step)"),
        ("trace", trace, Trace, "fsdp.trace(model)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise ConfigError(f"{name} is not a {kind.__name__}", expected=f"what {source} returns, or None",
                              found=repr(given))  # fmt: skip
    question = plan.question
    head = (
        f"{plan.numel:,} parameters in {len(plan.units)} unit{'s' * (len(plan.units) != 1)}, {escape(planned_for(plan))}. "
        f"At most <b>{format_bytes(plan.peak_bytes)}</b> on rank "
        f"{question.rank}, in {escape(plan.peak_phase)} at unit {escape(unit_label(plan.peak_unit))}."
    )
    head += "".join(f" {escape(note[0].upper() + note[1:])}." for note in plan.notes)
    parts = [f"<h1>Plan of a sharded step</h1><p>{head}</p>", _memory(plan)]
    if timeline is not None:
        parts.append(_timeline(timeline))
    if comparison is not None:
        parts.append(_comparison(comparison))
    parts += [_units(plan), _traffic(plan)]
    if trace is not None:
        parts.append(_trace(trace))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/><title>Plan of a sharded step</title>'
        f'<meta name="viewport" content="width=device-width"/><style>{_STYLE}</style></head>\n'
        f"<body>{body}</body></html>\n"
    )


def _table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="rows"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _key(colours: dict[str, str], used: Iterable[str]) -> str:
    names = [name for name in colours if name in set(used)]
    items = (f'<span><b style="background:{colours[name]}"></b> {escape(name.replace("_", "-"))}</span>' for name in names)
    return f'<p class="key">{"".join(items)}</p>'


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.1):.2f}" height="{height}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _memory(plan: Plan) -> str:
    """One bar a phase, of the parts of its fullest moment."""
    largest = plan.peak_bytes or 1
    bars = []
    for row, (phase, peak) in enumerate(plan.peaks.items()):
        y, x = 10 + 44 * row, 0.0
        text = f"{phase}: {format_bytes(peak.bytes)} at unit {unit_label(peak.unit)}"
        bars.append(f'<text x="0" y="{y + 8}">{escape(text)}</text>')
        for kind in sorted(peak.parts, key=lambda kind: list(_PARTS).index(kind) if kind in _PARTS else len(_PARTS)):
            width = _WIDTH * peak.parts[kind] / largest
            title = f"{kind}: {format_bytes(peak.parts[kind])}"
            bars.append(_rect(x, y + 13, width, 20, _PARTS.get(kind, "#000"), title))
            x += width
    used = [kind for peak in plan.peaks.values() for kind in peak.parts]
    height = 10 + 44 * len(plan.peaks)
    picture = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="memory by phase">{"".join(bars)}</svg>'
    resting = f"<p>Between steps: {format_bytes(plan.resting.total)}, of which gradients, until zero_grad, are "
    resting += f"{format_bytes(plan.resting.gradients)}.</p>"
    return f"<h2>Memory by phase</h2>{resting}{picture}{_key(_PARTS, used)}"


def _timeline(timeline: Timeline) -> str:
    """A row a lane."""
    whole = timeline.step_s or 1.0
    lanes = list(dict.fromkeys(span.lane for span in timeline.spans))
    shapes = []
    for row, lane in enumerate(lanes):
        y = 10 + 48 * row
        shapes.append(f'<text x="0" y="{y + 8}">{escape(lane)}</text>')
        for span in _joined([span for span in timeline.spans if span.lane == lane]):
            title = f"{span.kind.replace('_', '-')} {unit_label(span.unit)}: {span.duration_s * 1e3:.3f} ms from "
            title += f"{span.start_s * 1e3:.3f} ms" + (f", {format_bytes(span.bytes)}" if span.bytes else "")
            x, width = _WIDTH * span.start_s / whole, _WIDTH * span.duration_s / whole
            shapes.append(_rect(x, y + 13, width, 24, _KINDS.get(span.kind, "#000"), title))
    height = 10 + 48 * len(lanes)
    picture = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline">{"".join(shapes)}</svg>'
    text = (
        f"<p>A step of {timeline.step_s * 1e3:,.2f} ms on {timeline.world_size} ranks: "
        f"{timeline.compute_s * 1e3:,.2f} ms of computation, {timeline.exposed_s * 1e3:,.2f} ms of exposed "
        f"communication of {timeline.communication_s * 1e3:,.2f} ms in all.</p>"
    )
    return f"<h2>Timeline</h2>{text}{picture}{_key(_KINDS, [span.kind for span in timeline.spans])}"


def _joined(spans: list[Span]) -> list[Span]:
    """Neighbours of one kind and unit drawn as one."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.unit, last.phase) == (span.kind, span.unit, span.phase):
            if span.start_s - last.stop_s < 1e-9:
                bytes_in_all = last.bytes + span.bytes
                joined[-1] = type(span)(
                    span.lane, span.kind, span.unit, span.phase, last.start_s, span.stop_s, bytes_in_all
                )
                continue
        joined.append(span)
    return joined


def _comparison(comparison: Comparison) -> str:
    rows = []
    for row in comparison.rows:
        show = format_bytes if row.what.endswith("bytes") else "{:,}".format
        rows.append((row.what.replace("_", " "), show(row.predicted), show(row.measured), f"{row.ratio:.3f}"))
    return "<h2>Predicted and measured</h2>" + _table(("what", "predicted", "measured", "ratio"), rows)


def _units(plan: Plan) -> str:
    rows = (
        (unit.name or "(root)", unit.module_class, f"{unit.numel:,}", f"{unit.padding_numel:,}",
         *map(format_bytes, (unit.shard_bytes, unit.full_bytes, unit.buffer_bytes)))
        for unit in plan.units
    )  # fmt: skip
    return "<h2>Units</h2>" + _table(("unit", "module", "parameters", "padding", "shard", "full", "reduction"), rows)


def _traffic(plan: Plan) -> str:
    rows = (
        (kind.replace("_", "-"), f"{plan.traffic.count(kind):,}", f"{plan.traffic.numel(kind):,}",
         format_bytes(plan.traffic.bytes(kind)))
        for kind in plan.traffic.kinds
    )  # fmt: skip
    return "<h2>On the wire, per step and rank</h2>" + _table(("what", "calls", "elements", "bytes"), rows)


def _trace(trace: Trace) -> str:
    rows = (
        (event.kind.replace("_", "-"), event.unit or "(root)", f"{event.time_ms:.3f}", format_bytes(event.bytes))
        for event in trace.events
    )
    return "<h2>Trace of a step</h2>" + _table(("event", "unit", "ms", "bytes"), rows)
