"""Which modules become units, and which unit owns each parameter and buffer.

The engine and the planner both start here. Nothing is changed: the result only points into the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .errors import ConfigError, PolicyError, WrapError
from .modules import class_name, compiled_inner, has_forward, user_name
from .policy import Policy

__all__ = ["BufferSpec", "ParamSpec", "Partition", "UnitSpec", "blocks_worth_wrapping", "partition"]


@dataclass(eq=False)
class ParamSpec:
    """One parameter object and everywhere it is used.

    Attributes:
        parameter: The user's object.
        names: All its dotted names from the root, in ``named_parameters(remove_duplicate=False)`` order; the first is
            the canonical one.
        locations: Each (module, attribute) that holds it, once.
    """

    parameter: nn.Parameter
    names: tuple[str, ...] = ()
    locations: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    def _seen_at(self, module: nn.Module, key: str, name: str) -> None:
        self.names += (name,)
        if not any(module is holder and key == held for holder, held in self.locations):
            self.locations.append((module, key))


@dataclass(eq=False)
class BufferSpec:
    """One registered buffer: canonical dotted name, the module that holds it, its attribute, and whether it is saved."""

    name: str
    module: nn.Module
    key: str
    persistent: bool


@dataclass(eq=False)
class UnitSpec:
    """A module that becomes a unit, and what it owns: everything below it that no unit further down owns."""

    name: str
    module: nn.Module
    params: list[ParamSpec] = field(default_factory=list)
    buffers: list[BufferSpec] = field(default_factory=list)


@dataclass(eq=False)
class Partition:
    """The outcome of :func:`partition`.

    Attributes:
        units: In ``named_modules()`` order, the root first. A unit may own nothing.
        nested: Units that were there before, outer and inner ones, in the same order; untouched.
        ignored_params: Parameters left alone.
        ignored_buffers: Buffers of ignored modules.
        warnings: For the caller to emit once, on rank 0.
    """

    units: list[UnitSpec]
    nested: list[tuple[str, nn.Module]]
    ignored_params: list[ParamSpec]
    ignored_buffers: list[BufferSpec]
    warnings: list[str]


def partition(
    root: nn.Module,
    policy: Policy | None,
    *,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    is_unit: Callable[[nn.Module], bool] = lambda module: False,
    is_owned: Callable[[nn.Parameter], bool] = lambda parameter: False,
    entry_points: Iterable[str] = (),
) -> Partition:
    """Decide which modules of ``root`` become units and what each of them owns.

    A parameter is owned by the lowest unit that every path from the root to any of its uses runs through; so a tied
    weight is whole whenever one of its users runs.

    Args:
        root: The outermost module; always a unit.
        policy: Which modules below it become units; None for none.
        ignored: Modules (with all they contain) and parameters to leave alone.
        is_unit: Whether a module is a unit already. It and all below it stay as they are.
        is_owned: Whether an earlier call gave the parameter to a unit, perhaps one outside this tree.
        entry_points: Methods that count as ``forward`` does (``forward_methods``).

    Raises:
        PolicyError: The policy matches nothing, or a container without a forward.
        WrapError: The tree holds something that cannot be wrapped; the message names it.
        ConfigError: ``ignored`` holds something that is not a module or parameter of the tree.
    """
    entry_points = tuple(entry_points)
    _check_root(root, is_unit, entry_points)
    tree = _Tree(root, ignored, is_unit)
    warnings: list[str] = []
    unit_ids = {id(root)}
    if policy is not None:
        policy = policy.bind(root)
        warnings = policy.check([(visit.name, visit.module) for visit in tree.visits])
        unit_ids |= _select(tree, policy, entry_points)
    return _assign(tree, unit_ids, is_owned, warnings)


# --- the tree -------------------------------------------------------------------------------------------------------

OURS, NESTED, IGNORED = "ours", "nested", "ignored"


@dataclass(eq=False)
class _Visit:
    """One path from the root to a module; a module that is used twice is visited twice."""

    name: str
    module: nn.Module
    parent: _Visit | None
    region: str
    units: tuple[int, ...] = ()  # identities of the units on the path, outermost first


class _Tree:
    """All paths of a model, in ``named_modules(remove_duplicate=False)`` order, and the region each lies in."""

    def __init__(self, root: nn.Module, ignored: Iterable[Any], is_unit: Callable[[nn.Module], bool]) -> None:
        self.root = root
        self.is_unit = is_unit
        ignored = _checked_ignored(ignored)
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

    def _walk(self, name: str, module: nn.Module, parent: _Visit | None, region: str) -> Iterator[_Visit]:
        _check_module(name, module)
        if region == NESTED or self.is_unit(module):
            region = NESTED
        elif id(module) in self._ignored_modules:
            region = IGNORED
        visit = _Visit(name, module, parent, region)
        yield visit
        for key, child in module._modules.items():
            if child is not None:
                yield from self._walk(_join(name, key), child, visit, region)

    def _check_ignored_present(self, ignored: list[Any]) -> None:
        holders = {}
        for visit in self.visits:
            for key, parameter in visit.module._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), []).append((_join(visit.name, key), visit))
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


def _checked_ignored(ignored: Iterable[Any]) -> list[Any]:
    if isinstance(ignored, (nn.Module, torch.Tensor, str)):
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


def _check_root(root: nn.Module, is_unit: Callable[[nn.Module], bool], entry_points: tuple[str, ...]) -> None:
    if not isinstance(root, nn.Module):
        raise WrapError("only an nn.Module can be wrapped", found=_label(root))
    _check_module("", root)
    inner = root
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
            found=_children("", root),
            cure="wrap its children, or the module that holds it",
        )


def _check_module(name: str, module: nn.Module) -> None:
    label = f"'{name}'" if name else "the root"
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            f"{label} is a TorchScript module ({class_name(module)}): its weights cannot be replaced by slices",
            cure="wrap the original module and use torch.compile, or keep the scripted one outside the wrapped model",
        )
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise WrapError(
                f"{label} ({class_name(module)}) is lazy: its size is not known before the first forward",
                parameter=_join(name, key),
                cure="run one forward on example inputs first, then wrap",
            )


# --- units ----------------------------------------------------------------------------------------------------------


def _select(tree: _Tree, policy: Policy, entry_points: tuple[str, ...]) -> set[int]:
    """Identities of the modules below the root that become units, decided bottom-up."""
    compiled = {id(inner) for visit in tree.visits if (inner := compiled_inner(visit.module)) is not None}
    uncalled = _uncalled(tree)
    wanted: set[int] = set()
    units: set[int] = set()
    empty: list[str] = []
    untaken: dict[int, dict[int, int]] = {}  # per module: sizes of the parameters below it that no unit took
    holds_any: dict[int, bool] = {}

    def settle(module: nn.Module) -> None:
        key = id(module)
        own = [p for p in module._parameters.values() if p is not None and id(p) not in tree.ignored_parameters]
        untaken[key] = {id(p): p.numel() for p in own}
        holds_any[key] = bool(own)
        for child in module._modules.values():
            if child is None or id(child) not in tree.ours:
                continue
            if id(child) not in untaken:
                settle(child)
            untaken[key].update(untaken[id(child)])
            holds_any[key] |= holds_any[id(child)]
        if module is tree.root or key in uncalled:
            return
        numel = sum(untaken[key].values())
        inner = compiled_inner(module)
        if id(inner) in wanted or any(policy.matches(name, module, numel) for name in tree.names[key]):
            if not holds_any[key]:
                empty.append(tree.names[key][0])
                return
            if not has_forward(module, entry_points):
                _refuse_container(tree.names[key][0], module, policy)
            wanted.add(key)
            # torch.compile(block) holds the block's old __call__, so the wrapper has to be the unit.
            if key not in compiled:
                units.add(key)
                untaken[key] = {}

    settle(tree.root)
    if not units and empty and not _matches_elsewhere(tree, policy):
        raise PolicyError(
            f"the policy {policy.describe()} matches only modules without parameters",
            found=", ".join(empty[:10]),
            cure="name modules that hold parameters",
        )
    return units


def _matches_elsewhere(tree: _Tree, policy: Policy) -> bool:
    """Whether the policy matches the root, or modules that are units already or ignored."""
    return any(
        policy.matches(visit.name, visit.module)
        for visit in tree.visits
        if visit.module is tree.root or id(visit.module) not in tree.ours
    )


def _uncalled(tree: _Tree) -> set[int]:
    """Modules whose weights their parent reads without calling them; gathering in their call would come too late."""
    found: set[int] = set()
    for visit in tree.visits:
        if visit.parent is None:
            continue
        # parametrizations run when the weight is read; MultiheadAttention reads out_proj.weight itself.
        is_parametrization = visit.parent.module._modules.get("parametrizations") is visit.module
        is_out_proj = type(visit.module).__name__ == "NonDynamicallyQuantizableLinear"
        if is_parametrization or is_out_proj or id(visit.parent.module) in found:
            found.add(id(visit.module))
    return found


def _refuse_container(name: str, module: nn.Module, policy: Policy) -> None:
    classes = dict.fromkeys(class_name(child) for child in module.children() if has_forward(child))
    instead = "by_class(" + ", ".join(f'"{cls}"' for cls in classes) + f') or by_name("{user_name(name)}.*")'
    raise PolicyError(
        f"the policy {policy.describe()} matches '{name}' ({class_name(module)}), a container without a forward:"
        " nothing would gather it",
        found=_children(name, module),
        cure=f"wrap the children instead: {instead}" if classes else "wrap the module that holds it",
    )


# --- owners ---------------------------------------------------------------------------------------------------------


def _assign(
    tree: _Tree, unit_ids: set[int], is_owned: Callable[[nn.Parameter], bool], warnings: list[str]
) -> Partition:
    units: dict[int, UnitSpec] = {}
    nested: dict[int, tuple[str, nn.Module]] = {}
    params: dict[int, ParamSpec] = {}
    owners: dict[int, tuple[int, ...]] = {}  # parameter -> units that are on every path to it, outermost first
    nested_params: dict[int, str] = {}
    buffers: dict[tuple[int, str], BufferSpec] = {}
    buffer_owners: dict[tuple[int, str], tuple[int, ...]] = {}

    for visit in tree.visits:
        module, key = visit.module, id(visit.module)
        path = visit.parent.units if visit.parent else ()
        if key in unit_ids:
            units.setdefault(key, UnitSpec(visit.name, module))
            path += (key,)
        visit.units = path
        if visit.region == NESTED and tree.is_unit(module):
            nested.setdefault(key, (visit.name, module))
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = _join(visit.name, attribute)
            if visit.region == NESTED:
                nested_params.setdefault(id(parameter), name)
                continue
            spec = params.setdefault(id(parameter), ParamSpec(parameter))
            spec._seen_at(module, attribute, name)
            owners[id(parameter)] = _common(owners.get(id(parameter), path), path)
        for attribute, buffer in module._buffers.items():
            if buffer is None or key in tree.nested:
                continue
            at = (key, attribute)
            persistent = attribute not in module._non_persistent_buffers_set
            buffers.setdefault(at, BufferSpec(_join(visit.name, attribute), module, attribute, persistent))
            buffer_owners[at] = _common(buffer_owners.get(at, path), path)

    for key, spec in params.items():
        if key in nested_params or is_owned(spec.parameter):
            _refuse_tie(spec, nested_params.get(key))
        if key not in tree.ignored_parameters:
            units[owners[key][-1]].params.append(spec)
    for at, spec in buffers.items():
        if at[0] in tree.ours:
            units[buffer_owners[at][-1]].buffers.append(spec)
    return Partition(
        units=list(units.values()),
        nested=list(nested.values()),
        ignored_params=[spec for key, spec in params.items() if key in tree.ignored_parameters],
        ignored_buffers=[spec for at, spec in buffers.items() if at[0] not in tree.ours],
        warnings=warnings,
    )


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return left if left == right else tuple(unit for unit in left if unit in right)


def _refuse_tie(spec: ParamSpec, other: str | None) -> None:
    raise WrapError(
        "a parameter belongs to a unit of an earlier fsdp_wrap and is used outside it too",
        found=f"'{other}' in that unit, {', '.join(map(repr, spec.names))} outside" if other else repr(spec.names[0]),
        parameter=spec.name,
        cure="wrap the whole model in one call, fsdp_wrap(model, policy): the lowest unit around all uses then owns it",
    )


# --- advice and texts -----------------------------------------------------------------------------------------------


def blocks_worth_wrapping(root: nn.Module) -> str | None:
    """The repeated block that holds most of an unwrapped model's parameters, in words; None if there is none."""
    total = _numel(root)
    best: tuple[int, str] | None = None
    for name, parent in root.named_modules():
        groups: dict[str, list[nn.Module]] = {}
        for child in dict.fromkeys(parent.children()):
            if has_forward(child) and any(True for _ in child.parameters()):
                groups.setdefault(class_name(child), []).append(child)
        for cls, blocks in groups.items():
            numel = _numel(*blocks)
            if len(blocks) >= 2 and 2 * numel > total and (best is None or numel > best[0]):
                where = f"'{user_name(name)}'" if user_name(name) else "the model"
                best = numel, (
                    f"{len(blocks)} {cls} modules in {where} hold {100 * numel // total}% of the parameters:"
                    f' wrap each with policy=by_class("{cls}")'
                )
    return best[1] if best else None


def _numel(*modules: nn.Module) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _label(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"a {type(item).__name__} of shape {tuple(item.shape)}"
    if isinstance(item, nn.Module):
        return f"a {class_name(item)}"
    return repr(item)


def _children(name: str, module: nn.Module) -> str:
    children = [f"{_join(name, key)} ({class_name(child)})" for key, child in module.named_children()]
    return "its children: " + (", ".join(children[:24]) + (" ..." if len(children) > 24 else "") or "none")
