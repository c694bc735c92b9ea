"""Which dotted name stands behind a name in a source file, as far as its imports and assignments tell."""

from __future__ import annotations

import ast
from collections import defaultdict

__all__ = ["Names"]


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
        for node in ast.walk(tree):
            self._note(node)

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
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            self._values[node.id].append(None)  # a plain assignment counts twice: see `value`

    def imports_from(self, *packages: str) -> bool:
        """Whether the file imports one of these packages, or something of them."""
        found = [name for names in self._imported.values() for name in names] + self.stars
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
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ()
        tail = "".join("." + part for part in reversed(parts))
        if node.id in self._imported:
            return tuple(name + tail for name in self._imported[node.id])
        behind = self.value(node)
        if depth < 8 and behind is not node and isinstance(behind, (ast.Attribute, ast.Name)):
            return tuple(name + tail for name in self.dotted(behind, depth + 1))
        if node.id not in self._values:
            return tuple(f"{module}.{node.id}{tail}" for module in self.stars)
        return ()
