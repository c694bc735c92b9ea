"""What the modules of a user's model are called, and whether they can be called.

The names and classes here are those the user wrote: compile wrappers and parametrizations do not show.
"""

from __future__ import annotations

from collections import Counter
from typing import Iterable, Sequence

from torch import nn

__all__ = ["NamedModules", "class_counts", "class_name", "compiled_inner", "has_forward", "user_name"]

NamedModules = Sequence[tuple[str, nn.Module]]


def has_forward(module: nn.Module, entry_points: Iterable[str] = ()) -> bool:
    """Whether the module can be called: by ``forward``, or by one of ``entry_points``."""
    if type(module).forward is not nn.Module.forward or "forward" in module.__dict__:
        return True
    # A class with its own __call__ needs no forward.
    if type(module).__call__ is not nn.Module.__call__:
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
