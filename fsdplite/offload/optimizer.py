"""``fsdp.offloaded``: an optimizer whose state is in host memory or on a disk.

It is a ``torch.optim.Optimizer`` with groups, hooks and schedulers as usual; the update is that of the class it is
given, applied to one chunk of a unit's shard after another, while the state of the next chunks is being read and
that of the last ones written. Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall", 2021.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, FSDPError, OffloadError
from ..flat_param import FlatParameter
from ..fsdp_unit import state_of
from ..optimizer_hooks import abandon_step
from ..local_slice import engine_access, info_of, read_grad
from ..unit import UnitState
from .files import warn_of_leftovers
from .home_table import HomeTable
from .homes import Home, Place
from .in_backward import UpdatesInBackward
from .options import Offload
from .pieces import batches
from .shares import Share, update
from .state_view import StateView, guarded
from .stream import Part, StepReport
from .together import together
from .update import Entry, Updater
from .values import put

__all__ = ["OffloadedOptimizer", "offloaded"]

_JOINT_NUMEL = 2**15  # shorter chunks are updated together


def offloaded(
    optimizer_class: type,
    model: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    in_backward: bool = False,
    **settings: Any,
) -> OffloadedOptimizer:
    """An optimizer of a wrapped model that keeps its state where ``Offload(optimizer=...)`` says.

    Results are those of ``optimizer_class(params, **settings)``, bit for bit.

    Args:
        optimizer_class: An element-wise optimizer class, such as ``torch.optim.AdamW``.
        model: Wrapped with ``offload=fsdp.Offload(optimizer="cpu")`` or ``"nvme"``.
        params: Parameters or parameter groups, as the class takes them. None: all of the model.
        in_backward: Update a unit as soon as its gradient is final, beside the rest of backward, with the groups'
            settings of that moment. The gradient is freed then and ``.grad`` stays None. ``step()`` updates the rest.
            Clipping, other norms, ``LossScaler`` and a second synchronised backward before ``step()`` are errors. If a
            backward dies after an update, the optimizer refuses to step until a checkpoint is loaded.
        settings: Keyword arguments of the class.

    Raises:
        ConfigError, ShardedAccessError: The class or the model cannot be used; says what can.
        OffloadError: The directory cannot be used, or has too little room. On all ranks, with path and errno.

    Collective: every rank of the model must call it; with ``"nvme"`` or ``in_backward`` each step ends with one small
    message.

    Memory: with ``"nvme"`` ``buffers`` buffers of ``buffer_bytes`` per kind of state (and for masters, where those are
    in files), whatever the size of the model, and for each parameter its step counter; with ``"cpu"`` the state.
    """
    updater = Updater(optimizer_class, settings)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "fsdp.offloaded takes the class of an optimizer and a model",
            expected="fsdp.offloaded(torch.optim.AdamW, model, lr=...)",
            found=type(model).__name__,
            cure="pass parameters or groups as params=",
        )
    root = next((state.schedule.root for m in model.modules() if (state := state_of(m)) is not None), None)
    offload: Offload | None = root.schedule.offload if root is not None else None
    if offload is None or offload.optimizer is None:
        raise ConfigError(
            "fsdp.offloaded needs a model that says where the state goes",
            found="a model that is not wrapped" if root is None else "a model wrapped without Offload(optimizer=...)",
            cure='fsdp_wrap(model, ..., offload=fsdp.Offload(optimizer="nvme", path="/mnt/nvme0/run"))',
        )
    if in_backward and len({id(s.schedule) for m in model.modules() if (s := state_of(m)) is not None}) > 1:
        raise ConfigError(
            "in_backward=True takes a model with one root", cure="wrap the outermost module too, or leave in_backward out"
        )
    attributes = {"__module__": __name__, "update_class": optimizer_class}
    cls = type(optimizer_class.__name__, (OffloadedOptimizer,), attributes)
    made = cls(updater, model, model.parameters() if params is None else params, root)
    if in_backward:
        try:
            made.start_in_backward(root.schedule)
        except BaseException:
            made.close()
            raise
    return made


class OffloadedOptimizer(torch.optim.Optimizer):
    """What :func:`offloaded` returns.

    Attributes:
        last_step: What the last step moved, and how long it took.
        update_class: The class that it was given.
        updates_in_backward: None unless it was made with ``in_backward=True``.
    """

    update_class: type

    def __init__(self, updater: Updater, model: nn.Module, params: Iterable[Any], root: UnitState) -> None:
        groups, offload = root.schedule.groups, root.schedule.offload
        self._view = StateView(self)
        self._updater = updater
        self._models = [root.module, weakref.ref(model)]
        self._names: dict[int, str] = {}
        self._offload = offload
        self._groups = groups
        self._failure: str | None = None
        self._is_closed = False
        self.last_step = StepReport()
        self.updates_in_backward: UpdatesInBackward | None = None
        self._table = table = HomeTable(updater, offload)
        weakref.finalize(self, table.close, is_at_exit=True)
        weakref.finalize(self, table.close).atexit = False  # the last that was made is called first

        @torch.inference_mode(False)
        def make() -> None:
            torch.optim.Optimizer.__init__(self, params, updater.defaults)
            if offload.optimizer == "nvme" and groups.rank == groups.ranks[0]:
                warn_of_leftovers(str(offload.path))
            self.settle()

        try:
            together(groups, "make the optimizer and the files of its state", make)
        except BaseException:
            self.close()  # whoever holds the error holds this object
            raise

    @property
    def state(self) -> StateView:  # type: ignore[override]
        self._refuse_closed()
        return self._view

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "param_groups"):  # the base class begins with an empty one
            self._view.replace(value)

    # ------------------------------------------------------------------ homes

    def start_in_backward(self, schedule: Any) -> None:
        self.updates_in_backward = UpdatesInBackward(self, schedule)
        self._table.workers.append(self.updates_in_backward.workers)

    def homes(self) -> list[Home]:
        return list(self._table)

    def home_of(self, flat: FlatParameter) -> Home | None:
        return self._table.of(flat)

    def settle(self) -> None:
        """Homes and regions for what the groups hold and ask for now."""
        self._table.settle(self.param_groups, self._view.loose)

    @property
    def is_whole(self) -> bool:
        """Whether it may update, and be saved: nothing has failed since a checkpoint was loaded."""
        early = self.updates_in_backward
        return self._failure is None and (early is None or early.is_whole)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer.

        Raises:
            ConfigError: A parameter is not the model's.
        """
        super().add_param_group(param_group)
        for key, value in self._updater.settings_of_new(param_group).items():
            param_group.setdefault(key, value)
        foreign = next((p for p in self.param_groups[-1]["params"] if self._name(p) is None), None)
        if foreign is None:
            return
        self.param_groups.pop()
        info = info_of(foreign)
        raise ConfigError(
            "a parameter group holds a parameter that is not in the model",
            found=f"a tensor of shape {tuple(foreign.shape)}" if info is None else "one of another wrapped model",
            **({"rank": self._groups.rank} if info is None else info.where),
            cure="give fsdp.offloaded the module that holds all of them, or make an optimizer for each model",
        )

    # ------------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            OffloadError: State could not be read or written. Some units may have been updated and others not, so
                further steps are refused until a checkpoint is loaded.

        Collective, with ``"nvme"`` or ``in_backward``: one message on the control group.
        """
        try:
            return self._step(closure)
        except BaseException:
            abandon_step(self)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self._refuse_failed()
        began = time.perf_counter()
        self.last_step = StepReport() if (early := self.updates_in_backward) is None else early.take_report()
        try:
            if self._offload.optimizer == "nvme" or early is not None:
                together(self._groups, "update", self._update)
            else:
                self._update()
        except BaseException as problem:
            self._failure = self._failure or f"a failure to update: {problem}"
            self._updater.forget_step()
            for home in self._table:
                home.abandon()
            raise
        self.last_step.wall_s += time.perf_counter() - began
        return loss

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise OffloadError(
                "the optimizer was closed: its state is gone",
                rank=self._groups.rank,
                cure="save a checkpoint before close(), and load it into a new optimizer",
            )

    def _refuse_failed(self) -> None:
        self._refuse_closed()
        if self._failure is not None:
            raise OffloadError(
                "the optimizer's state is not whole",
                found=self._failure,
                rank=self._groups.rank,
                cure="load a checkpoint into the model and this optimizer",
            )

    def number_groups(self) -> None:
        """Note which group each parameter is in, for the updates that follow."""
        self._numbers = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}

    def _group_of(self, parameter: torch.Tensor) -> int | None:
        return self._numbers.get(id(parameter))

    def are_grouped(self, flat: FlatParameter) -> list[bool]:
        """Per parameter of a flat parameter, whether it is in a group."""
        return [id(user) in self._numbers for user in flat.users]

    def _update(self) -> None:
        if self.updates_in_backward is not None:
            self.updates_in_backward.end_step()
        self.settle()
        self.number_groups()
        # The hook after a step counts these as changed, and no others.
        homes = [(home, None) for home in self._table if any(self.are_grouped(home.flat))]
        for home, _ in homes:
            home.store.check()
            home.begin()
        self._update_loose([(p, None) for group in self.param_groups for p in group["params"]])
        self._update_homes(homes, self.last_step)
        for home, _ in homes:
            home.end()
        self._updater.end_step(self.param_groups)

    def update_reduced(self, reduced: list[tuple[Home, torch.Tensor]], report: StepReport) -> None:
        """Update whole flat parameters from gradient shards that their users do not hold, on any thread."""
        ready = []
        for home, gradient in reduced:
            flat = home.flat
            flat.gradient.wait()
            home.store.check()
            home.begin()
            gradient = gradient.to(flat.dtype)
            self._update_loose([(user, gradient[:0]) for i, user in enumerate(flat.users) if not home.holds(i)])
            ready.append((home, gradient))
        self._update_homes(ready, report)

    def _update_homes(self, homes: Sequence[tuple[Home, torch.Tensor | None]], report: StepReport) -> None:
        parts, in_memory = [], []
        for home, reduced in homes:
            for chunk in home.chunks:
                if reduced is None and not home.has_gradients(chunk, self._group_of):
                    continue
                share = Share(home, chunk, reduced)
                if home.store.is_streamed:
                    parts.append(home.part_to_stream(chunk, share))
                else:
                    in_memory.append((share, home.store.part))
        before = time.perf_counter()
        for shares in batches(in_memory, lambda item: item[0].chunk.stop - item[0].chunk.start, _JOINT_NUMEL):
            update(shares, self._updater, self.param_groups, self._group_of)
        report.update_s += time.perf_counter() - before
        if parts and self._table.stream is not None:
            self._table.stream.run(parts, self._update_parts, report)

    def _update_parts(self, parts: Sequence[Part], regions: Sequence[dict[str, torch.Tensor]]) -> None:
        def place(start: int, own: dict[str, torch.Tensor]) -> Place:
            return lambda key, first, last: own[key][first - start : last - start]

        shares = [(part.content, place(part.start, own)) for part, own in zip(parts, regions)]
        update(shares, self._updater, self.param_groups, self._group_of)

    def _update_loose(self, parameters: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Parameters that no unit owns, and those of which this rank has no element: their state is in memory.

        Args:
            parameters: With their gradients, where they do not hold them.
        """
        entries = []
        for parameter, gradient in parameters:
            with engine_access():
                gradient = read_grad(parameter) if gradient is None else gradient
                info = info_of(parameter)
                home = self.home_of(info.flat) if info is not None else None
                if gradient is None or (home is not None and home.holds(info.index)):
                    continue
                value = parameter.detach().as_subclass(torch.Tensor)
                gradient = gradient.detach().as_subclass(torch.Tensor)
            entry = Entry(value, gradient, self._numbers[id(parameter)], self._view.loose.get(parameter, {}))
            entries.append((parameter, entry))
        if entries:
            self._updater.run([entry for _, entry in entries], self.param_groups)
            for parameter, entry in entries:
                self._view.loose[parameter] = entry.state
                with engine_access():
                    put(parameter.detach(), entry.value)

    # ------------------------------------------------------------------ state in and out

    def state_is_about_to_be_filled(self) -> None:
        """For ``load_checkpoint``, before it looks at the state: files that are lost are made anew.

        Raises:
            OffloadError: They cannot be made, or the optimizer was closed.
        """
        self._refuse_closed()
        if self._table.replace_lost():
            self._failure = "its files were lost"
        self.settle()

    def state_to_fill(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """For ``load_checkpoint``: where a state may be written straight to; None if it has to be assigned."""
        return self._view.to_fill(parameter, key, dtype)

    def state_is_being_filled(self) -> None:
        """Until :meth:`state_is_filled` the optimizer refuses to step."""
        self._failure = "a load that did not end"

    def state_is_filled(self) -> None:
        self._failure = None
        self._updater.forget_step()
        if self.updates_in_backward is not None:
            self.updates_in_backward.forget_failure()

    def state_dict(self) -> dict[str, Any]:
        """State and groups by the names of parameters. Tensors in files are mapped, not read.

        Tensors of sharded parameters are this rank's slices, and refuse to be written as if they were whole.
        """
        self._refuse_failed()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        named = {self._name(p): p for group in self.param_groups for p in group["params"]}
        groups = [{**group, "params": [self._name(p) for p in group["params"]]} for group in self.param_groups]
        view = self.state
        state = {name: guarded(view[p], info_of(p)) for name, p in named.items() if p in view}
        found = {"state": state, "param_groups": groups}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, on a rank with the same slices."""
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.state_is_about_to_be_filled()
        known = {self._name(p): p for group in self.param_groups for p in group["params"]}
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        own = [[self._name(p) for p in group["params"]] for group in self.param_groups]
        if saved != own:
            raise ConfigError(
                "these parameter groups are not the optimizer's", expected=own, found=saved,
                cure="fsdp.load_checkpoint matches groups by the names of their members",
            )  # fmt: skip
        states = {name: dict(state) for name, state in state_dict["state"].items()}  # maybe views of what goes now
        self.state_is_being_filled()
        for group, values in zip(self.param_groups, state_dict["param_groups"]):
            group.update(copy.deepcopy({key: value for key, value in values.items() if key != "params"}))
        self.settle()
        for name, parameter in known.items():
            if name in states:
                self._view[parameter] = states[name]
            elif parameter in self._view:
                del self._view[parameter]
        self.state_is_filled()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _name(self, parameter: torch.Tensor) -> str | None:
        """A parameter's name in the model; None if it is not there."""
        if id(parameter) not in self._names:  # the first, or of a module that was added
            models = [model for ref in self._models if (model := ref()) is not None]
            self._names = {id(p): name for model in models for name, p in model.named_parameters()}
        info = info_of(parameter)
        name = self._names.get(id(parameter))
        return name if name is None or info is None else info.name

    def close(self) -> None:
        """End the threads and remove the files; masters move back to host memory. Done when the optimizer is gone, too.

        Raises:
            OffloadError: There is no memory for the masters. The optimizer goes on as it was.
        """
        self._table.close()
        self._failure = self._failure or "it was closed"
        self._is_closed = True
        if self.updates_in_backward is not None:
            self.updates_in_backward.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FSDPError(
            "an offloaded optimizer cannot be copied or pickled: its state is in files of this process",
            cure="use fsdp.save_checkpoint(root, model, optimizer, ...)",
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__reduce_ex__(2)

