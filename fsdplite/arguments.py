"""Arguments in another order, or of another kind, become errors that show the form of the call."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import ConfigError

__all__ = ["expect_module"]


def expect_module(value: Any, form: str) -> None:
    """Refuse what is no module, with the form of the call: ``fsdp.load_checkpoint(root, model, optimizer)``."""
    if not isinstance(value, nn.Module):
        name = form.partition("(")[0]
        found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ConfigError(
            f"{name} takes a module here", expected="an nn.Module", found=found, cure=f"write {form}"
        )
