"""One use of a name in a file, and the text of its counterpart."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from . import config_settings
from .names import Names
from .rule import Argument, Rule

__all__ = ["Use", "Written", "bind_arguments", "key_of", "one_line", "write"]

_PLACE = re.compile(r"\{(?P<name>\w+)(?:!(?P<form>\*|\w+))?(?:=(?P<default>[^}]*))?\}")
_ORDER = ("stage", "mesh", "precision", "reshard_after_forward", "prefetch", "offload", "recompute", "ignored")
_USUAL = {"module": "model", "model": "model", "policy": "policy", "path": "path"}


@dataclass(frozen=True)
class Written:
    """The counterpart's text and what to say about it.

    Attributes:
        text: Python.
        notes: In order.
        missing: What has no counterpart.
    """

    text: str
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass
class Use:
    """What a rule sees of a use.

    Attributes:
        given: Arguments by name.
        receiver: The object whose method is called, as text.
        unread: Arguments behind a star that could not be followed, as text.
        render: Gives an expression's text, with what is inside it translated, and notes.
        resolve: Gives the expression behind a variable.
        finish: Hears of an argument that was translated without being rendered.
    """

    given: Mapping[str, ast.expr]
    receiver: str
    unread: tuple[str, ...]
    render: Callable[[ast.expr], Written]
    resolve: Callable[[ast.expr], ast.expr]
    finish: Callable[[ast.AST], None]
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def text(self, node: ast.expr) -> str:
        written = self.render(node)
        self.notes += written.notes
        self.missing += written.missing
        return written.text


def bind_arguments(
    call: ast.Call, parameters: str, names: Names, skip: int = 0
) -> tuple[dict[str, ast.expr], tuple[str, ...]]:
    """Arguments of a call by parameter name. ``**options`` is followed to a dictionary that is written out.

    Args:
        call: The call.
        parameters: Names of what may be given by position.
        names: Of the file.
        skip: Positional arguments that belong to somebody else (the function in ``functools.partial``).

    Returns:
        The arguments, and those that could not be followed, as text.
    """
    given: dict[str, ast.expr] = {}
    unread = []
    if parameters == "*args":
        given["args"] = ast.Tuple(call.args[skip:], ast.Load())
    for name, value in zip(parameters.split(), call.args[skip:]):
        if name == "*args":
            break
        if isinstance(value, ast.Starred):
            break
        given[name] = value
    unread += [one_line(value) for value in call.args[skip:] if isinstance(value, ast.Starred)]
    for keyword in call.keywords:
        if keyword.arg is not None:
            given[keyword.arg] = keyword.value
            continue
        found, missed = _options_of(keyword.value, names)
        given |= found
        unread += missed
    return given, tuple(unread)


def _options_of(node: ast.expr, names: Names) -> tuple[dict[str, ast.expr], list[str]]:
    """What a dictionary of options holds as far as it is written out, and the rest as text."""
    unread = ["**" + node.id] if isinstance(node, ast.Name) and node.id in names.changed else []
    behind = names.value(node)
    given: dict[str, ast.expr] = {}
    parts: list[ast.expr] = []
    if isinstance(behind, ast.BinOp) and isinstance(behind.op, ast.BitOr):
        parts = [behind.left, behind.right]
    elif (options := config_settings.written_out(behind)) is not None:
        for key, value in zip(options.keys, options.values):
            if isinstance(key, ast.Constant):
                given[str(key.value)] = value
            elif key is None:
                found, missed = _options_of(value, names)
                given |= found
                unread += missed
            else:
                unread.append(f"**{{{one_line(key)}: ...}}")
    else:
        unread.append("**" + one_line(node))
    for part in parts:
        found, missed = _options_of(part, names)
        given |= found
        unread += missed
    return given, unread


def one_line(node: ast.AST, longest: int = 10_000) -> str:
    """The expression's source as Python prints it, cut after ``longest`` characters."""
    text = ast.unparse(node).replace("\n", " ")
    return text if len(text) <= longest else text[: longest - 3] + "..."


def key_of(node: ast.expr) -> str:
    """What a value is called in tables: a literal's text, or the last name of a dotted one."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else repr(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return one_line(node)


def write(rule: Rule, use: Use) -> Written:
    """The counterpart of a use by its rule's template; of each module where a list of them is given."""
    several = use.resolve(use.given["module"]) if "module" in use.given else None
    if isinstance(several, ast.List) and several.elts and "{module}" in rule.write:
        written = [_write(rule, replace(use, given={**use.given, "module": one})) for one in several.elts]
        return replace(written[0], text="; ".join(one.text for one in written))
    return _write(rule, use)


def _write(rule: Rule, use: Use) -> Written:
    options = _options(rule.arguments, use) if rule.arguments else ""
    by_receiver = (text for pattern, text in rule.by_receiver.items() if re.search(pattern, use.receiver))
    template = next(by_receiver, rule.write)
    for name, argument in rule.arguments.items():
        if argument.templates and name in use.given:
            template = argument.templates.get(key_of(use.resolve(use.given[name])), template)

    def place(match: re.Match[str]) -> str:
        name, form, default = match["name"], match["form"], match["default"]
        if name == "self":
            return use.receiver
        if name == "options":
            return options
        if form == "settings":
            return _settings_of(use)
        node = use.given.get(name)
        if node is None and default is not None and default.startswith("@"):
            node, form = use.given.get(default[1:]), None
            default = _USUAL.get(default[1:], default[1:])
        if node is None:
            return default if default is not None else _USUAL.get(name, name)
        if form == "models":
            return _wraps_of(use, node)
        if form == "*":
            return ", ".join(_elements(use, node))
        if form == "policy":
            return _policy_of(use, node)
        if form == "union":
            return " | ".join(_elements(use, node))
        if form == "count":
            behind = use.resolve(node)
            return str(len(behind.elts)) if isinstance(behind, (ast.List, ast.Tuple)) else default or "1"
        if form == "owner":
            return _owner_of(node)
        return use.text(node)

    if rule.knows_all:
        known = {*rule.parameters.split(), *rule.arguments, *(match["name"] for match in _PLACE.finditer(template))}
        use.notes += [f"{name}: is not known to this tool, and nothing is written for it" for name in use.given
                      if name not in known]  # fmt: skip
    text = _PLACE.sub(place, template).replace("(, ", "(").removeprefix(", ")
    if use.unread:
        unread = ", ".join(dict.fromkeys(use.unread))
        use.notes.append(f"{unread} is made, or added to, when it runs: translate what is not seen here by hand")
    notes = ([rule.note] if rule.note else []) + use.notes
    return Written(text, tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(use.missing)))


def _options(arguments: Mapping[str, Argument], use: Use) -> str:
    placed: dict[str, str] = {}
    named: dict[str, str] = {}
    fragments: list[str] = []
    for name, argument in arguments.items():
        node = use.given.get(name)
        if node is None:
            fragments += [argument.absent] if argument.absent else []
            use.notes += [argument.absent_note] if argument.absent_note else []
            continue
        key = _key_in(argument.values, use.resolve(node))
        is_left_out = not (argument.to or argument.values or argument.none)
        if key in argument.values or key in argument.templates or (is_left_out and not isinstance(node, ast.Dict)):
            use.finish(node)
        if argument.note and key not in argument.harmless:
            use.notes.append(f"{name}: {argument.note}")
        why = argument.number if key.isdigit() else ""
        if why or (argument.none and key not in argument.harmless):
            use.missing.append(f"{name}={one_line(node, 40)}: {why or argument.none}")
            continue
        if key in argument.notes:
            use.notes.append(f"{name}={key}: {argument.notes[key]}")
        if key in argument.values:
            fragments += [argument.values[key]] if argument.values[key] else []
        elif argument.values and not argument.to:
            use.finish(node)
            known = ", ".join(f"{value} is {_in_short(text)}" for value, text in argument.values.items()
                              if not value.isdigit())
            use.notes.append(f"{name}={one_line(node, 40)} is chosen when it runs: {known}")
            fragments += [argument.otherwise] if argument.otherwise else []
        elif argument.to.isdigit():
            if key not in argument.harmless:
                placed[argument.to] = use.text(node)
        elif argument.to == "mesh" and isinstance(use.resolve(node), ast.Tuple):
            use.finish(node)  # a pair of groups, which its note is about
        elif argument.to and key != "None":
            named[argument.to] = use.text(node)
    for fragment in fragments:
        for part in fragment.split("; "):
            keyword, equals, _ = part.partition("=")
            if not equals or "(" in keyword:
                placed.setdefault("1", part)
            elif keyword not in named:
                named[keyword] = part[len(keyword) + 1 :]
    order = {name: place for place, name in enumerate(_ORDER)}
    parts = [placed[place] for place in sorted(placed)]
    parts += [f"{name}={named[name]}" for name in sorted(named, key=lambda name: order.get(name, len(order)))]
    return "".join(", " + part for part in parts)


def _key_in(values: Mapping[str, str], node: ast.expr) -> str:
    """The key of a value; of an enum's member also as ``Enum(2)`` and ``Enum["NAME"]``."""
    key, inner = key_of(node), None
    if isinstance(node, ast.Subscript):
        inner = node.slice
    elif isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        inner = node.args[0]
    return key_of(inner) if key not in values and isinstance(inner, ast.Constant) and key_of(inner) in values else key


def _in_short(text: str) -> str:
    return ", ".join(part.partition("(")[0] for part in text.split("; ")) if text else "the default"


def _elements(use: Use, node: ast.expr) -> list[str]:
    """The texts of ``{A, B}``; of what is not written out ``*classes``."""
    behind = use.resolve(node)
    while isinstance(behind, ast.Call) and len(behind.args) == 1 and key_of(behind.func) in ("set", "list", "tuple"):
        behind = use.resolve(behind.args[0])
    if isinstance(behind, (ast.Set, ast.List, ast.Tuple)):
        return [use.text(element) for element in behind.elts]
    if isinstance(behind, ast.Constant) and isinstance(behind.value, str):
        return [repr(name.strip()) for name in behind.value.split(",")]
    return ["*" + use.text(node)]


def _policy_of(use: Use, node: ast.expr) -> str:
    """``lambda m: isinstance(m, Block)`` is ``by_class(Block)``; any other predicate is ``by_predicate`` of it."""
    behind = use.resolve(node)
    if isinstance(behind, ast.Lambda) and isinstance(behind.body, ast.Call):
        test = behind.body
        parameters = {argument.arg for argument in behind.args.args}
        if key_of(test.func) == "isinstance" and len(test.args) == 2 and key_of(test.args[0]) in parameters:
            return f"fsdp.by_class({', '.join(_elements(use, test.args[1])).lstrip('*')})"
    return f"fsdp.by_predicate({use.text(node)})"


def _owner_of(node: ast.expr) -> str:
    """The model in ``model.parameters()``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("parameters"):
        return one_line(node.func.value)
    return "model"


_NO_MODELS = ("optim", "loader", "sched", "sampler", "dataset", "_dl", "lr_")


def _wraps_of(use: Use, node: ast.expr) -> str:
    """A wrap for each of several objects whose names do not say that they are something else than a model."""
    texts = [use.text(one) for one in node.elts] if isinstance(node, ast.Tuple) else []
    models = [
        text for text in texts
        if not any(word in f"_{text.lower()}_" for word in _NO_MODELS) and text.rpartition(".")[2] not in ("dl", "opt")
    ]  # fmt: skip
    named = [text for text in models if any(word in text.lower() for word in ("model", "net"))]
    return "; ".join(f"fsdp.fsdp_wrap({text}, policy)" for text in (named or models)[: None if named else 1])


def _settings_of(use: Use) -> str:
    """What a DeepSpeed configuration that is written out asks of ``fsdp_wrap``."""
    node = use.given.get("config", use.given.get("config_params"))
    behind = config_settings.written_out(use.resolve(node)) if node is not None else None
    if behind is not None:
        return config_settings.wrap_options(behind)
    where = one_line(node, 40) if node is not None else "a file that the command line names"
    use.notes.append(f"stage, precision and offload are in {where}: give the JSON file as a PATH too")
    return ", stage=..."
