"""``fsdp.offloaded``: an optimizer whose state is in host memory or on a disk.

It is a ``torch.optim.Optimizer`` with groups, hooks and schedulers as usual; the update is that of the class it is
given, applied to one chunk of a unit's shard after another, while the state of the next chunks is being read and
that of the last ones written. Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall", 2021.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..control import STATE, exchange, exchange_texts
from ..errors import ConfigError, FSDPError, OffloadError
from ..flat_param import FlatParameter
from ..fsdp_unit import state_of
from ..parameter import LocalSlice, engine_access, info_of, read_grad
from ..watchdog import Waiting
from .files import warn_of_leftovers
from .homes import Home
from .in_backward import UpdatesInBackward
from .options import Offload
from .pieces import Chunk
from .state_view import StateView, guarded
from .stream import Part, StepReport, Stream, Workers
from .update import Entry, Updater

__all__ = ["OffloadedOptimizer", "offloaded"]


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
            Clipping, other norms, ``LossScaler`` and a second synchronised backward before ``step()`` are errors. If a backward
            dies after an update, the optimizer refuses to step until a checkpoint is loaded.
        settings: Keyword arguments of the class.

    Raises:
        ConfigError, ShardedAccessError: The class or the model cannot be used; says what can.
        OffloadError: The directory cannot be used, or has too little room. On all ranks, with path and errno.

    Collective: every rank of the model must call it; with ``"nvme"`` each step ends with one small message.

    Memory: with ``"nvme"`` ``buffers`` buffers of ``buffer_bytes`` per kind of state, whatever the size of the model,
    and for each piece its step counter; with ``"cpu"`` the state.
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
    made = cls(updater, model, model.parameters() if params is None else params, offload, root.schedule.groups)
    if in_backward:
        made.start_in_backward(root.schedule)
    return made


class OffloadedOptimizer(torch.optim.Optimizer):
    """What :func:`offloaded` returns.

    Attributes:
        last_step: What the last step moved, and how long it took.
        update_class: The class that it was given.
        updates_in_backward: None unless it was made with ``in_backward=True``.
    """

    update_class: type

    def __init__(
        self, updater: Updater, model: nn.Module, params: Iterable[Any], offload: Offload, groups: Any
    ) -> None:
        self._view = StateView(self)
        self._updater = updater
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._offload = offload
        self._groups = groups
        self._homes: dict[int, Home] = {}
        self._stream: Stream | None = None
        self._failure: str | None = None
        self._is_closed = False
        self.last_step = StepReport()
        self.updates_in_backward: UpdatesInBackward | None = None
        self._finalizer = weakref.finalize(self, _release, self._homes, (streams := []), (workers := []))
        self._streams, self._workers = streams, workers
        super().__init__(params, updater.defaults)
        self._together("make the files of optimizer state", self._prepare)

    @property
    def state(self) -> StateView:  # type: ignore[override]
        if self._is_closed:
            raise OffloadError(
                "the optimizer was closed: its state is gone",
                rank=self._groups.rank,
                cure="save a checkpoint before close()",
            )
        return self._view

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "param_groups"):  # the base class begins with an empty one
            self._view.clear()
            self._view.update(value)

    # ------------------------------------------------------------------ homes

    def start_in_backward(self, schedule: Any) -> None:
        self.updates_in_backward = UpdatesInBackward(self, schedule)
        self._workers.append(self.updates_in_backward.workers)

    def homes(self) -> list[Home]:
        return list(self._homes.values())

    @property
    def is_whole(self) -> bool:
        """Whether it may update: nothing has failed since a checkpoint was loaded."""
        return self._failure is None

    def home_of(self, flat: FlatParameter) -> Home | None:
        home = self._homes.get(id(flat))
        return home if home is not None and home.flat is flat else None

    def _prepare(self) -> None:
        """Find what earlier runs left, and reserve all space."""
        if self._offload.optimizer == "nvme" and self._groups.rank == self._groups.ranks[0]:
            warn_of_leftovers(str(self._offload.path))
        self._settle_homes()

    def _settle_homes(self) -> None:
        """A home for every flat parameter that trains; more come when parameters are unfrozen or added."""
        wanted: dict[int, tuple[FlatParameter, set[int]]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                info = info_of(parameter)
                if info is not None and info.flat.trainable:
                    wanted.setdefault(id(info.flat), (info.flat, set()))[1].add(number)
        for key in [key for key in self._homes if key not in wanted]:
            self._homes.pop(key).store.close()
        made = False
        for key, (flat, numbers) in wanted.items():
            if self.home_of(flat) is None:
                dtypes: dict[str, torch.dtype] = {}
                for number in sorted(numbers):
                    dtypes.update(self._updater.probe(self.param_groups[number], flat.dtype))
                self._homes[key] = home = Home(flat, dtypes, self._offload)
                with engine_access():
                    for parameter in list(self._view.loose):
                        info = info_of(parameter)
                        if info is not None and info.flat is flat and home.holds(info.index):
                            self._view[parameter] = self._view.loose.pop(parameter)
                made = True
        if made:
            self._settle_stream()

    # ------------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            OffloadError: State could not be read or written. Some units may have been updated and others not, so
                further steps are refused until a checkpoint is loaded.

        Collective, with ``"nvme"``: one message on the control group.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._failure is not None:
            raise OffloadError(
                "the optimizer's state is not whole",
                found=self._failure,
                rank=self._groups.rank,
                cure="load a checkpoint into the model and this optimizer",
            )
        began = time.perf_counter()
        self.last_step = StepReport() if (early := self.updates_in_backward) is None else early.take_report()
        if self._offload.optimizer == "nvme":
            self._together("update", self._update)
        else:
            self._update()
        self.last_step.wall_s += time.perf_counter() - began
        return loss

    def number_groups(self) -> None:
        """Note which group each parameter is in, for the updates that follow."""
        self._numbers = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}

    def _group_of(self, parameter: torch.Tensor) -> int | None:
        return self._numbers.get(id(parameter))

    def has_all(self, flat: FlatParameter) -> bool:
        """Whether every parameter of a flat parameter is in a group."""
        return all(id(user) in self._numbers for user in flat.users)

    def _update(self) -> None:
        if self.updates_in_backward is not None:
            self.updates_in_backward.end_step()
        self._settle_homes()
        self.number_groups()
        homes: list[tuple[Home, torch.Tensor | None]] = [(home, None) for home in self._homes.values()]
        for home, _ in homes:
            home.store.check()
            home.begin()
        self._update_loose([(p, None) for group in self.param_groups for p in group["params"]])
        self._update_homes(homes, self.last_step)
        for home, _ in homes:
            home.end()

    def update_reduced(self, reduced: list[tuple[Home, torch.Tensor]], report: StepReport) -> None:
        """Update whole flat parameters from gradient shards that their users do not hold, on any thread."""
        ready: list[tuple[Home, torch.Tensor | None]] = []
        for home, gradient in reduced:
            flat = home.flat
            flat.gradient.wait()
            home.store.check()
            home.begin()
            gradient = gradient.to(flat.dtype)
            self._update_loose([(user, gradient[:0]) for i, user in enumerate(flat.users) if not home.holds(i)])
            ready.append((home, gradient))
        self._update_homes(ready, report)

    def _update_homes(self, homes: list[tuple[Home, torch.Tensor | None]], report: StepReport) -> None:
        parts = []
        for home, reduced in homes:
            for chunk in home.chunks:
                if reduced is None and not self._has_gradients(home, chunk):
                    continue
                if home.store.is_streamed:
                    parts.append(self._part(home, chunk, reduced))
                else:
                    before = time.perf_counter()
                    home.update(self._updater, self.param_groups, chunk, self._group_of, home.store.part, reduced)
                    report.update_s += time.perf_counter() - before
        if parts and self._stream is not None:
            self._stream.run(parts, self._update_part, report)

    def _has_gradients(self, home: Home, chunk: Chunk) -> bool:
        with engine_access():
            users = home.flat.users
            return any(
                read_grad(users[piece.index]) is not None and self._group_of(users[piece.index]) is not None
                for piece in chunk.pieces
            )

    def _part(self, home: Home, chunk: Chunk, reduced: torch.Tensor | None) -> Part:
        store: Any = home.store
        is_new = not any(piece.has_state for piece in chunk.pieces)
        return Part(store, chunk.start, chunk.stop, tuple(store.dtypes), is_new, (home, chunk, reduced))

    def _update_part(self, part: Part, regions: dict[str, torch.Tensor]) -> None:
        home, chunk, reduced = part.content

        def place(key: str, start: int, stop: int) -> torch.Tensor:
            return regions[key][start - chunk.start : stop - chunk.start]

        home.update(self._updater, self.param_groups, chunk, self._group_of, place, reduced)

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
            entry = Entry(value, gradient, self._numbers[id(parameter)], self._view.loose.get(parameter))
            entries.append((parameter, entry))
        if entries:
            self._updater.run([entry for _, entry in entries], self.param_groups)
            for parameter, entry in entries:
                self._view.loose[parameter] = entry.state or {}

    def _settle_stream(self) -> None:
        """Buffers and threads for the widest home; made with the optimizer, so that a step needs nothing new."""
        streamed = [home for home in self._homes.values() if home.store.is_streamed]
        if not streamed:
            return
        regions = max(len(home.store.dtypes) for home in streamed)
        size = max(home.buffer_bytes for home in streamed)
        if self._stream is None or not self._stream.fits(size, regions):
            if self._stream is not None:
                self._stream.close()
            self._stream = Stream(size, regions, self._offload.buffers)
            self._streams[:] = [self._stream]

    def _together(self, doing: str, call: Callable[[], None]) -> None:
        """Do something that may fail on one rank, and raise on all if it does.

        Collective: one message on the control group, and another with the reasons if any rank has failed.
        """
        failure: Exception | None = None
        try:
            call()
        except Exception as problem:
            failure = problem
            self._failure = f"a failure to {doing}: {problem}"
        except BaseException:  # a person's interrupt: no time for messages
            self._failure = f"an interrupt while it was about to {doing}"
            raise
        waiting = Waiting("", f"agreement on whether all ranks could {doing}", 0)
        merged = exchange(self._groups, STATE, 0, bytes([failure is not None]), waiting)
        if merged is not None and not merged[0]:
            return
        self._failure = self._failure or f"another rank's failure to {doing}"
        texts = exchange_texts(self._groups, None if failure is None else str(failure), waiting)
        if failure is not None:
            raise failure
        failed = next(((rank, text) for rank, text in zip(self._groups.ranks, texts) if text is not None), None)
        raise OffloadError(
            f"rank {failed[0]} could not {doing}" if failed else f"not every rank is about to {doing}",
            found=failed[1] if failed else None,
            rank=failed[0] if failed else self._groups.rank,
        )

    # ------------------------------------------------------------------ state in and out

    def state_to_fill(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """For ``load_checkpoint``: where a state may be written straight to; None if it has to be assigned."""
        self._settle_homes()
        return self._view.to_fill(parameter, key, dtype)

    def state_is_being_filled(self) -> None:
        """Until :meth:`state_is_filled` the optimizer refuses to step."""
        self._failure = "a load that did not end"

    def state_is_filled(self) -> None:
        self._failure = None
        if self.updates_in_backward is not None:
            self.updates_in_backward.forget_failure()

    def state_dict(self) -> dict[str, Any]:
        """State and groups by the names of parameters. Tensors in files are mapped, not read.

        Tensors of sharded parameters are this rank's slices, and refuse to be written as if they were whole.
        """
        named = {self._name(p): p for group in self.param_groups for p in group["params"]}
        groups = [{**group, "params": [self._name(p) for p in group["params"]]} for group in self.param_groups]
        view = self.state
        state = {name: guarded(view[p], info_of(p)) for name, p in named.items() if p in view}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, on a rank with the same slices."""
        self._settle_homes()
        known = {self._name(p): p for group in self.param_groups for p in group["params"]}
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        own = [[self._name(p) for p in group["params"]] for group in self.param_groups]
        if saved != own:
            raise ConfigError(
                "these parameter groups are not the optimizer's", expected=own, found=saved,
                cure="fsdp.load_checkpoint matches groups by the names of their members",
            )  # fmt: skip
        for group, values in zip(self.param_groups, state_dict["param_groups"]):
            group.update({key: value for key, value in values.items() if key != "params"})
        for name, parameter in known.items():
            self._view.pop(parameter, None)
            if name in state_dict["state"]:
                with engine_access():
                    self._view[parameter] = {
                        key: value.as_subclass(torch.Tensor) if isinstance(value, LocalSlice) else value
                        for key, value in state_dict["state"][name].items()
                    }
        self.state_is_filled()

    def _name(self, parameter: torch.Tensor) -> str:
        info = info_of(parameter)
        return info.name if info is not None else self._names.get(id(parameter), f"parameter {id(parameter)}")

    def close(self) -> None:
        """End the threads and remove the files. Done at exit too, and when the optimizer is gone."""
        self._failure = self._failure or "it was closed"
        self._is_closed = True
        if self.updates_in_backward is not None:
            self.updates_in_backward.close()
        self._finalizer()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FSDPError(
            "an offloaded optimizer cannot be copied or pickled: its state is in files of this process",
            cure="use fsdp.save_checkpoint(root, model, optimizer, ...)",
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__reduce_ex__(2)


def _release(homes: dict[int, Home], streams: list[Stream], workers: list[Workers]) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()
    for stream in streams:
        stream.close()
    streams.clear()
    for home in homes.values():
        home.store.close()
    homes.clear()
