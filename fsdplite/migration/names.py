"""Which dotted name stands behind a name in a source file, as far as its imports and assignments tell."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict

__all__ = ["Names"]

_USUAL = {  # what these names are when a file takes them from another of its project: from common import *
    "torch": "torch", "dist": "torch.distributed", "nn": "torch.nn", "FSDP":
    "torch.distributed.fsdp.FullyShardedDataParallel", "DDP": "torch.nn.parallel.DistributedDataParallel",
    "fully_shard": "torch.distributed.fsdp.fully_shard", "deepspeed": "deepspeed",
    "dcp": "torch.distributed.checkpoint",
}  # fmt: skip


class Names:
    """Imports and single assignments of one file. Scopes are merged: scripts rarely use one name for two things.

    Attributes:
        stars: Modules of which everything was imported.
        changed: Variables in which something is put after they were made (``options["mesh"] = mesh``).
    """

    def __init__(self, tree: ast.AST) -> None:
        self.stars: list[str] = []
        self.changed: set[str] = set()
        self._imported: dict[str, list[str]] = defaultdict(list)
        self._values: dict[str, list[ast.expr | None]] = defaultdict(list)
        self._by_call: list[str] = []
        for node in ast.walk(tree):
            self._note(node)
        names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in _USUAL)
        self._by_call += [_USUAL[node.id] for node in names if self.may_be_starred(node)]

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    self._imported[alias.asname].append(alias.name)
                else:
                    self._imported[alias.name.partition(".")[0]].append(alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    self.stars.append(module)
                else:
                    self._imported[alias.asname or alias.name].append(f"{module}.{alias.name}")
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._values[node.targets[0].id].append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._values[node.target.id].append(node.value)
        elif isinstance(node, ast.arg):
            self._values[node.arg].append(None)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._values[node.name].append(None)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            self.changed.add(node.value.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            self.changed |= {name.id for name in [node.func.value] if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Call) and _imported_by(node):
            self._by_call.append(_imported_by(node))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            self._values[node.id].append(None)  # a plain assignment counts twice: see `value`

    def imports_from(self, *packages: str) -> bool:
        """Whether the file imports one of these packages, or something of them."""
        found = [name for names in self._imported.values() for name in names] + self.stars + self._by_call
        return any(name == package or name.startswith(package + ".") for name in found for package in packages)

    def value(self, node: ast.expr) -> ast.expr:
        """What a variable that is assigned once stands for; any other expression is returned as it is."""
        for _ in range(8):
            if not isinstance(node, ast.Name) or node.id in self._imported:
                return node
            bound = self._values.get(node.id, [])
            given = [value for value in bound if value is not None]
            if len(given) != 1 or len(bound) != 2:  # the assignment, and its target
                return node
            node = given[0]
        return node

    def dotted(self, node: ast.AST, depth: int = 0) -> tuple[str, ...]:
        """The dotted names that ``a.b.c`` may stand for; none if it starts from something else than an import.

        Args:
            node: An expression.
            depth: Of aliases that were followed; ``x = x.y`` has no end.
        """
        parts: list[str] = []
        while (step := _attribute_of(node)) is not None:
            node, name = step
            parts.append(name)
        tail = "".join("." + part for part in reversed(parts))
        if isinstance(node, ast.Call):
            module = _imported_by(node)
            return (module + tail,) if module else ()
        if not isinstance(node, ast.Name):
            return ()
        if node.id in self._imported:
            return tuple(name + tail for name in self._imported[node.id])
        behind = self.value(node)
        if depth < 8 and behind is not node and isinstance(behind, (ast.Attribute, ast.Name, ast.Call)):
            return tuple(name + tail for name in self.dotted(behind, depth + 1))
        if self.may_be_starred(node):
            if node.id in _USUAL:
                return (_USUAL[node.id] + tail,)
            return tuple(f"{module}.{node.id}{tail}" for module in self.stars)
        return ()

    def may_be_starred(self, node: ast.AST) -> bool:
        """Whether a name, or what an attribute starts from, can only come from ``from module import *``."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self._imported or node.id in self._values:
            return False
        return bool(self.stars) and not hasattr(builtins, node.id)


def _attribute_of(node: ast.AST) -> tuple[ast.AST, str] | None:
    """``a`` and ``"b"`` of ``a.b``, and of ``getattr(a, "b")``."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and node.args[1:]:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return node.args[0], name.value
    return None


def _imported_by(call: ast.Call) -> str:
    """The module that ``importlib.import_module("a.b")`` or ``__import__("a.b", fromlist=...)`` returns; or nothing."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__") or not call.args or not isinstance(call.args[0], ast.Constant):
        return ""
    module = str(call.args[0].value)
    takes_parts = function == "import_module" or len(call.args) > 3 or any(k.arg == "fromlist" for k in call.keywords)
    return module if takes_parts else module.partition(".")[0]
