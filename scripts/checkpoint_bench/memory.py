"""How much resident memory one operation takes beyond what the process had before it."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_STATUS = Path("/proc/self/status")


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"expected {field} in {_STATUS}, found none: memory is measured on Linux only")
    return 1024 * int(found.group(1))


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """The kernel's high-water mark of resident bytes inside the block, less the resident bytes at its start.

    The mark (VmHWM) is reset first, so nothing between two looks is missed.
    """
    grown = [0]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    yield grown
    grown[0] = _status_bytes("VmHWM") - before
