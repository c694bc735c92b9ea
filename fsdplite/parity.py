"""Sharded against unsharded: the same model, seed, batches and optimizer, and how far apart they end.

The unsharded side is one process: each rank's local batch is run by itself on the unwrapped model, the gradients are
added in rank order in fp32 (or wider) and divided by the number of ranks, and the optimizer steps once. Under a low
precision it holds fp32 masters and computes with weights cast to the compute dtype. Of the engine it shares only the
rules of ``Precision``: which dtype a weight has where.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import ConfigError
from .full import full_grad, full_state_dict
from .inspect import units
from .low_precision import keep_in_fp32, kept_modules
from .precision import Precision, as_precision
from .structure import arguments, map_tensors, tensors_in
from .wrap import fsdp_wrap

__all__ = ["Difference", "ParityReport", "check_parity"]

MakeBatch = Callable[[int, int, int], Any]
LossOf = Callable[..., torch.Tensor]
DEFAULT_TOLERANCE = {torch.float64: 1e-10}  # of parameters of that dtype; 1e-6 of all others


@dataclass(frozen=True)
class Difference:
    """One tensor of both sides.

    Attributes:
        name: Dotted name of the parameter.
        kind: ``"parameter"``, after the last step, or ``"gradient"``, of the last step.
        shape: Full shape.
        difference: Largest absolute difference; infinite where only one side has a value or one is not finite.
        scale: ``max(1, largest absolute value of the unsharded side)``.
        tolerance: Largest ``difference / scale`` that passes; 0 asks for the same bits.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    difference: float
    scale: float
    tolerance: float

    @property
    def relative(self) -> float:
        return self.difference / self.scale

    @property
    def passed(self) -> bool:
        return self.relative <= self.tolerance


@dataclass
class ParityReport:
    """What ``check_parity`` found. On ranks other than the first, ``differences`` is empty.

    Attributes:
        passed: Whether all tensors are within their tolerance; the same on every rank.
        world_size, steps: Of the run.
        losses: Of the first rank in each step: (sharded, unsharded).
        differences: Parameters in the model's order, then gradients.
    """

    passed: bool
    world_size: int
    steps: int
    losses: list[tuple[float, float]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class _Subject:
    """What a factory makes: a model, its batches, and its loss."""

    model: nn.Module
    make_batch: MakeBatch
    loss_of: LossOf


def check_parity(
    factory: Callable[[], Any],
    *,
    steps: int = 3,
    stage: int = 3,
    precision: str | Precision | None = None,
    policy: Any = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    bitwise: bool = False,
    device: torch.device | None = None,
) -> ParityReport:
    """Train a model sharded over all ranks and again unsharded, and compare.

    Args:
        factory: Returns a model, ``(model, make_batch)`` or ``(model, make_batch, loss_of)``. It is called twice,
            with the same seed, and must build the same weights. ``make_batch(step, rank, world_size)`` returns one
            rank's batch: a tensor, a tuple of positional arguments, a dict of keyword arguments, or ``(args,
            kwargs)``; left out, it is guessed from the first layer. ``loss_of(model, *args, **kwargs)`` returns a
            scalar; left out, it is the output if that is a scalar, else the mean of all floating outputs squared.
        steps: Optimizer steps.
        stage, precision, policy: As for ``fsdp_wrap``.
        make_optimizer: From parameters to an element-wise optimizer; default ``SGD(lr=0.1)``.
        seed: Of weights, guessed batches, and whatever the forward draws.
        tolerance: Largest difference over ``max(1, |unsharded|)``. None: 1e-6, and 1e-10 for fp64 parameters.
        bitwise: Ask for the same bits instead. They are promised on one and two ranks.
        device: Where to run. None: CPU.

    Returns:
        The report; complete on the first rank.

    Raises:
        ConfigError: The factory's result cannot be used, or two calls built different weights.

    Collective: every rank of the default process group must call it. The unsharded side runs on the first rank.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    precision = as_precision(precision)
    if precision.buffer_dtype is not None:
        raise ConfigError(
            "the unsharded side does not cast buffers", expected="buffer_dtype=None", found=precision.buffer_dtype
        )
    device = device or torch.device("cpu")
    subject, twin = _build(factory, seed, device), _build(factory, seed, device)
    _check_same_weights(subject.model, twin.model)
    batches = _Batches(seed, world_size, device)

    fsdp_wrap(subject.model, policy, stage=stage, precision=precision)
    optimizer = make_optimizer(subject.model.parameters())
    sharded_losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = batches.loss(subject, subject.model, step, rank)
        loss.backward()
        sharded_losses.append(loss.item())
        optimizer.step()
    names = [name for name, _ in subject.model.named_parameters()]
    parameters = full_state_dict(subject.model)
    gradients = {name: full_grad(subject.model, name) for name in names}

    report = ParityReport(passed=True, world_size=world_size, steps=steps)
    if rank == 0:
        unit_names = [info.name for info in units(subject.model)]
        reference = _Unsharded(twin, precision, unit_names, make_optimizer)
        losses = [reference.step(batches, step) for step in range(steps)]
        report.losses = list(zip(sharded_losses, losses, strict=True))
        report.differences = list(_compare(reference.masters, parameters, gradients, tolerance, bitwise))
        report.passed = all(difference.passed for difference in report.differences)
    if world_size > 1:
        verdict = torch.tensor([int(report.passed)], device=device)
        dist.broadcast(verdict, src=0)
        report.passed = bool(verdict.item())
    return report


# ------------------------------------------------------------------------------------------------------ the two sides


def _build(factory: Callable[[], Any], seed: int, device: torch.device) -> _Subject:
    random.seed(seed)
    torch.manual_seed(seed)
    made = factory()
    model, *rest = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, nn.Module) or len(rest) > 2 or not all(callable(part) for part in rest):
        raise ConfigError(
            "the factory's result cannot be used",
            expected="a module, (module, make_batch) or (module, make_batch, loss_of)",
            found=", ".join(type(part).__name__ for part in (model, *rest)),
            cure="make_batch is a function that returns one rank's batch: lambda step, rank, world_size: batch"
            if rest and not callable(rest[0])
            else None,
        )
    make_batch = rest[0] if rest else _guessed_batches(model)
    return _Subject(model.to(device), make_batch, rest[1] if len(rest) == 2 else _default_loss)


def _guessed_batches(model: nn.Module) -> MakeBatch:
    """Random inputs for the first layer in the order of ``modules()``, four rows of them."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return lambda step, rank, world_size: torch.randint(module.num_embeddings, (4, 8))
        if isinstance(module, (nn.Linear, nn.Bilinear)):
            width = getattr(module, "in_features", None) or module.in1_features
            dtype = module.weight.dtype
            return lambda step, rank, world_size: torch.randn(4, width, dtype=dtype)
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            shape = (4, module.in_channels, *[8 for _ in module.kernel_size])
            dtype = module.weight.dtype
            return lambda step, rank, world_size: torch.randn(shape, dtype=dtype)
    raise ConfigError(
        f"no batch can be guessed for a {type(model).__name__}: it has no Linear, Embedding or convolution",
        cure="return (model, make_batch) from the factory, with make_batch(step, rank, world_size)",
    )


def _default_loss(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    output = model(*args, **kwargs)
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not floats:
        raise ConfigError(
            "the model's output holds no floating tensor with a gradient",
            cure="return (model, make_batch, loss_of) from the factory, with loss_of(model, *args, **kwargs)",
        )
    if len(floats) == 1 and floats[0].ndim == 0:
        return floats[0]
    total = sum(tensor.double().square().sum() for tensor in floats)
    return total / sum(tensor.numel() for tensor in floats)


def _check_same_weights(model: nn.Module, twin: nn.Module) -> None:
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    same = ours.keys() == theirs.keys()
    differing = [name for name in ours if not same or not torch.equal(ours[name], theirs[name])]
    if differing or not same:
        raise ConfigError(
            "the factory built different models in two calls with the same seed",
            found=", ".join(differing[:5]) or "other names of parameters",
            cure="draw weights from torch's or random's global generator, or seed one of your own inside the factory",
        )


class _Batches:
    """Local batches, with every random number that they or the forward draw fixed by step and rank."""

    def __init__(self, seed: int, world_size: int, device: torch.device) -> None:
        self.seed = seed
        self.world_size = world_size
        self.device = device

    def loss(self, subject: _Subject, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """The loss of ``model`` on one rank's batch of one step."""
        random.seed(hash((self.seed, step, rank)))
        torch.manual_seed((self.seed * 100_003 + step) * 10_007 + rank)
        args, kwargs = arguments(subject.make_batch(step, rank, self.world_size))
        moved = map_tensors(lambda tensor: tensor.to(self.device), (args, kwargs))
        return subject.loss_of(model, *moved[0], **moved[1])


class _Unsharded:
    """The unwrapped side: masters that the optimizer works on, and the model that computes."""

    def __init__(self, subject: _Subject, precision: Precision, unit_names: list[str], make_optimizer: Any) -> None:
        self.subject = subject
        self.masters = subject.model
        for parameter in self.masters.parameters():
            parameter.data = parameter.data.to(precision.master_dtype(parameter.dtype))
        self.compute = self.masters
        if precision.param_dtype is not None:
            self.compute = copy.deepcopy(self.masters)
            self._lower(precision, unit_names)
        self.optimizer = make_optimizer(self.masters.parameters())

    def _lower(self, precision: Precision, unit_names: list[str]) -> None:
        """Cast weights, and inputs and outputs where a unit would."""
        kept, outermost = kept_modules(self.compute, precision)
        for module in self.compute.modules():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(precision.compute_dtype(parameter.dtype, id(module) in kept))
        modules = dict(self.compute.named_modules())
        for name in unit_names:
            if precision.cast_forward_inputs:
                _cast_inputs(modules[name], precision.param_dtype)
            if precision.output_dtype is not None:
                _cast_outputs(modules[name], precision.output_dtype)
        for module in outermost:
            keep_in_fp32(module, precision.param_dtype)

    def step(self, batches: _Batches, step: int) -> float:
        """One optimizer step on the batches of all ranks. Returns the first rank's loss."""
        if self.compute is not self.masters:
            with torch.no_grad():
                for low, master in zip(self.compute.parameters(), self.masters.parameters(), strict=True):
                    low.copy_(master)
        self.optimizer.zero_grad()
        totals: dict[str, torch.Tensor] = {}
        losses = []
        for rank in range(batches.world_size):
            loss = batches.loss(self.subject, self.compute, step, rank)
            loss.backward()
            losses.append(loss.item())
            for name, parameter in self.compute.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                    totals[name] = totals[name] + gradient if name in totals else gradient
                    parameter.grad = None
        for name, parameter in self.masters.named_parameters():
            if name in totals:
                parameter.grad = (totals[name] / batches.world_size).to(parameter.dtype)
        self.optimizer.step()
        return losses[0]


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    def before(_: nn.Module, args: tuple, kwargs: dict) -> Any:
        return map_tensors(_caster(dtype), (args, kwargs))

    module.register_forward_pre_hook(before, with_kwargs=True)


def _cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    module.register_forward_hook(lambda _, __, output: map_tensors(_caster(dtype), output))


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


# --------------------------------------------------------------------------------------------------------- comparison


def _compare(
    masters: nn.Module,
    parameters: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor | None],
    tolerance: float | None,
    bitwise: bool,
) -> Iterator[Difference]:
    expected = dict(masters.named_parameters())
    pairs = [("parameter", name, parameters.get(name), value.detach()) for name, value in expected.items()]
    pairs += [("gradient", name, gradients.get(name), value.grad) for name, value in expected.items()]
    for kind, name, found, value in pairs:
        reference = expected[name]
        if bitwise:
            allowed = 0.0
        else:
            allowed = DEFAULT_TOLERANCE.get(reference.dtype, 1e-6) if tolerance is None else tolerance
        scale = 1.0 if value is None or not value.numel() else max(1.0, value.abs().max().item())
        yield Difference(name, kind, tuple(reference.shape), _largest(found, value), scale, allowed)


def _largest(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Largest absolute difference. Equal bits are 0, also where they are not numbers."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double().cpu(), expected.double().cpu()
    apart = ~((found == expected) | (found.isnan() & expected.isnan()))
    if not apart.any():
        return 0.0
    largest = (found - expected)[apart].abs().max().item()
    return largest if largest == largest else float("inf")  # not a number on one side only
