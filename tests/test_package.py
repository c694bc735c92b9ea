"""The package as a whole: which file may import which, how long files are, and what an install needs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fsdplite"
MAX_LINES = 450

def module_files() -> dict[str, Path]:
    """Every module by its name inside the package: `layout`, `cli` for a package, `__init__` for the root."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        files[".".join(parts)] = path
    return files


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of `if TYPE_CHECKING:` bodies."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def imported_modules(module: str, path: Path, known: set[str]) -> set[str]:
    """The package's own modules that a file imports when it runs, at its top or inside a function alike.

    What stands under `if TYPE_CHECKING:` names types for a reader and imports nothing.
    """
    inside = module.split(".") if path.name == "__init__.py" and module != "__init__" else module.split(".")[:-1]
    found = set()
    for node in running_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, _, rest = alias.name.partition(".")
                if head == "fsdplite":
                    found.add(rest or "__init__")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = inside[: len(inside) - (node.level - 1)]
            elif (node.module or "").partition(".")[0] == "fsdplite":
                base = []
            else:
                continue
            tail = (node.module or "").split(".") if node.module else []
            base = base + (tail if node.level else tail[1:])
            for alias in node.names:
                submodule = ".".join([*base, alias.name])
                found.add(submodule if submodule in known else ".".join(base) or "__init__")
    unknown = found - known
    assert not unknown, f"fsdplite/{module} imports {sorted(unknown)}, which are not files of the package"
    return found


def import_graph() -> dict[str, set[str]]:
    files = module_files()
    return {module: imported_modules(module, path, set(files)) for module, path in files.items()}


def house() -> list[list[str]]:
    """The rows of the table in docs/design.md, from the top: a module imports from its own row and from those above."""
    text = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("## The house")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")]
    rows = [re.findall(r"`([\w./]+)`", cell) for cell in cells]
    rows = [[name.removesuffix(".py").strip("/").replace("/", ".") for name in row] for row in rows if row]
    return rows if any("__init__" in row for row in rows) else [*rows, ["__init__"]]


def row_of(module: str, rows: list[list[str]]) -> int:
    """A module's row; one inside a package has the package's row unless it has one of its own."""
    name = module
    while name:
        for index, row in enumerate(rows):
            if name in row:
                return index
        name = name.rpartition(".")[0]
    raise AssertionError(f"fsdplite/{module.replace('.', '/')}.py has no row: add it to the house in docs/design.md")


def test_imports_point_up() -> None:
    rows = house()
    wrong = [
        f"{module} imports {target} from a row below"
        for module, targets in import_graph().items()
        for target in sorted(targets)
        if row_of(target, rows) > row_of(module, rows)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_house_names_files_that_exist() -> None:
    rows = house()
    named = [name for row in rows for name in row]
    assert len(rows) > 10 and len(named) == len(set(named))
    missing = set(named) - set(module_files())
    assert not missing, f"docs/design.md names {sorted(missing)}, which are not files of the package"


def test_imports_make_no_cycle() -> None:
    graph = import_graph()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "import cycle: " + " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_import_graph_reads_every_form(tmp_path: Path) -> None:
    source = tmp_path / "save.py"
    source.write_text(
        "import torch\nimport fsdplite.layout\nfrom fsdplite import stage\nfrom fsdplite.errors import LayoutError\n"
        "from .manifest import Manifest\nfrom .. import policy\nif TYPE_CHECKING:\n    from ..wrap import fsdp_wrap\n"
        "def late():\n    from ..trace import Trace\n"
    )
    known = {"__init__", "wrap", "layout", "stage", "errors", "policy", "trace", "checkpoint", "checkpoint.manifest"}
    expected = {"layout", "stage", "errors", "checkpoint.manifest", "policy", "trace"}
    assert imported_modules("checkpoint.save", source, known) == expected


def test_files_are_short() -> None:
    repository = PACKAGE.parent
    folders = (PACKAGE, repository / "tests", repository / "recipes", repository / "scripts")
    long = {
        str(path.relative_to(repository)): lines
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in ("", ".py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"expected at most {MAX_LINES} lines a file, found {long}; a second concept asks for a second file"


def run_python(source: str) -> str:
    """Runs source in a fresh interpreter that finds this package, and returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


WITHOUT_NUMPY = '''
import sys

class WithoutNumpy:
    """Finds what the usual finders find, and no numpy."""

    finders = list(sys.meta_path)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

sys.meta_path[:] = [WithoutNumpy()]
import torch
import fsdplite as fsdp

fsdp.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
for layer in (model[0], model[2]):
    fsdp.fsdp_wrap(layer)
fsdp.fsdp_wrap(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
x = torch.randn(16, 3)
for _ in range(2):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    print(float(loss))
assert "numpy" not in sys.modules
'''


@pytest.mark.slow
def test_trains_without_numpy() -> None:
    first, second = map(float, run_python(WITHOUT_NUMPY).split())
    assert second < first


@pytest.mark.parametrize("statement", ["import fsdplite.cli", "from fsdplite.cli import main; main()"])
def test_the_command_starts_without_torch(statement: str) -> None:
    source = f"""
import sys
sys.argv = ["fsdplite", "--help"]
try:
    {statement}
except SystemExit as stop:
    assert stop.code in (None, 0), stop.code
assert "torch" not in sys.modules, "torch was imported"
"""
    printed = run_python(source)
    if "main()" in statement:
        assert "fsdplite" in printed


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", run_python("import fsdplite; print(fsdplite.__version__)").strip())


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
