"""All homes of one optimizer, and the buffers and threads through which their state passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import OffloadError
from ..flat_param import FlatParameter
from ..local_slice import engine_access, info_of
from .homes import Home
from .options import Offload
from .stream import Stream, Workers
from .update import Probed, Updater

__all__ = ["HomeTable"]


class HomeTable:
    """A home for each flat parameter of which a group has, or had, a parameter. Knows nothing of the optimizer.

    Attributes:
        stream: For homes in files; None without any.
        workers: Further threads, ended with the table.
    """

    def __init__(self, updater: Updater, offload: Offload) -> None:
        self._updater = updater
        self._offload = offload
        self._homes: dict[int, Home] = {}
        self._probed: dict[tuple, Probed] = {}
        self._started: dict[int, torch.Tensor] = {}
        self.stream: Stream | None = None
        self.workers: list[Workers] = []

    def __iter__(self) -> Iterator[Home]:
        return iter(list(self._homes.values()))

    def of(self, flat: FlatParameter) -> Home | None:
        home = self._homes.get(id(flat))
        return home if home is not None and home.flat is flat else None

    @torch.inference_mode(False)
    def settle(self, groups: list[dict[str, Any]], loose: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Homes for what the groups hold by now, with a region for each kind of state that their settings ask for.

        A parameter that was taken out of its group keeps its state. Homes of flat parameters that are no more go.

        Args:
            groups: Of the optimizer.
            loose: States of parameters without a home; those that get one move in.
        """
        wanted: dict[int, tuple[FlatParameter, set[int]]] = {}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                info = info_of(parameter)
                if info is not None and info.flat.trainable:
                    wanted.setdefault(id(info.flat), (info.flat, set()))[1].add(number)
        for key, home in list(self._homes.items()):
            if all(info_of(user).flat is not home.flat for user in home.flat.users):
                self._homes.pop(key).store.close()  # the masters moved with their parameters
        kinds = [_kind(group) for group in groups]
        made = False
        for key, (flat, numbers) in wanted.items():
            probed = self._probe([(kinds[n], groups[n]) for n in sorted(numbers)], flat.dtype)
            home = self.of(flat)
            if home is None:
                self._homes[key] = home = Home(flat, probed, self._offload)
                self._move_in(home, loose)
            elif probed.regions.keys() <= home.probed.regions.keys():
                continue
            else:
                home.widen(probed)
            made = True
        if made:
            self._settle_stream()
        if self._updater.has_first_state:
            self._start(groups, loose)

    def _probe(self, members: list[tuple[tuple, dict[str, Any]]], dtype: torch.dtype) -> Probed:
        key = (dtype, *(kind for kind, _ in members))
        if key not in self._probed:
            found = [self._updater.probe(group, dtype) for _, group in members]
            regions = {name: kind for probed in found for name, kind in probed.regions.items()}
            self._probed[key] = Probed(regions, frozenset().union(*(probed.beside for probed in found)))
        return self._probed[key]

    def _move_in(self, home: Home, loose: dict[torch.Tensor, dict[str, Any]]) -> None:
        with engine_access():
            for parameter in list(loose):
                info = info_of(parameter)
                if info is not None and info.flat is home.flat and home.holds(info.index):
                    home.set_state(info.index, loose.pop(parameter), set())

    def _start(self, groups: list[dict[str, Any]], loose: dict[torch.Tensor, dict[str, Any]]) -> None:
        """The state that the class gives its parameters when it is made."""
        for group in groups:
            for parameter in group["params"]:
                if id(parameter) in self._started:
                    continue
                self._started[id(parameter)] = parameter
                info = info_of(parameter)
                home = self.of(info.flat) if info is not None else None
                if home is not None and home.holds(info.index):
                    if not home.has_state(info.index):
                        home.start(info.index, lambda value, group=group: self._updater.first_state(value, group))
                elif parameter not in loose:
                    with engine_access():
                        value = parameter.detach().as_subclass(torch.Tensor)
                    loose[parameter] = self._updater.first_state(value, group)

    def _settle_stream(self) -> None:
        """Buffers and threads for the widest home; made with the optimizer, so that a step needs nothing new."""
        streamed = [home for home in self._homes.values() if home.store.is_streamed]
        if not streamed:
            return
        regions = max(len(home.store.dtypes) for home in streamed)
        size = max(home.buffer_bytes for home in streamed)
        if self.stream is None or not self.stream.fits(size, regions):
            if self.stream is not None:
                self.stream.close()
            self.stream = Stream(size, regions, self._offload.buffers)

    @torch.inference_mode(False)
    def replace_lost(self) -> bool:
        """New files for homes whose files are gone, cut or replaced, and with them their state. Whether there were any.

        Raises:
            OffloadError: The directory cannot be used yet.
        """
        found = False
        for home in self:
            try:
                home.store.check()
            except OffloadError:
                found = True
                try:
                    home.start_anew()
                except OffloadError as problem:
                    raise OffloadError(
                        "the files of optimizer state are lost, and new ones cannot be made",
                        found=problem.problem,
                        path=problem.path,
                        errno=problem.errno,
                        rank=problem.rank,
                        cure="make the directory usable again and load once more, or make a new optimizer for a model "
                        "wrapped with another Offload(path=...)",
                    ) from problem
        return found

    def close(self, is_at_exit: bool = False) -> None:
        """End the threads and remove the files; masters that were in them move out first, but not at exit.

        Raises:
            OffloadError: There is no memory for masters. All goes on as it was.
        """
        if not is_at_exit:
            for home in self:
                home.release_masters()
        for worker in self.workers:
            worker.stop()
        self.workers.clear()
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        while self._homes:
            _, home = self._homes.popitem()
            home.close()


def _kind(value: Any) -> Any:
    """What of a setting may decide which state a class makes: not how large a number is, but whether it is zero."""
    if isinstance(value, dict):
        return tuple((key, _kind(item)) for key, item in value.items() if key not in ("params", "param_names"))
    if isinstance(value, (list, tuple)):
        return tuple(_kind(item) for item in value)
    if isinstance(value, (bool, int, float)):
        return type(value), bool(value)
    return value if value is None or isinstance(value, str) else type(value)
