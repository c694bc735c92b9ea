"""The weights of a run that is repeated: they must not have changed, and must be whole again."""

from __future__ import annotations

import torch
from torch import nn

from ..flat_param import FlatParameter, owner_of
from ..local_slice import info_of

__all__ = ["WeightsBefore"]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class WeightsBefore:
    """The flat parameters of everything in a module as they are now, at its first run.

    They belong to units inside the module, to the module itself, or to a unit around it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._generations: dict[FlatParameter, int] = {}
        for inner in module.modules():
            for parameter in inner._parameters.values():
                if parameter is not None:
                    info = info_of(parameter)
                    flat = info.flat if info is not None else owner_of(parameter)  # gathered ones are no parameters
                    if flat is not None:
                        self._generations[flat] = flat.generation
        # Units around the module are running now; their weights are gathered by them and not by the second run.
        units = {flat.unit for flat in self._generations if flat.unit.is_active}
        self._calls = [unit.current_call() for unit in units]

    def prepare(self) -> None:
        """Before the second run: refuse changed weights; gather those of units around that backward has not reached.

        Raises:
            ParameterUseError: An optimizer step, say, came between forward and backward.
        """
        for flat, generation in self._generations.items():
            if flat.generation != generation:
                raise flat.changed("computes its block again")
        if torch._C._current_graph_task_id() != -1:
            # Gradients may be on for the second run only. A backward that makes a graph keeps the old one as well.
            with torch.set_grad_enabled(torch.is_grad_enabled() and _keeps_graph()):
                for call in self._calls:  # a loss on an activation does not pass the outputs of the units around it
                    call(None)
