"""When a frozen parameter is unfrozen after wrapping: its flat parameter is split in two.

Parameters that stay frozen keep a flat parameter without gradients; the others get one with gradients. Members of a
frozen flat parameter have no optimizer state, so their slices may move. Trainable flat parameters are never
re-laid: a member frozen later just counts as unused.
"""

from __future__ import annotations

import torch

from .flat_param import FlatParameter
from .flat_spec import FlatSpec
from .local_slice import engine_access
from .watchdog import Waiting

__all__ = ["split_frozen"]


def split_frozen(flat: FlatParameter) -> None:
    """Replace ``flat`` in its unit by a frozen and a trainable flat parameter.

    Collective: one message on the control group, and one all-gather of the flat parameter, in the master dtype.
    Memory: its full size, for the moment.
    """
    unit = flat.unit
    unit.schedule.agreement.agree_on_extra("regrouping of unfrozen parameters", unit)
    waiting = Waiting(flat.unit_name, "all-gather to regroup unfrozen parameters", unit.schedule.step)
    flat.reshard()
    whole = flat.gather_master(waiting)
    with engine_access():
        thawed = [user.requires_grad for user in flat.users]
    replacements = []
    for trainable in (False, True):
        members = [i for i, is_thawed in enumerate(thawed) if is_thawed is trainable]
        if not members:
            continue
        spec = FlatSpec(
            parameters=[flat.users[i] for i in members],
            names=[flat.all_names[i] for i in members],
            locations=[flat.binding.locations_of(i) for i in members],
            dtype=flat.dtype,
            compute_dtype=flat.compute_dtype,
            wire_dtype=flat.wire_dtype,
            trainable=trainable,
            shapes=[torch.Size(flat.layout.slots[i].shape) for i in members],
        )
        part = FlatParameter(
            spec,
            groups=flat.groups,
            stage=flat.stage,
            device=flat.device,
            unit_name=flat.unit_name,
            resting=flat.resting.twin(),
        )
        part.post_accumulate_hooks = flat.post_accumulate_hooks.of(members)
        for new, old in enumerate(members):
            slot = flat.layout.slots[old]
            part.place(new, whole[slot.offset : slot.stop])
            part.adopt(new)
        part.unit = unit
        replacements.append(part)
    position = unit.flats.index(flat)
    unit.flats[position : position + 1] = replacements
    unit.count_trainable()
