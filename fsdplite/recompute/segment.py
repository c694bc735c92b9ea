"""A segment: consecutive blocks of a forward that keep only their first input and are computed again together.

The forward itself is not rewritten. While a block of the segment runs, saved-tensor hooks take the place of what
autograd would save: a numbered note for each tensor. The first note that backward opens runs the segment's blocks
again, in order, under hooks that number in the same way, and the values are handed out as backward asks for them.
A block's input that an earlier block of the segment returned is not kept, because the second run makes it again; any
other input (another operation in between, a mask) is. Gradients flow through the graph of the first run, so what lies
between blocks needs no knowledge of any of this.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016: with about sqrt(L) segments of L blocks, memory
grows as sqrt(L) for one extra forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import GradientError
from ..structure import copy_structure, map_tensors, tensors_in
from .buffers import BuffersBefore
from .passes import replaying
from .weights import WeightsBefore

__all__ = ["Segment", "storage_bytes"]

_current_task = torch._C._current_graph_task_id


class _Kept:
    """An input that nothing in the segment makes again."""

    __slots__ = ("needs_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # shares the version counter; does not keep the graph before it alive
        self.needs_grad = tensor.requires_grad
        self.version = tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise GradientError(
                "the input of a recomputed block was changed in place after the block ran",
                expected=f"version {self.version} of a tensor of shape {tuple(self.tensor.shape)}",
                found=f"version {self.tensor._version}",
                cure="write `x = x + y` instead of `x += y` for tensors that a recomputed block takes",
            )
        return self.tensor.detach().requires_grad_(self.needs_grad)


class _Returned:
    """An input that the ``call``-th block of the segment returned, as its ``place``-th tensor."""

    __slots__ = ("call", "place")

    def __init__(self, call: int, place: int) -> None:
        self.call = call
        self.place = place


class _Note:
    """What autograd keeps in place of a saved tensor."""

    __slots__ = ("call", "index", "kind", "segment")

    def __init__(self, segment: Segment, index: int, call: int, tensor: torch.Tensor) -> None:
        self.segment = segment
        self.index = index
        self.call = call
        self.kind = (tensor.shape, tensor.dtype)


class _BlockCall:
    """One call of a block, ready to be repeated."""

    __slots__ = ("args", "autocast", "buffers", "kwargs", "module", "random", "weights")

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = weakref.ref(module)  # a graph must not keep modules alive
        self.args = args
        self.kwargs = kwargs
        self.random: Any = None
        self.autocast = autocast_state()
        self.buffers = BuffersBefore(module)
        self.weights = WeightsBefore(module)


class Segment:
    """See the module docstring. Alive as long as the graph of its blocks is."""

    def __init__(self, is_weight: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._calls: list[_BlockCall] = []
        self._outputs: list[list[tuple[weakref.ref, int]]] = []
        self._count = 0
        self._found: dict[int, torch.Tensor] = {}
        self._found_in = -1
        self._random_after: Any = None
        self._is_weight = is_weight
        self.saved_bytes: list[dict[int, int]] = []  # per call, if measured: bytes by storage
        self._measuring: list[torch.Tensor] = []  # alive during a measured call, or storages would be taken for others

    @property
    def call_count(self) -> int:
        return len(self._calls)

    # ------------------------------------------------------------------ the first run

    def run(self, module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call a block and keep what is needed to call it again."""
        call = _BlockCall(module, *copy_structure((args, kwargs), self._reference))
        random = random_state(args, kwargs)
        if self._random_after is None or not _same_random(random, self._random_after):
            call.random = random
        self._calls.append(call)
        if self._is_weight is not None:
            self.saved_bytes.append({})
        with torch.autograd.graph.saved_tensors_hooks(self._note, _open):
            output = function(*args, **kwargs)
        call.buffers.first_run_is_over()
        self._measuring.clear()
        self._random_after = random_state(args, kwargs)
        self._outputs.append([(weakref.ref(t), t._version) for t in tensors_in(output)])
        return output

    def _reference(self, tensor: torch.Tensor) -> Any:
        for call, outputs in enumerate(self._outputs):
            for place, (output, version) in enumerate(outputs):
                if output() is tensor and tensor._version == version:
                    return _Returned(call, place)
        return _Kept(tensor)

    def _note(self, tensor: torch.Tensor) -> _Note:
        note = _Note(self, self._count, len(self._calls) - 1, tensor)
        self._count += 1
        if self._is_weight is not None and not self._is_weight(tensor):
            self.saved_bytes[-1].update(storage_bytes(tensor))
            self._measuring.append(tensor.detach())
        return note

    def kept_bytes(self) -> dict[int, int]:
        """Bytes of the inputs that are kept, by storage."""
        found: dict[int, int] = {}
        for call in self._calls:
            for kept in _instances(call.args, _Kept) + _instances(call.kwargs, _Kept):
                found.update(storage_bytes(kept.tensor))
        return found

    def close(self) -> None:
        """No further block joins: what was only needed for the next one goes."""
        self._random_after = None
        self._outputs = []

    # ------------------------------------------------------------------ the second run

    def open(self, note: _Note) -> torch.Tensor:
        task = _current_task()
        if task == -1:  # somebody looks at the graph outside of a backward
            return self._checked(note, self._replay(note.call).get(note.index))
        if task != self._found_in:
            self._found, self._found_in = {}, task
        if note.index not in self._found:
            self._found = self._replay(note.call)
        return self._checked(note, self._found.pop(note.index, None))

    def _checked(self, note: _Note, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None or (tensor.shape, tensor.dtype) != note.kind:
            block = self._calls[note.call].module()
            found = "nothing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise GradientError(
                f"a recomputed {type(block).__name__} saved other tensors than the first time",
                expected=f"{tuple(note.kind[0])} of {note.kind[1]}",
                found=found,
                cure="a recomputed block must do the same both times: no random choices but torch's own, no counters "
                "that change what it computes; or leave it out with a policy for recompute=",
            )
        return tensor

    def _replay(self, last: int) -> dict[int, torch.Tensor]:
        """Run blocks up to ``last`` again. Memory: what they save, until backward has asked for it."""
        found: dict[int, torch.Tensor] = {}

        def take(tensor: torch.Tensor) -> None:
            found[len(found)] = tensor.detach()

        outputs: list[list[torch.Tensor]] = []
        calls = self._calls[: last + 1]
        for call in calls:
            call.weights.prepare()
        with _random_kept([call.random for call in calls]), torch.enable_grad(), replaying():
            for call in calls:
                module = call.module()
                if module is None:
                    raise GradientError(
                        "a block is to be computed again, and its module is gone",
                        cure="keep the model until backward is over",
                    )
                if call.random is not None:
                    _set_random(call.random)
                args, kwargs = _filled((call.args, call.kwargs), outputs)
                with _autocast(call.autocast), call.buffers.as_before():
                    with torch.autograd.graph.saved_tensors_hooks(take, _never):
                        output = module(*args, **kwargs)
                outputs.append(list(tensors_in(output)))
        return found


def _open(note: _Note) -> torch.Tensor:
    return note.segment.open(note)


def _never(value: None) -> torch.Tensor:
    raise AssertionError("the graph of a second run is never walked")


def _filled(value: Any, outputs: list[list[torch.Tensor]]) -> Any:
    def fill(item: Any) -> torch.Tensor:
        return item.get() if type(item) is _Kept else outputs[item.call][item.place]

    return copy_structure(value, fill, of=(_Kept, _Returned))


def _instances(value: Any, of: type) -> list[Any]:
    found: list[Any] = []

    def take(item: Any) -> Any:
        found.append(item)
        return item

    map_tensors(take, value, of=of)
    return found


def storage_bytes(tensor: torch.Tensor) -> dict[int, int]:
    """The bytes of a tensor's storage, by the storage."""
    try:
        storage = tensor.untyped_storage()
        return {storage._cdata: storage.nbytes()}
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without one
        return {id(tensor): tensor.numel() * tensor.element_size()}


# ---------------------------------------------------------------------- states around a call


def random_state(args: tuple, kwargs: dict) -> tuple[torch.Tensor, dict[torch.device, torch.Tensor]]:
    """States of the CPU's generator and of those of the devices that the inputs are on."""
    devices: dict[torch.device, torch.Tensor] = {}
    if torch.cuda.is_initialized():
        for tensor in tensors_in((args, kwargs)):
            if tensor.is_cuda and tensor.device not in devices:
                devices[tensor.device] = torch.cuda.get_rng_state(tensor.device)
    return torch.get_rng_state(), devices


def _same_random(one: Any, other: Any) -> bool:
    if not torch.equal(one[0], other[0]) or one[1].keys() != other[1].keys():
        return False
    return all(torch.equal(state, other[1][device]) for device, state in one[1].items())


def _set_random(state: Any) -> None:
    torch.set_rng_state(state[0])
    for device, values in state[1].items():
        torch.cuda.set_rng_state(values, device)


@contextlib.contextmanager
def _random_kept(states: list[Any]) -> Iterator[None]:
    """The generators are afterwards as they were."""
    devices = {device for state in states if state is not None for device in state[1]}
    before = torch.get_rng_state(), {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    finally:
        _set_random(before)


def autocast_state() -> list[tuple[str, bool, torch.dtype, bool]]:
    """Per kind of device: whether autocast is on, its dtype, and whether it caches casts."""
    cache = torch.is_autocast_cache_enabled()
    kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache) for kind in kinds]


@contextlib.contextmanager
def _autocast(states: list[tuple[str, bool, torch.dtype, bool]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if states != autocast_state():
            for kind, enabled, dtype, cache in states:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache))
        yield
