"""`fsdplite migrate` as a command: which files it reads, what it cannot read, exit codes, output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplite.cli import main
from fsdplite.migration import report

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "b.py": "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n",
        "a/train.py": "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)\n",
        "a/plain.py": "import torch\n",
        ".hidden/c.py": "x = (", "env/pyvenv.cfg": "", "env/d.py": "x = (", "__pycache__/e.py": "x = (",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_are_walked_in_order(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [{"cell_type": "markdown", "source": "x = ("}, {"cell_type": "code", "source": [
        "%pip install x\n", "from torch.nn.parallel import DistributedDataParallel as D\n", "m = D(m)\n", "m?"]},
        {"cell_type": "code", "source": "%%bash\nls (\n"},
        {"cell_type": "code", "source": "x = 1\nm.module"}]  # fmt: skip
    (project / "notes.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert main(["migrate", "--json", ".", "b.py"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fine"] and document["files_read"] == 4 and document["problems"] == []
    assert [file["path"] for file in document["files"]] == [
        "./b.py", "./notes.ipynb, cell 2", "./notes.ipynb, cell 4", "./a/train.py"
    ]  # fmt: skip
    assert [file["findings"][0]["line"] for file in document["files"]] == [2, 3, 2, 2]
    (finding,) = document["files"][0]["findings"]
    assert finding["found"] == "fully_shard(model)" and finding["line"] == 2 and finding["column"] == 1
    assert finding["write"] == "fsdp.fsdp_wrap(model)" and finding["engine"] == "FSDP2"


BAD = {
    "bad.py": (b"x = 1\ny = (\n", "cannot be parsed: '(' was never closed", 2),
    "null.py": (b"x = 1\0\n", "cannot be parsed", None),
    "latin.py": (b"x = '\xe9'\n", "cannot be parsed", None),
    "deep.py": (b"x = " + b"-" * 100_000 + b"1\n", "cannot be parsed", None),
    "chain.py": (b"x = a" + b".b()" * 20_000 + b"\n", "nested too deeply", None),
    "notes.ipynb": (b"{}", "no notebook: it has no cells", None),
    "cell.ipynb": (b'{"cells": [{"cell_type": "code", "source": "x = ("}]}', "cell 1: '(' was never closed", 1),
    "bad.yaml": (b"fsdp_config:\n  a: 'x\n", "cannot be parsed", 3),
    "other.yml": (b"name: 1\n", "no configuration of DeepSpeed", None),
    "bad.json": (b'{"bf16": {"enabled": true},\n "fp16": }', "cannot be parsed", 2),
    "other.json": (b'{"name": 1}', "no configuration of DeepSpeed", None),
    "list.json": (b"[1]", "no configuration of DeepSpeed", None),
    "data.csv": (b"1,2", "expected a Python source", None),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, expected, line = BAD[name]
    (project / name).write_bytes(data)
    assert main(["migrate", "--json", "b.py", name]) == 1
    document = json.loads(capsys.readouterr().out)
    (problem,) = document["problems"]
    assert problem["path"] == name and expected in problem["problem"] and not document["fine"]
    assert line is None or problem["line"] == line
    assert main(["migrate", "b.py", name]) == 1
    assert f"problem   {name}" in capsys.readouterr().out


def test_exit_codes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "b.py"]) == 0 and main(["migrate", "a/plain.py"]) == 0
    (project / "none.py").write_text("import torch\ntorch.optim.LBFGS(p)\n", encoding="utf-8")
    assert main(["migrate", "none.py"]) == 1
    capsys.readouterr()
    assert main(["migrate", "absent.py"]) == 2 and "there is no file or folder 'absent.py'" in capsys.readouterr().err
    assert main(["migrate"]) == 2


def test_a_file_that_the_system_refuses_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(report, "open", refuse, raising=False)  # permissions do not stop root
    assert main(["migrate", "b.py"]) == 1 and "b.py: cannot be read: Permission denied" in capsys.readouterr().out


def test_the_text_fits_80_columns(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from torch.distributed.fsdp import FullyShardedDataParallel as F\nF(model, " + ", ".join(
        f"{name}={'very_long_names.' * 8}x" for name in ("auto_wrap_policy", "device_mesh", "device_id")
    )
    (project / "wide.py").write_text(source + ")\n", encoding="utf-8")
    assert main(["migrate", "wide.py", "a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines) and lines[0] == "wide.py"
    assert lines[-2:] == [
        "3 files read, 2 uses: 2 to write differently, 0 to leave out, 0 as they are, 0",
        "without a counterpart",
    ]


def test_it_imports_no_torch_and_writes_nothing(project: Path) -> None:
    (project / "runs.py").write_text("open('ran', 'w')\nimport torch\n", encoding="utf-8")
    before = sorted(project.rglob("*"))
    source = "import sys\nfrom fsdplite.cli import main\nmain(['migrate', '.'])\nassert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", source], check=True, env=environment, timeout=60, capture_output=True)
    assert sorted(project.rglob("*")) == before


def test_a_mesh_to_make_comes_with_its_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = "from torch.distributed.device_mesh import init_device_mesh"
    strategy = "from torch.distributed.fsdp import FullyShardedDataParallel as F, ShardingStrategy as S\n"
    source = strategy + "F(model, sharding_strategy=S.HYBRID_SHARD)\nF(model, sharding_strategy=S.FULL_SHARD)\n"
    (tmp_path / "new.py").write_text(source, encoding="utf-8")
    (tmp_path / "has.py").write_text(f"{needed}\n{source}", encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"mics_shard_size": 8}}', encoding="utf-8")
    said = {}
    for name in ("new.py", "has.py", "ds.json"):
        assert main(["migrate", "--json", str(tmp_path / name)]) == 0
        (file,) = json.loads(capsys.readouterr().out)["files"]
        said[name] = ["init_device_mesh(" in f["write"] and needed in f["notes"] for f in file["findings"]]
    assert said["new.py"] == [True, False] and not any(said["has.py"]) and any(said["ds.json"])
