"""Loss scaling for fp16, decided by all ranks together."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .control import OVERFLOW, exchange
from .errors import ConfigError, GradientError, RankMismatchError
from .groups import Groups
from .keywords import known_keywords
from .local_slice import engine_access, info_of
from .watchdog import Waiting

__all__ = ["LossScaler"]


@known_keywords
class LossScaler:
    """Scales the loss so that small fp16 gradients survive; the method names are those of ``torch.amp.GradScaler``.

    Whether a step is skipped is one decision for all ranks: an overflow anywhere skips it everywhere, also on ranks
    that own no element of the gradient concerned. Micikevicius et al., "Mixed Precision Training", 2018.

    Args:
        init_scale: First scale.
        growth_factor: Multiplies the scale after ``growth_interval`` steps in a row without overflow.
        backoff_factor: Multiplies the scale after an overflow.
        growth_interval: See ``growth_factor``.
        enabled: If False, every method passes through.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and not (growth_factor > 1.0 and 0.0 < backoff_factor < 1.0 and init_scale > 0):
            raise ConfigError(
                "these scaler settings cannot work",
                expected="init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1",
                found=f"{init_scale}, {growth_factor}, {backoff_factor}",
            )
        self._scale = float(init_scale)
        self._growth_factor = float(growth_factor)
        self._backoff_factor = float(backoff_factor)
        self._growth_interval = int(growth_interval)
        self._growth_tracker = 0
        self._enabled = bool(enabled)
        self._unscaled: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def scale(self, outputs: Any) -> Any:
        """The loss, or a list or tuple of losses, times the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale
        return type(outputs)(self.scale(item) for item in outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, once per step; call it before clipping.

        Collective: one message on the control group of the model. Every rank must call it.
        """
        if not self._enabled:
            return
        if (updates := getattr(optimizer, "updates_in_backward", None)) is not None:
            raise updates.refusal("LossScaler", "")
        if optimizer in self._unscaled:
            raise GradientError(
                "unscale_() was called twice for this optimizer since the last update()",
                cure="call it once per step",
            )
        finite: dict[torch.device, list[torch.Tensor]] = {}
        groups: dict[int, Groups] = {}
        with engine_access(), torch.no_grad():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                info = info_of(parameter)
                if info is not None:
                    groups[id(info.flat.groups.whole)] = info.flat.groups
                gradient = parameter.grad
                if gradient is None:
                    continue
                if info is not None and info.flat.gradient is not None:
                    info.flat.gradient.refuse_pending()
                    gradient = parameter.grad
                    if gradient is None:
                        continue
                gradient.mul_(1.0 / self._scale)
                finite.setdefault(gradient.device, []).append(torch.isfinite(gradient).all())
        found = any(not bool(torch.stack(flags).all()) for flags in finite.values())  # one wait per device
        for shared in groups.values():
            merged = exchange(shared, OVERFLOW, 0, bytes([found]), Waiting("", "agreement on overflow", 0))
            if merged is None:
                raise RankMismatchError(
                    "not every rank is in LossScaler.unscale_ or step",
                    rank=shared.rank,
                    cure="call the scaler on every rank, at the same point of the step",
                )
            found = bool(merged[0])
        self._unscaled[optimizer] = found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(...)``, unless any rank's gradients overflowed."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if optimizer not in self._unscaled:
            self.unscale_(optimizer)
        if self._unscaled[optimizer]:
            return None
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """After the step: shrink the scale if it overflowed, grow it if it has not for a while."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not len(self._unscaled):
            raise GradientError("update() without a step: nothing was unscaled since the last update()")
        elif any(self._unscaled.values()):
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._unscaled.clear()

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = float(new_factor)

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = float(new_factor)

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._growth_interval = int(new_interval)

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for ``extra`` of a checkpoint."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._enabled:
            return
        self._scale = float(state_dict["scale"])
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        self._growth_tracker = int(state_dict["_growth_tracker"])
