"""Whether another process of this machine has ended. Where that cannot be known, nobody has."""

from __future__ import annotations

import os
import socket
from typing import Any

__all__ = ["has_ended", "has_rank_ended", "identity", "process_state", "register"]

_KEY = "fsdplite/process/{}"  # of a rank of the default group


def register(store: Any, rank: int) -> None:
    """Say in a store, before anything that others may wait for, which process a rank is."""
    store.set(_KEY.format(rank), identity())


def has_rank_ended(store: Any, rank: int) -> bool:
    """Whether the process that a rank registered is gone. False for one that has not registered."""
    return store.check([_KEY.format(rank)]) and has_ended(store.get(_KEY.format(rank)).decode())


def identity() -> str:
    """This process, for :func:`has_ended`: machine, name space of process numbers, number, and when it started.

    Empty where the system has no ``/proc``.
    """
    try:
        return f"{_place()} {os.getpid()} {process_state(os.getpid())[1]}"
    except OSError:
        return ""


def has_ended(who: str) -> bool:
    """Whether the process of an :func:`identity` is gone. False for processes of other machines."""
    place, _, rest = who.partition(" ")
    pid, _, started = rest.partition(" ")
    try:
        if not who or place != _place():
            return False
    except OSError:
        return False
    try:
        state, since = process_state(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return not _exists(int(pid))
    except OSError:
        return False
    return since != started or state in "ZX"  # the number belongs to another by now; or nobody has asked how it ended


def _exists(pid: int) -> bool:
    """Also of a process that ``/proc`` hides, because it is another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _place() -> str:
    """Processes with one of these see each other's numbers."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def process_state(pid: int) -> tuple[str, str]:
    """State of a process, and its start in ticks since the machine's: its number may be that of another one by now.

    Raises:
        OSError: There is none, or the system has no ``/proc``.
    """
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # the name before it may have anything in it
    return fields[0], fields[19]
