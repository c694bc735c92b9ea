"""Which modules become units, and which unit owns each parameter and buffer.

The engine and the planner both start here. Nothing is changed: the result only points into the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable

from torch import nn

from .errors import PolicyError, WrapError
from .module_tree import NESTED, ModuleTree, check_root, join_name, list_children
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
    """One registered buffer: canonical dotted name, the module and attribute that hold it, and whether it is saved."""

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
    check_root(root, is_unit, entry_points)
    tree = ModuleTree(root, ignored, is_unit)
    warnings: list[str] = []
    unit_ids = {id(root)}
    if policy is not None:
        policy = policy.bind(root)
        warnings = policy.check([(visit.name, visit.module) for visit in tree.visits])
        unit_ids |= _select(tree, policy, entry_points)
    return _assign(tree, unit_ids, is_owned, warnings)


# --- units ----------------------------------------------------------------------------------------------------------


def _select(tree: ModuleTree, policy: Policy, entry_points: tuple[str, ...]) -> set[int]:
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


def _matches_elsewhere(tree: ModuleTree, policy: Policy) -> bool:
    """Whether the policy matches the root, or modules that are units already or ignored."""
    return any(
        policy.matches(visit.name, visit.module)
        for visit in tree.visits
        if visit.module is tree.root or id(visit.module) not in tree.ours
    )


def _uncalled(tree: ModuleTree) -> set[int]:
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
        found=list_children(name, module),
        cure=f"wrap the children instead: {instead}" if classes else "wrap the module that holds it",
    )


# --- owners ---------------------------------------------------------------------------------------------------------


def _assign(
    tree: ModuleTree, unit_ids: set[int], is_owned: Callable[[nn.Parameter], bool], warnings: list[str]
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
            name = join_name(visit.name, attribute)
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
            buffers.setdefault(at, BufferSpec(join_name(visit.name, attribute), module, attribute, persistent))
            buffer_owners[at] = _common(buffer_owners.get(at, path), path)

    for key, spec in params.items():
        if key in nested_params or is_owned(spec.parameter):
            _refuse_tie(spec, nested_params.get(key))
        if key not in tree.ignored_parameters:
            units[owners[key][-1]].params.append(spec)
    for at, buffer_spec in buffers.items():
        if at[0] in tree.ours:
            units[buffer_owners[at][-1]].buffers.append(buffer_spec)
    return Partition(
        units=list(units.values()),
        nested=list(nested.values()),
        ignored_params=[spec for key, spec in params.items() if key in tree.ignored_parameters],
        ignored_buffers=[buffer_spec for at, buffer_spec in buffers.items() if at[0] not in tree.ours],
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


def blocks_worth_wrapping(root: nn.Module, more_than: int = 1) -> str | None:
    """The repeated block that holds most of an unwrapped model's parameters, in words; None if there is none.

    Args:
        more_than: Fewer blocks than this plus one are not worth it: so many are gathered at a time anyway.
    """
    total = _numel(root)
    best: tuple[int, str] | None = None
    for name, parent in root.named_modules():
        if parent is not root and not has_forward(parent):
            continue
        groups: dict[str, list[nn.Module]] = {}
        for child in _callable_children(parent):
            if any(True for _ in child.parameters()):
                groups.setdefault(class_name(child), []).append(child)
        for cls, blocks in groups.items():
            numel = _numel(*blocks)
            if len(blocks) > more_than and 2 * numel > total and (best is None or numel > best[0]):
                where = f"'{user_name(name)}'" if user_name(name) else "the model"
                share = f"{len(blocks)} {cls} modules in {where} hold {100 * numel // total}% of the parameters"
                best = numel, f'{share}: wrap each with policy=by_class("{cls}")'
    return best[1] if best else None


def _callable_children(parent: nn.Module) -> list[nn.Module]:
    """The nearest modules below ``parent`` that can be units, each once: containers are looked through."""
    found: dict[nn.Module, None] = {}
    for child in parent.children():
        found.update(dict.fromkeys([child] if has_forward(child) else _callable_children(child)))
    return list(found)


def _numel(*modules: nn.Module) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
