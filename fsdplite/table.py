"""One table of what was wrapped."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from torch import nn

from .inspect import UnitInfo, units
from .local_slice import engine_access
from .events import format_bytes
from .keywords import known_keywords

__all__ = ["summary"]


@known_keywords
def summary(model: nn.Module, width: int = 80) -> str:
    """A table of the units: module, parameters, padding, bytes of the shard and of the full buffer, dtypes.

    Args:
        model: A wrapped model.
        width: Columns of the table.

    Returns:
        Text to print. Tied parameters are marked with their number of names, frozen ones with their count.
    """
    table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    table.add_column("unit", overflow="fold", min_width=8)
    table.add_column("module", overflow="fold", min_width=6)
    for heading in ("params", "pad", "shard", "full"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("notes", overflow="fold")
    found = units(model)
    for info in found:
        if not info.flats:
            table.add_row(info.name or "(root)", type(info.module).__name__, "0", "0", "0 B", "0 B", "-", "")
        for position, flat in enumerate(info.flats):
            table.add_row(
                (info.name or "(root)") if position == 0 else "",
                type(info.module).__name__ if position == 0 else "",
                f"{flat.layout.numel:,}",
                f"{flat.layout.padding_numel:,}",
                format_bytes(flat.layout.shard_numel * flat.dtype.itemsize),
                format_bytes(flat.full_bytes),
                _dtypes(flat),
                _notes(flat),
            )
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(table)
    console.print(_total(found))
    return console.file.getvalue()


def _dtypes(flat: object) -> str:
    short = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
    names = [str(dtype).removeprefix("torch.") for dtype in (flat.dtype, flat.compute_dtype)]
    names = [short.get(name, name) for name in names]
    return names[0] if names[0] == names[1] else f"{names[0]}>{names[1]}"


def _notes(flat: object) -> str:
    with engine_access():
        frozen = sum(not user.requires_grad for user in flat.users)
    tied = sum(len(names) > 1 for names in flat.all_names)
    notes = []
    if frozen:
        notes.append("frozen" if frozen == len(flat.users) else f"{frozen} frozen")
    if tied:
        notes.append(f"{tied} tied")
    return ", ".join(notes)


def _total(found: list[UnitInfo]) -> str:
    flats = [flat for info in found for flat in info.flats]
    numel = sum(flat.layout.numel for flat in flats)
    padding = sum(flat.layout.padding_numel for flat in flats)
    shard = sum(flat.layout.shard_numel * flat.dtype.itemsize for flat in flats)
    ways = max((flat.groups.shard_size for flat in flats), default=1)
    share = f" ({100 * padding / numel:.2f}%)" if numel else ""
    return (
        f"{len(found)} units, {numel:,} parameters + {padding:,} padding{share}, sharded {ways} ways at stage "
        f"{found[0].stage}: {format_bytes(shard)} of parameters on this rank"
    )
