"""Everything that a plan is made from, kept so that the same question can be asked again with one answer changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import ConfigError
from ..keywords import refuse_unknown
from ..offload.options import Offload, as_offload
from ..module_tree import checked_ignored, checked_methods
from ..policy import Policy, as_policy
from ..precision import Precision, as_precision
from ..recompute.matching import recompute_matching
from ..recompute.plan import as_segmented
from ..stage import stage_of
from ..structure import arguments, tensors_in
from .blueprint import Blueprint, Named, draw
from .fake_copy import fake_copy
from .fake_step import FakeStep, made_up_step
from .optimizer_cost import resolve_optimizer
from .recording import Recording, record_step
from .setup import Setup

__all__ = ["DEFAULTS", "Question", "ask", "ask_again"]


@dataclass
class Memory:
    """Units by policy, fake steps, and the recordings that these were taken from."""

    blueprints: dict[Any, Blueprint] = field(default_factory=dict)
    recordings: dict[Any, list[Recording]] = field(default_factory=dict)
    steps: dict[Any, tuple[Blueprint, FakeStep]] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """The options of :func:`fsdplite.plan`, checked.

    Attributes:
        model: A fake copy; the user's own is left alone.
        batch: ``(args, kwargs)`` of one microbatch on one rank, or None.
        watched: Names of modules that may become units under other policies: one fake step serves them all.
        memory: What was found already, by what it depends on.
    """

    model: nn.Module
    mode: FakeTensorMode
    batch: tuple[tuple, dict] | None
    loss_of: Callable[..., torch.Tensor]
    world_size: int
    mesh: tuple[int, int]
    stage: int
    policy: Policy | None
    precision: Precision
    optimizer: Any
    recompute: Any
    offload: Offload
    prefetch: int
    reshard_after_forward: bool | None
    ignored: tuple[str, ...]
    forward_methods: tuple[str, ...]
    microbatches: int
    no_sync: bool
    device: str
    transport_copies: bool
    rank: int
    watched: tuple[str, ...] = ()
    memory: Memory = field(default_factory=Memory, repr=False)

    def but(self, **changes: Any) -> Question:
        """The same question with other options (already checked)."""
        return replace(self, **changes)

    def afresh(self, **changes: Any) -> Question:
        """The same with another batch or loss, for which fake steps have to be run again."""
        return replace(self, **changes, memory=Memory(self.memory.blueprints))

    @property
    def setup(self) -> Setup:
        replicate, shard = self.mesh
        row = stage_of(self.stage)
        if not row.shards_optimizer:  # stage 0: every rank a replica
            replicate, shard = replicate * shard, 1
        as_offload(self.offload, row)
        is_offloaded = self.offload.params is not None
        return Setup(
            stage=row,
            shards_on_host=is_offloaded and self.device != "cpu",
            shards_apart=is_offloaded and self.device == "cpu",
            agrees_on_updates=self.offload.optimizer == "nvme",
            shard_size=shard,
            replicate_size=replicate,
            prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
            on_cpu=self.device == "cpu",
            transport_copies=self.transport_copies,
            microbatches=self.microbatches,
            no_sync=self.no_sync,
        )

    def run(self) -> tuple[Blueprint, FakeStep]:
        """Units, and what the plain model does in one microbatch: run on fake tensors if there is a batch."""
        policy = self._told_policy()
        key = (policy, self.recompute, *self._model_key())
        if key not in self.memory.steps:
            self.memory.steps[key] = self._run(self.blueprint(policy))
        return self.memory.steps[key]

    def blueprint(self, policy: Policy | None) -> Blueprint:
        """The units that a policy makes of the model."""
        key = (policy, *self._model_key())
        if key not in self.memory.blueprints:
            self.memory.blueprints[key] = self._draw(self.model, policy)
        return self.memory.blueprints[key]

    def _model_key(self) -> tuple:
        return self.precision, self.ignored, self.forward_methods

    def _draw(self, model: nn.Module, policy: Policy | None) -> Blueprint:
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
        ignored = [modules[name] if name in modules else parameters[name] for name in self.ignored]
        return draw(model, policy, self.precision, ignored, self.forward_methods)

    def _told_policy(self) -> Policy | None:
        names = ("mesh", "stage", "precision", "optimizer", "offload", "microbatches", "no_sync", "device", "loss_of",
                 "forward_methods")  # fmt: skip
        told = {name: getattr(self, name) for name in names}
        return None if self.policy is None else self.policy.knowing(**told, inputs=self.batch)

    def _run(self, blueprint: Blueprint) -> tuple[Blueprint, FakeStep]:
        if self.batch is None:
            if isinstance(self.recompute, Policy):  # an error where it matches nothing
                recompute_matching(fake_copy(self.model, self.mode), self.recompute)
            return blueprint, made_up_step(blueprint)
        recordings = self.memory.recordings.setdefault((self.recompute, *self._model_key()), [])
        recording = next((recording for recording in recordings if recording.serves(blueprint)), None)
        if recording is None:
            recording = self._record(blueprint)
            recordings.append(recording)
        return blueprint, recording.step_of(blueprint)

    def _record(self, blueprint: Blueprint) -> Recording:
        twin = fake_copy(self.model, self.mode)
        segments = as_segmented(self.recompute)
        if self.recompute is not None and segments is None:
            recompute_matching(twin, self.recompute)
        same = self._draw(twin, Named(unit.name for unit in blueprint.partition.units))
        args, kwargs = self.batch
        return record_step(
            twin, same, self.precision, args, kwargs, self.loss_of, self.mode, segments, self.forward_methods,
            self.watched,
        )  # fmt: skip


DEFAULTS = {
    "stage": 3, "policy": None, "precision": None, "optimizer": "AdamW", "recompute": None, "offload": None,
    "mesh": None, "inputs": None, "loss_of": None, "prefetch": 1, "reshard_after_forward": None, "ignored": (),
    "forward_methods": (), "microbatches": 1, "no_sync": False, "device": "cuda", "rank": 0,
}  # fmt: skip


def ask(model: Any, world_size: int | None, options: dict[str, Any]) -> Question:
    """Check the options of a plan and copy the model onto fake tensors.

    Raises:
        ConfigError, UnknownOptionError: An option cannot be used; says what can.
    """
    refuse_unknown("a plan", options, ["world_size", *DEFAULTS])
    chosen = {**DEFAULTS, **options}
    mesh = _mesh(world_size, chosen["mesh"])
    size = mesh[0] * mesh[1]
    checked = _checked(chosen, size)
    built, batch, loss_of = _build(model, size)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if chosen["inputs"] is not None:
        batch = arguments(chosen["inputs"])
    return Question(
        model=fake_copy(built, mode),
        mode=mode,
        batch=batch,
        loss_of=chosen["loss_of"] or loss_of or default_loss,
        world_size=size,
        mesh=mesh,
        ignored=_names_of(built, chosen["ignored"]),
        forward_methods=checked_methods(built, chosen["forward_methods"]),
        transport_copies=chosen["device"] == "cpu",
        **checked,
    )


def ask_again(question: Question, changes: dict[str, Any]) -> Question:
    """The same question with options of a plan changed.

    Raises:
        ConfigError, UnknownOptionError: As :func:`ask` does.
    """
    changeable = [name for name in DEFAULTS if name not in ("ignored", "forward_methods")]
    refuse_unknown("a plan", changes, ["world_size", *changeable])
    changes = dict(changes)
    mesh = question.mesh
    if "world_size" in changes or "mesh" in changes:
        size, given = changes.pop("world_size", None), changes.pop("mesh", None)
        if given is None and mesh[0] > 1:
            raise ConfigError(
                "the plan has replicas, so a number of ranks does not say how they are divided",
                found=f"mesh={mesh}",
                cure="give mesh=(replicas, shards)",
            )
        mesh = _mesh(size, given)
    size = mesh[0] * mesh[1]
    present = {name: getattr(question, name) for name in _CHECKED}
    found: dict[str, Any] = {"mesh": mesh, "world_size": size, **_checked(present | changes, size)}
    if "device" in changes:
        found["transport_copies"] = changes["device"] == "cpu"
    if "inputs" in changes:
        found["batch"] = None if changes["inputs"] is None else arguments(changes["inputs"])
    if "loss_of" in changes:
        found["loss_of"] = changes["loss_of"] or default_loss
    return (question.afresh if "inputs" in changes or "loss_of" in changes else question.but)(**found)


_CHECKED = ("stage", "policy", "precision", "optimizer", "recompute", "offload", "prefetch", "reshard_after_forward",
            "microbatches", "no_sync", "device", "rank")  # fmt: skip


def _checked(chosen: dict[str, Any], size: int) -> dict[str, Any]:
    """The options that do not depend on the model, as a question holds them."""
    for name, least in (("prefetch", 0), ("microbatches", 1), ("rank", 0)):
        if isinstance(chosen[name], bool) or not isinstance(chosen[name], int) or chosen[name] < least:
            raise ConfigError(f"{name} is a number", expected=f"an int >= {least}", found=repr(chosen[name]))
    if chosen["device"] not in ("cuda", "cpu"):
        raise ConfigError("a plan is for a kind of device", expected="'cuda' or 'cpu'", found=repr(chosen["device"]))
    if chosen["rank"] >= size:
        raise ConfigError("there is no such rank", expected=f"one of 0 to {size - 1}", found=chosen["rank"])
    loss_of = chosen.get("loss_of")
    if loss_of is not None and not callable(loss_of):
        expected = "a function of the model and the batch, or None"
        raise ConfigError("loss_of is not a function", expected=expected, found=repr(loss_of))
    for name, known in (("reshard_after_forward", (None, True, False)), ("no_sync", (True, False))):
        if not any(chosen[name] is value for value in known):
            raise ConfigError(f"{name} takes {', '.join(map(str, known))}", found=repr(chosen[name]))
    offload = as_offload(chosen["offload"], stage_of(chosen["stage"]))
    resolve_optimizer(chosen["optimizer"], chosen["device"])
    recompute = chosen["recompute"]
    if recompute is not None and as_segmented(recompute) is None and not isinstance(recompute, Policy):
        raise ConfigError(
            "recompute takes a wrap policy, a word or a budget",
            expected='by_class("Block"), "sqrt", or fsdp.recompute_within("2GiB")',
            found=repr(recompute),
        )
    policy, precision = as_policy(chosen["policy"]), as_precision(chosen["precision"])
    converted = {"policy": policy, "precision": precision, "offload": offload}
    return {name: chosen[name] for name in _CHECKED} | converted


def _mesh(world_size: Any, mesh: Any) -> tuple[int, int]:
    """(replicas, shards) from a number of ranks and an optional (replicas, shards) or DeviceMesh."""
    if mesh is not None:
        shape = mesh.mesh.shape if hasattr(mesh, "mesh") else mesh
        is_shape = isinstance(shape, (tuple, list)) and all(type(n) is int and n > 0 for n in shape)
        if not is_shape or len(shape) not in (1, 2):
            raise ConfigError("mesh is not a shape", expected="(replicas, shards), or a DeviceMesh", found=repr(mesh))
        shape = tuple(shape) if len(shape) == 2 else (1, *shape)
        if world_size not in (None, shape[0] * shape[1]):
            raise ConfigError("mesh and world_size disagree", expected=f"{world_size} ranks", found=f"mesh {shape}")
        return shape
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError("world_size is the number of ranks", expected="an int >= 1", found=repr(world_size))
    return 1, world_size


_BATCH = "make_batch is a function that returns one rank's batch: lambda step, rank, world_size: batch"


def _build(model: Any, world_size: int) -> tuple[nn.Module, tuple[tuple, dict] | None, Any]:
    """A module, and what else its factory brings: a batch and a loss."""
    if isinstance(model, nn.Module):
        if any(type(p).__name__ == "ShardedParameter" for p in model.parameters()):
            cure = "plan before fsdp_wrap, or pass what builds the model"
            raise ConfigError("the model is wrapped already", cure=cure)
        return model, None, None
    if not callable(model):
        raise ConfigError("a plan is made for a model", expected="a module or what builds one", found=repr(model))
    if not _takes(model, 0):
        cure = "fsdp.plan(lambda: Model(...), ...)"
        raise ConfigError("what builds the model needs arguments", found=repr(model), cure=cure)
    try:
        with torch.device("meta"):
            made = model()
    except (RuntimeError, NotImplementedError) as failure:
        raise ConfigError(
            "the model cannot be built on the meta device",
            found=f"{type(failure).__name__}: {str(failure).splitlines()[0]}",
            cure="do not read values of tensors while building, or pass the built module",
        ) from failure
    module, *rest = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(module, nn.Module) or len(rest) > 2 or not all(map(callable, rest)):
        found = ", ".join(type(value).__name__ for value in (module, *rest))
        raise ConfigError(
            "what builds the model returned something else",
            expected="a module, (module, make_batch) or (module, make_batch, loss_of)",
            found=found if module is made else f"({found})",
            cure=_BATCH if rest and not callable(rest[0]) else None,
        )
    if rest and not _takes(rest[0], 3):
        raise ConfigError("make_batch cannot be called",
                          expected="make_batch(step, rank, world_size)", found=repr(rest[0]),
                          cure=_BATCH)  # fmt: skip
    batch = arguments(rest[0](0, 0, world_size)) if rest else None
    return module, batch, rest[1] if len(rest) > 1 else None


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments; True where Python cannot tell."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _names_of(model: nn.Module, ignored: Any) -> tuple[str, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    names |= {id(parameter): name for name, parameter in model.named_parameters()}
    ignored = checked_ignored(ignored)
    for entry in ignored:
        if id(entry) not in names:
            raise ConfigError(
                "ignored holds something that is not in the model",
                found=type(entry).__name__,
                cure="take it from the model itself; pass that model, not a function that builds another",
            )
    return tuple(names[id(entry)] for entry in ignored)


def default_loss(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The output itself if it is a scalar, else the mean of all its floating tensors squared."""
    output = model(*args, **kwargs)
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output.reshape(())
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        cure = "pass loss_of=; or, if nothing trains, leave inputs out"
        raise ConfigError("no output of the model needs a gradient", cure=cure)
    return torch.stack([tensor.float().square().mean() for tensor in found]).sum()
