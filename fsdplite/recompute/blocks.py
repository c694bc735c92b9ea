"""Which modules of a model are its blocks: what is repeated, and holds most of the parameters."""

from __future__ import annotations

from torch import nn

from ..errors import PolicyError
from ..modules import class_name, has_forward

__all__ = ["find_blocks"]

_SMALL_SHARE = 10  # repeated modules with less than a tenth of the largest kind's elements are no blocks


def find_blocks(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated modules: children of one list or sequence, of one class, at least two of them.

    Returns:
        Names and modules, in the order of ``named_modules()``. Several kinds (encoder and decoder layers) are all
        there; small repeated modules beside them are not.

    Raises:
        PolicyError: Nothing is repeated.
    """
    kinds: dict[str, list[tuple[str, nn.Module]]] = {}
    covered: set[int] = set()
    for name, parent in root.named_modules():
        if id(parent) in covered:
            continue
        siblings: dict[str, list[tuple[str, nn.Module]]] = {}
        for key, child in parent.named_children():
            if has_forward(child) and any(True for _ in child.parameters()):
                siblings.setdefault(class_name(child), []).append((f"{name}.{key}" if name else key, child))
        for kind, found in siblings.items():
            is_list = isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or not has_forward(parent)
            if is_list and len(found) > 1:
                kinds.setdefault(kind, []).extend(found)
                covered.update(id(inner) for _, child in found for inner in child.modules())
    sizes = {kind: sum(p.numel() for _, m in found for p in m.parameters()) for kind, found in kinds.items()}
    largest = max(sizes.values(), default=0)
    chosen = {id(m) for kind, found in kinds.items() if sizes[kind] * _SMALL_SHARE >= largest for _, m in found}
    blocks = [(name, m) for name, m in root.named_modules() if id(m) in chosen]
    if not blocks:
        raise PolicyError(
            "recompute finds no blocks: no list or sequence in the model holds two modules of one class",
            found=type(root).__name__,
            cure='name what is to be recomputed: recompute=fsdp.by_class("Block")',
        )
    return blocks
