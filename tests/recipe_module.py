"""`recipes/train_gpt.py` as a module, for tests that call its parts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parent.parent / "recipes" / "train_gpt.py"


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("train_gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
