"""Finds what a Python source uses of other engines. It is parsed, never imported or run."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator

from . import config_settings, plain
from .call import Use, Written, bind_arguments, one_line, write
from .engines import ENGINES
from .names import Names
from .rule import ANY, KEEP, NONE, UNIT, Engine, Finding, Rule

__all__ = ["find", "rule_of"]

_LONGEST_FOUND = 200
_NO_BASE = "there is no class to derive from: a wrapped module keeps its own class, whose methods may be overridden"


@functools.cache
def _by_leaf() -> dict[str, list[tuple[Engine, Rule]]]:
    index: dict[str, list[tuple[Engine, Rule]]] = defaultdict(list)
    for engine in ENGINES:
        for rule in engine.rules:
            if not rule.of:
                for name in rule.names.split():
                    index[name].append((engine, rule))
    return index


@functools.cache
def _by_method() -> dict[tuple[str, str], tuple[Engine, Rule]]:
    index: dict[tuple[str, str], tuple[Engine, Rule]] = {}
    for engine in ENGINES:
        for rule in engine.rules:
            for name in rule.names.split() if rule.of else ():
                for kind in rule.of.split("|"):
                    index.setdefault((kind, name), (engine, rule))
    return index


@functools.cache
def _method_names() -> frozenset[str]:
    return frozenset(name for _, name in _by_method())


def rule_of(dotted: str) -> tuple[Engine, Rule] | None:
    """The rule of a dotted name; the longest known end of it decides."""
    parts = dotted.split(".")
    for count in (3, 2, 1):
        leaf = ".".join(parts[-count:])
        for engine, rule in _by_leaf().get(leaf, ()):
            if any(dotted.startswith(module + ".") for module in engine.modules) and len(parts) > count:
                return engine, rule
    return None


def find(tree: ast.Module) -> list[Finding]:
    """All uses in one file, in the order of the source."""
    return _Finder(tree).run()


class _Finder:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.names = Names(tree)
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.plain = plain.Plain(tree, self.names, self.parents)
        self.kinds: dict[str, list[str]] = defaultdict(list)
        self.done: set[ast.AST] = set()
        self.unknown: set[str] = set()
        self.findings: list[Finding] = []
        self.migrated = self.names.imports_from("fsdplite")
        self.concerned = self.names.imports_from("torch", *(e.modules[0].partition(".")[0] for e in ENGINES))

    def run(self) -> list[Finding]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self._note_kind(node)
                self._cover(node)
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            if node in self.done:
                continue
            self._look(node)
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))
        return sorted(self.findings, key=lambda finding: (finding.line, finding.column))

    # ----------------------------------------------------------------------------------------- what objects are

    def _note_kind(self, call: ast.Call) -> None:
        known = self._rule(call.func)
        if known is not None and known[1].makes:
            self._bind(call, known[1].makes)
            given, _ = bind_arguments(call, known[1].parameters, self.names)
            changed = given.get("module", given.get("model"))
            if changed is not None:
                self.kinds[one_line(changed)].append(known[1].makes)
        elif (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "backward"
            and self.names.imports_from("deepspeed")
            and len(call.args) == 1
            and "loss" in one_line(call.args[0]).lower()  # a tensor's backward is given a gradient
        ):
            self.kinds[one_line(call.func.value)].append("DeepSpeed engine")

    def _cover(self, call: ast.Call) -> None:
        """What is handed to a call that speaks for it is done with, unless something in it has no counterpart."""
        known = self._rule(call.func)
        if known is None or not known[1].covers:
            return
        given, _ = bind_arguments(call, known[1].parameters, self.names)
        handed = given.get(known[1].covers)
        for part in () if handed is None else (handed, self.names.value(handed)):
            rules = [self._rule(inner) for inner in ast.walk(part)]
            if not any(rule is not None and rule[1].verdict == NONE for rule in rules):
                self._finish(part)

    def _bind(self, call: ast.Call, kind: str) -> None:
        """What a call returns is assigned: alone, first of several, or by its index 0."""
        node: ast.AST = call
        parent = self.parents.get(call)
        if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant) and parent.slice.value == 0:
            node, parent = parent, self.parents.get(parent)
        if isinstance(parent, ast.AnnAssign):
            self.kinds[one_line(parent.target)].insert(0, kind)
        if isinstance(parent, ast.Assign) and parent.value is node:
            for target in parent.targets:
                first = target.elts[0] if isinstance(target, (ast.Tuple, ast.List)) and target.elts else target
                self.kinds[one_line(first)].insert(0, kind)

    # -------------------------------------------------------------------------------------------------- looking

    def _rule(self, node: ast.AST) -> tuple[Engine, Rule] | None:
        for dotted in self.names.dotted(node):
            known = rule_of(dotted)
            if known is not None:
                return known
        return None

    def _method(self, node: ast.Attribute, called: bool) -> tuple[Engine, Rule] | None:
        if node.attr not in _method_names():
            return None
        kinds = self.kinds.get(one_line(node.value), ())
        known = next((rule for kind in kinds if (rule := _by_method().get((kind, node.attr)))), None)
        if known is None and self.concerned and not self.names.dotted(node):
            known = _by_method().get((ANY, node.attr))
            if known is not None and self.migrated and known[1].verdict == KEEP:
                known = None
        if known is not None and (called or known[1].is_attribute):
            return known
        return None

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            if self._call(node):
                return
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            self._reference(node)
        config = config_settings.written_out(node)
        if config is not None and config_settings.is_config(config):
            self.findings += config_settings.findings(config)
        found = self.plain.look(node) if self.concerned else None
        if found is not None:
            self._add(node, plain.NAME, *found)
            if found[1].text == plain.NORM:
                self._finish(node)

    def _call(self, node: ast.Call) -> bool:
        """Report a call of a known name or method; its function is done with, its arguments are looked at."""
        found = self._translate(node)
        if found is None:
            return False
        engine, rule, written = found
        self._finish(node.func)
        self._add(node, engine.name, rule.verdict, written)
        return True

    def _translate(self, node: ast.Call) -> tuple[Engine, Rule, Written] | None:
        skip, function = 0, node.func
        known = self._rule(function)
        if known is None and "functools.partial" in self.names.dotted(function) and node.args:
            skip, function = 1, node.args[0]
            known = self._rule(function)
        receiver = "model"
        if known is None and not skip and isinstance(function, ast.Attribute):
            known = self._method(function, called=True)
            receiver = one_line(function.value)
        if known is None:
            return None
        engine, rule = known
        given, unread = bind_arguments(node, rule.parameters, self.names, skip)
        use = Use(given, receiver, unread, self._render, self.names.value, self._finish)
        if skip:
            self._finish(function)
        return engine, rule, write(rule, use)

    def _render(self, node: ast.expr) -> Written:
        """An argument's text. What other engines make inside it is translated here, and not reported again."""
        notes: list[str] = []
        missing: list[str] = []
        texts: dict[ast.AST, str] = {}
        for inner, written in self._inside(node):
            if written.text:
                texts[inner] = written.text
                notes += written.notes
                missing += written.missing
                self._finish(inner)
        return Written(_unparse_with(node, texts), tuple(notes), tuple(missing))

    def _inside(self, node: ast.AST) -> Iterator[tuple[ast.AST, Written]]:
        if isinstance(node, ast.Call):
            found = self._translate(node)
            if found is not None and found[1].verdict != NONE and not found[1].of:
                yield node, found[2]
                return
        elif isinstance(node, (ast.Name, ast.Attribute)):
            known = self._rule(node)
            if known is not None:
                yield node, Written(self._referred(node, known[1]))
                return
        for child in ast.iter_child_nodes(node):
            yield from self._inside(child)

    def _reference(self, node: ast.Attribute | ast.Name) -> None:
        chain: ast.AST = node
        while isinstance(chain, ast.Attribute):
            known = self._rule(chain)
            if known is not None:
                break
            chain = chain.value
        else:
            known = self._rule(chain)
        if known is not None:
            engine, rule = known
            if rule.reference == "":
                return
            written = Written(self._referred(node, rule), (rule.note,) if rule.note else ())
            verdict = rule.verdict
            if written.text == UNIT and isinstance(self._place(node), ast.ClassDef):
                verdict, written = NONE, Written("", (_NO_BASE,))
            self._finish(node)
            self._add(node, engine.name, verdict, written)
            return
        if isinstance(node, ast.Attribute):
            known = self._method(node, called=False)
            if known is not None:
                use = Use({}, one_line(node.value), (), self._render, self.names.value, self._finish)
                self.done.add(node)
                self._add(node, known[0].name, known[1].verdict, write(known[1], use))
                return
        self._report_unknown(node)

    def _referred(self, node: ast.AST, rule: Rule) -> str:
        """What stands for a name that is not called. A class that is compared is a type, any other is to be called."""
        text = rule.write if rule.reference is None else rule.reference
        if rule.handed_on and self._rule(node) is not None and isinstance(self._place(node), ast.expr):
            names = [name.rpartition(".")[2] for name in self.names.dotted(node)]
            text = rule.handed_on if set(names) & set(rule.names.replace(".", " ").split()) else text
        return "" if "{" in text else text

    def _place(self, node: ast.AST) -> ast.AST | None:
        """Where a class is named: a ClassDef that derives from it, an expression that hands it on, else None."""
        child, above = node, self.parents.get(node)
        while isinstance(above, (ast.Tuple, ast.List, ast.Subscript, ast.BinOp, ast.Attribute, ast.Starred)):
            child, above = above, self.parents.get(above)
        if isinstance(above, ast.ClassDef):
            return above if child in above.bases else None
        if isinstance(above, ast.Call) and isinstance(above.func, ast.Name):
            return None if above.func.id in ("isinstance", "issubclass", "type") else node
        if isinstance(above, (ast.Call, ast.keyword, ast.Dict, ast.IfExp, ast.Assign, ast.Return, ast.NamedExpr)):
            return node
        if isinstance(above, ast.AnnAssign) and child is above.value:
            return node
        return None

    def _report_unknown(self, node: ast.Attribute | ast.Name) -> None:
        if self.names.may_be_starred(node):
            return  # it may as well come from another module
        for dotted in self.names.dotted(node):
            for engine in ENGINES:
                if not engine.is_complete or dotted in self.unknown:
                    continue
                if any(dotted.startswith(module + ".") for module in engine.modules):
                    self.unknown.add(dotted)
                    self._finish(node)
                    note = f"{dotted} is not known to this tool: look in the guide"
                    self._add(node, engine.name, NONE, Written("", (note,)))
                    return

    # ------------------------------------------------------------------------------------------------- reporting

    def _finish(self, node: ast.AST) -> None:
        self.done.update(ast.walk(node))

    def _add(self, node: ast.AST, engine: str, verdict: str, written: Written) -> None:
        if written.missing:
            verdict = NONE
        found = one_line(node, _LONGEST_FOUND)
        notes = tuple("no counterpart for " + text for text in written.missing) + written.notes
        self.findings.append(
            Finding(node.lineno, node.col_offset + 1, engine, found, verdict, written.text, tuple(dict.fromkeys(notes)))
        )


class _Replaced(ast.NodeTransformer):
    def __init__(self, texts: dict[ast.AST, str]) -> None:
        self.texts = texts

    def visit(self, node: ast.AST) -> ast.AST:
        if node in self.texts:
            return ast.copy_location(ast.Name(self.texts[node], ast.Load()), node)
        copy = type(node)()
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                value = self.visit(value)
            elif isinstance(value, list):
                value = [self.visit(item) if isinstance(item, ast.AST) else item for item in value]
            setattr(copy, name, value)
        return ast.copy_location(copy, node)


def _unparse_with(node: ast.expr, texts: dict[ast.AST, str]) -> str:
    """The source of an expression with some parts of it written differently."""
    return one_line(_Replaced(texts).visit(node) if texts else node)
