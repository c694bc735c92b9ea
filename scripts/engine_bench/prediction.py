"""The peak that the layout predicts, to put beside the one measured.

What the engine adds comes from the layout alone: shards, moments, gradient shards, gathered units, reduction buffers.
What the model needs anyway (activations, and one parameter's gradient on its way) is measured on the unwrapped model,
unit by unit, and added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

import fsdplite.inspect

from .contenders import Contender, build
from .memory import LiveBytes
from .models import Case


def _mark_phases(model: nn.Module, case: Case, live: LiveBytes) -> None:
    """Make the model say which unit it is in."""
    units = [module for module in model.modules() if isinstance(module, case.unit_class)]

    def say(phase: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            live.phase = phase

        return hook

    for index, unit in enumerate(units):
        unit.register_forward_pre_hook(say(f"forward {index}"))
        unit.register_full_backward_pre_hook(say(f"backward {index}"))
    units[-1].register_forward_hook(say("forward end"))
    units[0].register_full_backward_hook(say("backward end"))


def measure_plain(case: Case, precision: str, optimizer_kind: str, batch: torch.Tensor) -> Counter[str]:
    """What the unwrapped model needs beside parameters, gradients and optimizer state.

    Returns:
        Bytes by phase: ``"forward 3"`` from where unit 3 begins, ``"forward start"`` and ``"forward end"`` before and
        after all units, the same for backward, and ``"update"``.
    """
    live = LiveBytes()
    with live:
        contender = build("plain", case, precision, optimizer_kind)
        _mark_phases(contender.model, case, live)
        live.excluded = lambda: _state_bytes(contender)
        for _ in range(2):  # optimizer state is there from the second step on
            with live.step() as step:
                run_step(contender, batch, live)
    return step.peak_by_phase


def run_step(contender: Contender, batch: torch.Tensor, live: LiveBytes) -> None:
    """One step that says its phases."""
    live.phase = "forward start"
    loss = contender.model(batch)
    live.phase = "backward start"
    loss.backward()
    del loss
    live.phase = "update"
    contender.update()


def _state_bytes(contender: Contender) -> int:
    parameters = list(contender.model.parameters())
    tensors = parameters + [parameter.grad for parameter in parameters if parameter.grad is not None]
    for state in contender.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def predict_peak_bytes(model: nn.Module, unwrapped: Counter[str], prefetch: int = 1) -> int:
    """Bytes at the peak of a step from the second on: stage 3, one AdamW, fp32 masters.

    Args:
        model: Wrapped; its root, and units that run one after the other in ``named_modules`` order.
        unwrapped: What ``measure_plain`` found in the compute dtype; ``"update"`` for one rank's share.
        prefetch: Units gathered ahead.
    """
    root, *units = [_UnitBytes(info) for info in fsdplite.inspect.units(model)]
    all_shards = sum(unit.shard for unit in (root, *units))
    block_shards = sum(unit.shard for unit in units)
    needed = {
        "forward start": root.full + units[0].full,
        "forward end": root.full,
        "backward start": root.full,
        "backward end": root.full + block_shards,
        "update": all_shards,
    }
    for index, unit in enumerate(units):
        ahead = sum(other.full for other in units[index + 1 : index + 1 + prefetch])
        needed[f"forward {index}"] = root.full + unit.full + ahead
        # Backward on the CPU: gradient shards of what is done, and either the reduction of the unit before, which gloo
        # copies when it is waited for, or after that this unit's own buffer and what is gathered ahead.
        ahead = sum(other.full for other in units[max(0, index - prefetch) : index])
        done = sum(other.shard for other in units[index + 1 :])
        in_flight = 2 * units[index + 1].buffer if index + 1 < len(units) else 0
        needed[f"backward {index}"] = root.full + unit.full + max(in_flight, unit.buffer + ahead) + done
    peaks = [engine_bytes + unwrapped[phase] for phase, engine_bytes in needed.items()]
    peaks.append(root.full + 2 * root.buffer + all_shards)  # the last reduction, after all activations
    return 3 * all_shards + max(peaks)


class _UnitBytes:
    """Bytes of one unit on one rank: its fp32 shard, its gathered parameters, its fp32 reduction buffer."""

    def __init__(self, info: fsdplite.inspect.UnitInfo) -> None:
        self.shard = sum(flat.shard_numel * 4 for flat in info.flats)
        self.full = sum(flat.padded_numel * flat.compute_dtype.itemsize for flat in info.flats)
        self.buffer = sum(flat.padded_numel * 4 for flat in info.flats)
