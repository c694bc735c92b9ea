"""All paths of a model from its root, and who manages what lies on them.

Refuses here, by name, what cannot be wrapped at all.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .errors import ConfigError, PolicyError, WrapError, did_you_mean
from .modules import class_name, compiled_inner, has_forward

__all__ = [
    "IGNORED", "NESTED", "OURS", "ModuleTree", "Visit", "check_root", "checked_ignored", "checked_methods", "join_name",
    "list_children", "refuse_suspended",
]  # fmt: skip

OURS, NESTED, IGNORED = "ours", "nested", "ignored"


@dataclass(eq=False)
class Visit:
    """One path from the root to a module; a module that is used twice is visited twice."""

    name: str
    module: nn.Module
    parent: Visit | None
    region: str
    units: tuple[int, ...] = ()  # identities of the units on the path, outermost first


class ModuleTree:
    """All paths of a model, in ``named_modules(remove_duplicate=False)`` order, and the region each lies in."""

    def __init__(self, root: nn.Module, ignored: Iterable[Any], is_unit: Callable[[nn.Module], bool]) -> None:
        self.root = root
        self.is_unit = is_unit
        ignored = checked_ignored(ignored)
        self._ignored_modules = {id(item) for item in ignored if isinstance(item, nn.Module)}
        self.visits = list(self._walk("", root, None, OURS))
        self.names: dict[int, list[str]] = {}
        regions: dict[int, set[str]] = {}
        for visit in self.visits:
            self.names.setdefault(id(visit.module), []).append(visit.name)
            regions.setdefault(id(visit.module), set()).add(visit.region)
        # What somebody else manages is not ours at any of its places.
        self.ours = {key for key, found in regions.items() if found == {OURS}}
        self.nested = {key for key, found in regions.items() if NESTED in found}
        self.ignored_parameters = {id(item) for item in ignored if isinstance(item, nn.Parameter)}
        for visit in self.visits:
            if visit.region == IGNORED:
                self.ignored_parameters.update(id(p) for p in visit.module._parameters.values() if p is not None)
        self._check_ignored_present(ignored)

    def _walk(self, name: str, module: nn.Module, parent: Visit | None, region: str) -> Iterator[Visit]:
        _check_module(name, module)
        if region == NESTED or self.is_unit(module):
            region = NESTED
        elif id(module) in self._ignored_modules:
            region = IGNORED
        visit = Visit(name, module, parent, region)
        yield visit
        for key, child in module._modules.items():
            if child is not None:
                yield from self._walk(join_name(name, key), child, visit, region)

    def _check_ignored_present(self, ignored: list[Any]) -> None:
        holders: dict[int, list[tuple[str, Visit]]] = {}
        for visit in self.visits:
            for key, parameter in visit.module._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), []).append((join_name(visit.name, key), visit))
        for item in ignored:
            what = _label(item)
            if item is self.root:
                raise ConfigError(f"ignored holds the module that is being wrapped: {what}", cure="do not wrap it")
            found = self.names.get(id(item)) or [name for name, _ in holders.get(id(item), [])]
            if not found:
                raise ConfigError(
                    f"ignored holds something that is not in the model: {what}",
                    expected=f"modules and parameters of the {class_name(self.root)} that is being wrapped",
                    cure="take it from the model itself, by attribute or get_submodule(name)",
                )
            inside = id(item) in self.nested or any(v.region == NESTED for _, v in holders.get(id(item), []))
            if inside:
                raise ConfigError(
                    f"ignored holds '{found[0]}', which belongs to a unit already: {what}",
                    cure="pass ignored= to the call that wraps that unit",
                )


def checked_ignored(ignored: Iterable[Any]) -> list[Any]:
    """The modules and parameters given as ``ignored``.

    Raises:
        ConfigError: Something else.
    """
    if isinstance(ignored, (nn.Module, torch.Tensor, str)) or not isinstance(ignored, Iterable):
        raise ConfigError("ignored takes several modules or parameters", found=_label(ignored), cure="ignored=[...]")
    items = list(ignored)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise ConfigError(
                "ignored takes modules and parameters",
                found=_label(item),
                cure="pass the object: model.get_submodule(name) or model.get_parameter(name)",
            )
    return items


def check_root(root: nn.Module, is_unit: Callable[[nn.Module], bool], entry_points: tuple[str, ...]) -> None:
    if not isinstance(root, nn.Module):
        raise WrapError("only an nn.Module can be wrapped", found=_label(root))
    _check_module("", root)
    inner: nn.Module | None = root
    while inner is not None:
        if is_unit(inner):
            raise WrapError(
                f"the {class_name(root)} given to fsdp_wrap is a unit already",
                found=f"a {class_name(root)} with {', '.join(dict(inner.named_children())) or 'no children'}",
                cure="wrap every module once: its parameters have one owner",
            )
        inner = compiled_inner(inner)
    if not has_forward(root, entry_points):
        raise WrapError(
            f"the {class_name(root)} given to fsdp_wrap is a container without a forward: nothing would gather it",
            found=list_children("", root),
            cure="wrap its children, or the module that holds it",
        )


_SUSPENDED = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def refuse_suspended(module: nn.Module, name: str) -> None:
    """The weights are whole while a call runs, and a generator or coroutine runs after it has returned."""
    if any(is_kind(getattr(module, "forward", None)) for is_kind in _SUSPENDED):
        raise WrapError(
            f"the forward of {type(module).__name__} is a generator or a coroutine: its weights are gone when it runs",
            unit=name,
            cure="make forward a plain method, or wrap the modules that it calls instead",
        )


def checked_methods(root: nn.Module, methods: Any) -> tuple[str, ...]:
    """The names given as ``forward_methods``.

    Raises:
        PolicyError: No module has such a method, or it is of a kind that cannot be served.
    """
    if isinstance(methods, str):
        methods = (methods,)
    methods = tuple(methods)
    for name in methods:
        for m in root.modules():
            found = inspect.getattr_static(type(m), name, None)
            if isinstance(found, (staticmethod, classmethod)) or any(is_kind(found) for is_kind in _SUSPENDED):
                raise PolicyError(
                    f"forward_methods cannot serve '{name}' of {type(m).__name__}: weights are whole while a call "
                    "runs, and this is a static or class method, a generator or a coroutine",
                    cure="name a plain method that computes and returns; a generator may call it for each item",
                )
        if not any(callable(getattr(type(m), name, None)) for m in root.modules()):
            present = sorted(
                {n for m in root.modules() for n in vars(type(m)) if not n.startswith("_") and callable(getattr(m, n))}
            )
            raise PolicyError(
                f"forward_methods names '{name}', which no module here has",
                expected=", ".join(present[:20]),
                found=f"'{name}'" + did_you_mean(name, present),
            )
    return methods


def _check_module(name: str, module: nn.Module) -> None:
    label = f"'{name}'" if name else "the root"
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            f"{label} is a TorchScript module ({class_name(module)}): its weights cannot be replaced by slices",
            cure="wrap the original module and use torch.compile, or keep the scripted one outside the wrapped model",
        )
    if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise WrapError(
            f"{label} is a {class_name(module)}, which averages gradients by itself",
            cure="wrap the module that it was made of (its .module) instead of it",
        )
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise WrapError(
                f"{label} ({class_name(module)}) is lazy: its size is not known before the first forward",
                parameter=join_name(name, key),
                cure="run one forward on example inputs first, then wrap",
            )


def join_name(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _label(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"a {type(item).__name__} of shape {tuple(item.shape)}"
    if isinstance(item, nn.Module):
        return f"a {class_name(item)}({item.extra_repr()})"
    return repr(item)


def list_children(name: str, module: nn.Module) -> str:
    children = [f"{join_name(name, key)} ({class_name(child)})" for key, child in module.named_children()]
    return "its children: " + (", ".join(children[:24]) + (" ..." if len(children) > 24 else "") or "none")
