"""Wrap policies: which modules of a model become units.

A policy answers one question about one module. What follows from the answers (owners of tied parameters, what a unit
holds) is decided in :mod:`fsdplite.partition`. No process group, no device.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any, Callable

from torch import nn

from .errors import PolicyError
from .keywords import known_keywords
from .modules import (
    LISTED,
    NamedModules,
    class_counts,
    class_name,
    compiled_inner,
    has_forward,
    listing,
    name_pattern,
    nearest_class,
    nearest_name,
    user_name,
    user_names,
)

__all__ = ["Policy", "as_policy", "by_class", "by_name", "by_predicate", "by_size", "from_model"]

# Where a model says which of its modules belong together. Transformers: `_no_split_modules` (None in base classes);
# diffusers also lists `_repeated_blocks`.
DECLARATIONS = ("_no_split_modules", "no_split_modules", "_no_split_module_classes", "_repeated_blocks")


class Policy:
    """Decides for each module whether it becomes a unit. Combine policies with ``|``.

    A subclass overrides :meth:`matches` and :meth:`describe`, and :meth:`bind` if it has to see the whole model first.
    """

    def knowing(self, **options: Any) -> Policy:
        """The policy, told how the model will run (options of ``fsdp.plan``); for one that asks nothing, itself."""
        return self

    def bind(self, root: nn.Module) -> Policy:
        """The policy to use for ``root``; called once, before any module is matched."""
        return self

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        """Whether ``module`` becomes a unit.

        Args:
            name: Dotted name in the model, ``""`` for the root.
            module: The module.
            untaken_numel: Parameter elements in ``module`` that no unit below it took; None counts all of them.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Text that is the same on every rank for the same policy."""
        raise NotImplementedError

    def absent(self, named_modules: NamedModules) -> list[str]:
        """For each entry of this policy that matches no module: what it is, and the nearest that exists."""
        return []

    def inventory(self, named_modules: NamedModules) -> str:
        """What is in the model, in the terms of this policy."""
        return "the classes present are " + listing(class_counts(named_modules))

    def check(self, named_modules: NamedModules) -> list[str]:
        """Compare the policy with the model it is used for.

        Args:
            named_modules: All names of all modules, as ``named_modules(remove_duplicate=False)`` gives them.

        Returns:
            Warnings, for the caller to emit once: entries that match nothing beside others that do.

        Raises:
            PolicyError: Nothing matches. The message lists what is there and suggests the nearest.
        """
        absent = self.absent(named_modules)
        if not any(self.matches(name, module) for name, module in named_modules):
            hints = [hint for hint in (text.partition("; ")[2] for text in absent) if hint]
            raise PolicyError(
                f"the policy {self.describe()} matches no module of the model",
                found=self.inventory(named_modules),
                cure="; ".join(hints) or "name what is listed above",
            )
        return [f"the policy {self.describe()} has an entry without a match: {text}" for text in absent]

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return _Union(self, other)

    def __repr__(self) -> str:
        return self.describe()


class _ByValue(Policy):
    """Equal to another of its kind that holds the same."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.describe())


class _Union(_ByValue):
    def __init__(self, *parts: Policy) -> None:
        self.parts: list[Policy] = [p for part in parts for p in (part.parts if isinstance(part, _Union) else [part])]

    def knowing(self, **options: Any) -> Policy:
        return _Union(*(part.knowing(**options) for part in self.parts))

    def bind(self, root: nn.Module) -> Policy:
        return _Union(*(part.bind(root) for part in self.parts))

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        return any(part.matches(name, module, untaken_numel) for part in self.parts)

    def describe(self) -> str:
        return " | ".join(part.describe() for part in self.parts)

    def absent(self, named_modules: NamedModules) -> list[str]:
        return [text for part in self.parts for text in part.absent(named_modules)]

    def inventory(self, named_modules: NamedModules) -> str:
        return "; ".join(dict.fromkeys(part.inventory(named_modules) for part in self.parts))


class _ByClass(_ByValue):
    def __init__(self, *entries: type | str) -> None:
        if not entries:
            raise PolicyError("by_class() needs at least one class or class name", cure='by_class("Block")')
        for entry in entries:
            if isinstance(entry, str):
                if not entry.strip():
                    raise PolicyError("by_class() was given an empty name", cure='name a class: by_class("Block")')
            elif not (isinstance(entry, type) and issubclass(entry, nn.Module)):
                raise PolicyError(
                    "by_class() takes module classes and their names",
                    found=repr(entry),
                    cure="pass them one by one: by_class(Block, 'Linear')",
                )
        self.entries = tuple(entry.strip() if isinstance(entry, str) else entry for entry in entries)

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        return any(_is_of_class(module, entry) for entry in self.entries)

    def describe(self) -> str:
        return f"by_class({', '.join(map(_class_label, self.entries))})"

    def absent(self, named_modules: NamedModules) -> list[str]:
        missing = []
        for entry in self.entries:
            if any(_is_of_class(module, entry) for _, module in named_modules):
                continue
            near = nearest_class(entry if isinstance(entry, str) else entry.__name__, named_modules)
            hint = f'; use by_class("{near}")' if near else ""
            missing.append(f"no module is of class {_class_label(entry)}{hint}")
        return missing


class _ByName(_ByValue):
    def __init__(self, *globs: str) -> None:
        if not globs:
            raise PolicyError("by_name() needs at least one module name or glob", cure='by_name("blocks.*")')
        for glob in globs:
            if not isinstance(glob, str):
                raise PolicyError(
                    "by_name() takes dotted module names and globs",
                    found=repr(glob),
                    cure='by_name("blocks.*"); for classes by_class(...)',
                )
            if not glob.strip():
                raise PolicyError("by_name() was given an empty name", cure='by_name("blocks.*")')
        self.globs = tuple(glob.strip() for glob in globs)

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        name = user_name(name)
        return any(_glob_matches(glob, name) for glob in self.globs)

    def describe(self) -> str:
        return f"by_name({', '.join(map(_quote, self.globs))})"

    def absent(self, named_modules: NamedModules) -> list[str]:
        names = user_names(named_modules)
        missing = []
        for glob in self.globs:
            if not any(_glob_matches(glob, name) for name in names):
                near = nearest_name(glob, names)
                hint = f'; use by_name("{near}")' if near else ""
                missing.append(f'no module name matches "{glob}"{hint}')
        return missing

    def inventory(self, named_modules: NamedModules) -> str:
        names = Counter(user_names(named_modules))
        if len(names) > LISTED:
            names = Counter(name_pattern(name) for name in names)
        return "the names present are " + listing(names)


class _BySize(_ByValue):
    def __init__(self, min_numel: int) -> None:
        if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 1:
            raise PolicyError(
                "by_size() takes a positive number of elements", found=repr(min_numel), cure="by_size(10_000_000)"
            )
        self.min_numel = min_numel

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        if not has_forward(module):
            return False
        return (_numel(module) if untaken_numel is None else untaken_numel) >= self.min_numel

    def describe(self) -> str:
        return f"by_size({self.min_numel})"

    def absent(self, named_modules: NamedModules) -> list[str]:
        largest = max((_numel(module) for _, module in named_modules if has_forward(module)), default=0)
        if largest >= self.min_numel:
            return []
        return [f"no module holds {self.min_numel:,} elements; use at most by_size({largest})"]

    def inventory(self, named_modules: NamedModules) -> str:
        sizes = [(_numel(module), user_name(name)) for name, module in named_modules if has_forward(module)]
        largest = sorted(sizes, key=lambda size: -size[0])[:3]
        return "the largest modules hold " + ", ".join(f"{n:,} elements ({name or 'root'})" for n, name in largest)


class _ByPredicate(Policy):
    def __init__(self, fn: Callable[..., bool]) -> None:
        if not callable(fn):
            raise PolicyError(
                "by_predicate() takes a function", found=repr(fn), cure="by_predicate(lambda module: ...)"
            )
        self.fn = fn
        self.takes_name = _positional_arguments(fn) == 2
        self.answers: dict[tuple[str, int], bool] = {}

    def bind(self, root: nn.Module) -> Policy:
        # Asked once per module, in named_modules() order: a function that counts its calls means that order.
        bound = _ByPredicate(self.fn)
        for name, module in root.named_modules(remove_duplicate=not self.takes_name):
            bound.answers[bound._key(name, module)] = self.matches(name, module)
        return bound

    def _key(self, name: str, module: nn.Module) -> tuple[str, int]:
        return (name if self.takes_name else "", id(module))

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        known = self.answers.get(self._key(name, module))
        if known is not None:
            return known
        answer = self.fn(user_name(name), module) if self.takes_name else self.fn(module)
        if not isinstance(answer, bool):
            raise PolicyError(
                f"{self.describe()} must answer True or False",
                found=f"{type(answer).__name__} for module '{name}' ({class_name(module)})",
                cure="return a bool",
            )
        return answer

    def absent(self, named_modules: NamedModules) -> list[str]:
        if any(self.matches(name, module) for name, module in named_modules):
            return []
        return ["it is True for no module"]

    def describe(self) -> str:
        fn = inspect.unwrap(self.fn)
        label = getattr(fn, "__qualname__", type(fn).__qualname__)
        return f"by_predicate({getattr(fn, '__module__', '')}.{label})"


class _FromModel(Policy):
    def bind(self, root: nn.Module) -> Policy:
        for attribute in DECLARATIONS:
            declared = _declared(root, attribute)
            if declared:
                return _Declared(attribute, *declared)
        raise PolicyError(
            "the model does not declare which of its modules belong together",
            expected=f"class names in {DECLARATIONS[0]}, on the model or one of its modules",
            found=self.inventory(list(root.named_modules())),
            cure="name the class of the repeated block: by_class(...)",
        )

    def matches(self, name: str, module: nn.Module, untaken_numel: int | None = None) -> bool:
        raise PolicyError("from_model() needs the model first", cure="policy.bind(model)")

    def describe(self) -> str:
        return "from_model()"


class _Declared(_ByClass):
    """What a model declares. It often lists blocks that this configuration has none of; that is no warning."""

    def __init__(self, attribute: str, *entries: type | str) -> None:
        super().__init__(*entries)
        self.attribute = attribute

    def describe(self) -> str:
        return f"from_model({self.attribute}: {', '.join(map(_class_label, self.entries))})"

    def absent(self, named_modules: NamedModules) -> list[str]:
        missing = super().absent(named_modules)
        return missing if len(missing) == len(self.entries) else []


def by_class(*classes_or_names: type | str) -> Policy:
    """Units are the modules of these classes.

    Args:
        classes_or_names: A class matches its subclasses too; a string is the exact class name, ``"Block"``, or the
            qualified one, ``"my_model.Block"``.
    """
    return _ByClass(*classes_or_names)


def by_name(*globs: str) -> Policy:
    """Units are the modules whose dotted name matches.

    Args:
        globs: ``fnmatch`` patterns; ``*`` also stands for dots, so ``"*.attn"`` finds ``blocks.0.attn``. A pattern that
            ends in ``*`` takes the outermost modules it matches: ``"blocks.*"`` is the blocks and not what is inside
            them; ``"blocks.**"`` is both.
    """
    return _ByName(*globs)


@known_keywords
def by_size(min_numel: int) -> Policy:
    """Units are the modules with at least ``min_numel`` parameter elements that no unit below them took."""
    return _BySize(min_numel)


@known_keywords
def by_predicate(fn: Callable[..., bool]) -> Policy:
    """Units are the modules for which ``fn(module)``, or ``fn(name, module)``, is True."""
    return _ByPredicate(fn)


def from_model() -> Policy:
    """Units are the modules whose classes the model itself lists, in ``_no_split_modules`` and the like."""
    return _FromModel()


def as_policy(obj: Any) -> Policy | None:
    """``obj`` if it is a policy or None; anything else is an error that shows the policy that was meant."""
    if obj is None or isinstance(obj, Policy):
        return obj
    if any(obj is constructor for constructor in (by_class, by_name, by_size, by_predicate, from_model)):
        cure = f"{obj.__name__}({'' if obj is from_model else '...'}): call it"
    elif isinstance(obj, nn.Module):
        cure = f"by_class({class_name(obj)})"
    elif isinstance(obj, type):
        cure = f"by_class({obj.__name__})"
    elif isinstance(obj, str):
        cure = f'by_name("{obj}")' if "*" in obj or "." in obj else f'by_class("{obj}") or by_name("{obj}")'
    elif isinstance(obj, (list, tuple, set, frozenset)):
        cure = f"by_class({', '.join(sorted(map(_entry_text, obj)))})"
    elif isinstance(obj, int):
        cure = f"by_size({obj})"
    elif callable(obj):
        cure = "by_predicate(fn)"
    else:
        cure = "by_class(...), by_name(...), by_size(...), by_predicate(...) or from_model()"
    raise PolicyError("this is not a wrap policy", expected="a Policy or None", found=repr(obj), cure=cure)


def _is_of_class(module: nn.Module, entry: type | str) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    name = class_name(module) if compiled_inner(module) is None else type(module).__name__
    prefix, _, last = entry.rpartition(".")
    if name != last:
        return False
    if not prefix:
        return True
    # Either where the class is defined or where it is published: torch.nn.Linear lives in torch.nn.modules.linear.
    public = getattr(sys.modules.get(prefix), last, None)
    own = [cls for cls in type(module).__mro__ if cls.__name__ == name]
    return any(cls is public or f"{cls.__module__}.{cls.__qualname__}" == entry for cls in own)


def _declared(root: nn.Module, attribute: str) -> list[type | str]:
    entries: dict[type | str, None] = {}
    for module in root.modules():
        value = getattr(module, attribute, None)
        if isinstance(value, (str, type)):
            value = [value]
        if isinstance(value, (list, tuple, set, frozenset)):
            # Sets have no order of their own, and every rank must describe the policy alike.
            entries.update(dict.fromkeys(sorted(value, key=_class_label)))
    return [entry for entry in entries if entry]


def _glob_matches(glob: str, name: str) -> bool:
    if not name or not fnmatchcase(name, glob):
        return False
    if not glob.endswith("*") or glob.endswith("**"):
        return True
    parts = name.split(".")
    return not any(fnmatchcase(".".join(parts[:i]), glob) for i in range(1, len(parts)))


def _positional_arguments(fn: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if keyword or len(required) > 2 or not (positional or takes_any):
        raise PolicyError(
            "by_predicate() cannot call this function",
            expected="fn(module) or fn(name, module)",
            found=f"{getattr(fn, '__name__', fn)}{inspect.signature(fn)}",
            cure="by_predicate(lambda module: ...)",
        )
    return max(len(required), 1)


def _quote(text: str) -> str:
    return f'"{text}"'


def _class_label(entry: type | str) -> str:
    return _quote(entry) if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"


def _entry_text(entry: Any) -> str:
    return entry.__name__ if isinstance(entry, type) else repr(entry)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
