"""PARITY, RESTED and LOUD, as the cases define them."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.gathering import gather, gather_grads

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def assert_close(found: Tensor, expected: Tensor, *, bitwise: bool = False, what: str = "value") -> None:
    """`found` has the shape and dtype of `expected`, and its values within the tolerance of the dtype (or its bits)."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: dtype {found.dtype}, expected {expected.dtype}"
    if bitwise or not expected.is_floating_point():
        assert torch.equal(found, expected), f"{what}: other bits\nfound {found}\nexpected {expected}"
        return
    if expected.numel() == 0:
        return
    tolerance = TOLERANCE[expected.dtype] * max(1.0, expected.abs().max().item())
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance, f"{what}: off by {difference:.3g} > {tolerance:.3g}\n{found}\n{expected}"


def assert_all(found: dict[str, Tensor], value: float, *, tolerance: float = 0.0) -> None:
    """Every element of every tensor is `value`."""
    for name, tensor in found.items():
        worst = (tensor.double() - value).abs().max().item() if tensor.numel() else 0.0
        assert worst <= tolerance, f"{name}: expected {value} everywhere, found {tensor}"


def assert_parity(model: nn.Module, reference: nn.Module, *, grads: bool = True, bitwise: bool = False) -> None:
    """Gathered parameters and gradients equal those of the unwrapped `reference`, None where it has None.

    Every rank must call it. Names and their order are compared too.
    """
    expected = dict(reference.named_parameters())
    found = gather(model)
    assert list(found) == list(expected), f"names {list(found)}, expected {list(expected)}"
    for name, parameter in expected.items():
        assert_close(found[name], parameter.detach(), bitwise=bitwise, what=f"parameter {name}")
    if not grads:
        return
    found_grads = gather_grads(model)
    for name, parameter in expected.items():
        grad = found_grads[name]
        if parameter.grad is None or grad is None:
            if parameter.numel():
                assert parameter.grad is None and grad is None, (
                    f"gradient of {name}: found {grad}, expected {parameter.grad}"
                )
            continue
        assert_close(grad, parameter.grad, bitwise=bitwise, what=f"gradient of {name}")


def assert_rested(*models: nn.Module) -> None:
    """Every stage-3 unit is sharded, no full buffer lives, nothing is pending; by report and by counting storages."""
    from fsdplite import inspect

    for model in models:
        report = inspect.rest_report(model)
        wrong = {key: value for key, value in report.items() if value}
        assert not wrong, f"not at rest: {wrong}"
        _assert_only_shards_live(model)


def _assert_only_shards_live(model: nn.Module) -> None:
    """No floating-point memory is reachable from a model at stage 3 but its parameters, gradients and buffers."""
    from fsdplite import inspect

    if any(unit.stage != 3 for unit in inspect.units(model)):
        return
    with torch._C.DisableTorchFunctionSubclass():
        named = [*model.named_parameters(), *model.named_buffers()]
        owned = {tensor.untyped_storage()._cdata for _, tensor in named}
        flats = [flat for unit in inspect.units(model) for flat in unit.flats]
        mirrors = [flat.resting.mirror for flat in flats if flat.resting.is_elsewhere]  # of Offload(params="cpu")
        owned |= {mirror.untyped_storage()._cdata for mirror in mirrors if mirror is not None}
        owned |= {tensor.grad.untyped_storage()._cdata for _, tensor in named if tensor.grad is not None}
        others = {}
        for tensor in _reachable_tensors(model):
            if tensor.is_floating_point() and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in owned and storage.nbytes():
                    others[storage._cdata] = f"{storage.nbytes()} bytes, {tensor.dtype}, of shape {tuple(tensor.shape)}"
    assert not others, f"live memory beside shards, gradients and buffers: {list(others.values())}"


def _reachable_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors the model's objects hold; what user code stored as a plain attribute of a module is the user's."""
    namespaces = _namespaces(len(sys.modules))
    users = {id(value) for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)}
    found: list[Tensor] = []
    seen: set[int] = set()
    queue: list[Any] = [model]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or id(thing) in namespaces or isinstance(thing, (type, types.ModuleType, types.FrameType)):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if id(thing) not in users:
                found.append(thing)
            continue
        queue += gc.get_referents(thing)
    return found


@functools.lru_cache(maxsize=1)
def _namespaces(_: int) -> frozenset[int]:
    """Ids of all modules' namespaces, where the walk ends; computed again when another module was imported."""
    return frozenset(id(vars(m)) for m in list(sys.modules.values()) if isinstance(m, types.ModuleType))


def expect_loud(fn: Callable[[], Any], *needles: str) -> str:
    """`fn()` raises an error of the library whose text holds every needle; returns the text."""
    from fsdplite.errors import FSDPError

    try:
        result = fn()
    except FSDPError as error:
        text = str(error)
    except Exception as error:
        raise AssertionError(f"raised {type(error).__name__}, which is not an FSDPError: {error}") from error
    else:
        raise AssertionError(f"nothing was raised; the result was {result!r}")
    missing = [needle for needle in needles if needle not in text]
    assert not missing, f"the error does not say {missing}:\n{text}"
    return text


def for_each(combinations: Iterable[Any], body: Callable[..., None]) -> None:
    """Call `body(*combination)` (or `body(combination)`, if that is no tuple) for each; a failure says which it was."""
    for combination in combinations:
        torch.manual_seed(0)
        try:
            body(*(combination if type(combination) is tuple else (combination,)))
        except BaseException as error:
            error.add_note(f"in combination {combination!r}")
            raise
