"""Which modules of a model could be units: its blocks, large modules beside them, parts of them, what is around them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..errors import PolicyError
from ..modules import has_forward, user_name
from ..policy import Policy, by_class, by_name
from ..recompute.blocks import find_blocks

__all__ = ["blocks_of", "classes_of", "large_beside", "ways_to_wrap"]

_LARGE_SHARE = 0.25  # of a block, or of a model without any: modules beside the blocks that are worth a unit
_PART_SHARE = 0.1  # of a block: its parts that are


def ways_to_wrap(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, Policy | None]]:
    """Wrappings to try, by block first (as one unit where there are no blocks)."""
    if blocks:
        by_block = by_class(*classes_of(blocks))
        yield "by block", by_block
        beside = large_beside(model, blocks)
        if beside:
            yield "blocks and large modules beside them", by_block | by_name(*beside)
        parts = _parts(blocks)
        if parts:
            yield "parts of blocks", by_block | by_name(*parts)
            if beside:
                yield "parts of blocks, large modules beside them", by_block | by_name(*parts) | by_name(*beside)
        around = _around(model, blocks)
        if around:
            yield "modules around blocks", by_name(*around)
    yield "one unit", None


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of what is repeated; there may be nothing."""
    try:
        return find_blocks(model)
    except PolicyError:
        return []


def classes_of(blocks: list[tuple[str, nn.Module]]) -> list[str]:
    """The names of their classes, each once."""
    return list(dict.fromkeys(type(block).__name__ for _, block in blocks))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def large_beside(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[str]:
    """Modules outside the blocks that own much: embeddings, heads. A tied weight stays with the root."""
    inside = {id(inner) for _, block in blocks for inner in block.modules()}
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    least = _LARGE_SHARE * max((_numel(block) for _, block in blocks), default=_numel(model))
    found = []
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not name or id(module) in inside or not own or not has_forward(module):
            continue
        if all(holders[id(p)] == 1 for p in own) and sum(p.numel() for p in own) >= least:
            found.append(user_name(name))
    return found


def _parts(blocks: list[tuple[str, nn.Module]]) -> list[str]:
    """Direct children of blocks that own a good part of them."""
    return [
        user_name(f"{name}.{key}")
        for name, block in blocks
        for key, child in block.named_children()
        if has_forward(child) and _numel(child) >= _PART_SHARE * _numel(block)
    ]


def _around(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[str]:
    """Modules below the root that hold several blocks and are called: an encoder, a stage."""
    found: list[str] = []
    names = [name for name, _ in blocks]
    for name, module in model.named_modules():
        covered = any(name.startswith(f"{outer}.") for outer in found)
        if name and not covered and has_forward(module) and sum(n.startswith(f"{name}.") for n in names) > 1:
            found.append(name)
    return [user_name(name) for name in found]
