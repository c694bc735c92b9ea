"""What the modules of a user's model are called, whether they can be called, and how messages list them.

The names and classes here are those the user wrote: compile wrappers and parametrizations do not show.
"""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher, get_close_matches
from typing import Iterable, Sequence

from torch import nn

__all__ = [
    "LISTED",
    "NamedModules",
    "class_counts",
    "class_name",
    "compiled_inner",
    "has_forward",
    "listing",
    "name_pattern",
    "nearest_class",
    "nearest_name",
    "user_name",
    "user_names",
]

NamedModules = Sequence[tuple[str, nn.Module]]

LISTED = 24  # entries a message lists before it counts the rest


def has_forward(module: nn.Module, entry_points: Iterable[str] = ()) -> bool:
    """Whether the module can be called: by ``forward``, or by one of ``entry_points``."""
    if type(module).forward is not nn.Module.forward or "forward" in module.__dict__:
        return True
    # A class with its own __call__ needs no forward; but in torch's parameter containers it only raises.
    if type(module).__call__ is not nn.Module.__call__ and not isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return True
    return any(callable(getattr(type(module), method, None)) for method in entry_points)


def compiled_inner(module: nn.Module) -> nn.Module | None:
    """The module inside a ``torch.compile`` wrapper, or None. Does not import dynamo, which takes seconds."""
    if type(module).__name__ == "OptimizedModule":
        return module._modules.get("_orig_mod")
    return None


def user_name(name: str) -> str:
    """``name`` without the ``_orig_mod`` that compile wrappers add."""
    if "_orig_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def class_name(module: nn.Module) -> str:
    """The class name the user wrote, also for a parametrized module and inside a compile wrapper."""
    inner = compiled_inner(module)
    if inner is not None:
        return class_name(inner)
    name = type(module).__name__
    return name.removeprefix("Parametrized") if "parametrizations" in module._modules else name


def class_counts(named_modules: NamedModules) -> Counter[str]:
    """How many modules of each class there are, without containers and without the root (if there is anything else)."""
    modules = {id(module): module for name, module in named_modules if name and has_forward(module)}
    if not modules:
        modules = {id(module): module for _, module in named_modules}
    return Counter(class_name(module) for module in modules.values() if compiled_inner(module) is None)


def listing(counts: Counter[str]) -> str:
    """``Block (x2), Linear``, cut to a readable length."""
    shown = [name if count == 1 else f"{name} (x{count})" for name, count in list(counts.items())[:LISTED]]
    rest = len(counts) - len(shown)
    return (", ".join(shown) or "none") + (f" and {rest} more" if rest else "")


def user_names(named_modules: NamedModules) -> list[str]:
    """The distinct names below the root, as the user knows them."""
    return list(dict.fromkeys(filter(None, (user_name(name) for name, _ in named_modules))))


def name_pattern(name: str) -> str:
    """``blocks.3.mlp`` as ``blocks.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def nearest_class(name: str, named_modules: NamedModules) -> str | None:
    """The class present whose name is most like ``name``, if any is like it."""
    lower = {present.lower(): present for present in class_counts(named_modules)}
    near = get_close_matches(name.rpartition(".")[2].lower(), lower, n=1, cutoff=0.5)
    return lower[near[0]] if near else None


def nearest_name(glob: str, names: Sequence[str]) -> str | None:
    """The module name, or pattern of names, that ``glob`` most likely means; None if there are no names."""
    candidates = list(dict.fromkeys(map(name_pattern, names))) if "*" in glob else names

    def likeness(candidate: str) -> float:
        # "layers.*" is meant to be "blocks.*" rather than "layernorm": a wildcard in the same place counts too.
        same_shape = [part == "*" for part in candidate.split(".")] == [part == "*" for part in glob.split(".")]
        return SequenceMatcher(None, glob, candidate).ratio() + 0.25 * same_shape

    return max(candidates, key=likeness, default=None)
