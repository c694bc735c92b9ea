"""Small messages between hosts: do all ranks mean the same, and what does each of them say?

They travel on a gloo group of their own. Every message has the same size for models of up to a thousand parameters,
whatever it is for: ranks that have come apart then meet in a comparison that fails, and not in a transport error
(gloo kills a process that receives more than it expects).
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from .collectives import all_reduce, control_all_gather
from .groups import Groups
from .watchdog import Waiting

__all__ = ["FLAGS", "ORDER", "OVERFLOW", "STATE", "USE", "WRAP", "exchange", "exchange_texts"]

# What a message is for; part of what is compared.
USE, ORDER, WRAP, FLAGS, OVERFLOW, STATE = range(1, 7)

_MESSAGE_BYTES = 1024
_VALUE_BYTES = 7


def exchange(groups: Groups, kind: int, value: int, flags: bytes | bytearray, waiting: Waiting) -> bytearray | None:
    """Compare ``kind`` and ``value`` (its low 56 bits) on all ranks and merge ``flags`` bit by bit (or).

    Returns:
        The merged flags, or None, on every rank, if any rank sent another kind or value.

    Collective: all-reduce of 1024 bytes (more for over 1008 flags) on the control group. Blocks the host.
    """
    if groups.control is None:
        return bytearray(flags)
    stamp = bytes([kind]) + (value & ((1 << 8 * _VALUE_BYTES) - 1)).to_bytes(_VALUE_BYTES, "little")
    head = len(stamp)
    message = bytearray(stamp) + bytearray(255 - byte for byte in stamp) + bytearray(flags)
    message += bytearray(-len(message) % _MESSAGE_BYTES)
    data = torch.frombuffer(message, dtype=torch.uint8)
    all_reduce(data, groups.control, groups, waiting, op=dist.ReduceOp.BOR).wait()
    if any(message[i] + message[head + i] != 255 for i in range(head)):
        return None
    return message[2 * head : 2 * head + len(flags)]


def exchange_texts(groups: Groups, value: Any, waiting: Waiting) -> list[Any]:
    """Every rank's JSON value, in rank order of the mesh. For reports of what differs, not for the hot path."""
    if groups.control is None:
        return [value]
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)])
    all_reduce(length, groups.control, groups, waiting, op=dist.ReduceOp.MAX).wait()
    row = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text.ljust(int(length))), dtype=torch.uint8)
    rows = control_all_gather(row, groups, waiting)
    texts = []
    for received in rows:
        data = bytes(received.tolist())
        count = int.from_bytes(data[:8], "little")
        texts.append(json.loads(data[8 : 8 + count]))
    return texts
