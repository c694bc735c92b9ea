"""Options that several commands take."""

from __future__ import annotations

from typing import Any

from .target import UsageError

__all__ = ["add_wrap_options", "parse_policy"]


def add_wrap_options(parser: Any) -> None:
    """How the model would be wrapped."""
    add = parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage (default 3)")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32",
        help="compute dtype; fp32 leaves the model's own dtypes (default fp32)")
    add("--policy", metavar="POLICY",
        help="units: by_class:Block,Other  by_name:blocks.*  by_size:1000  from_model, joined by | (default: one unit)")


def parse_policy(text: str | None, option: str = "--policy") -> Any:
    """``by_class:Block,Other``, ``by_name:blocks.*``, ``by_size:1000``, ``from_model``, joined by ``|``.

    Raises:
        UsageError: The text has another form.
    """
    if text is None:
        return None
    from .. import policy as policies

    combined = None
    for part in text.split("|"):
        kind, _, rest = part.strip().partition(":")
        entries = [entry.strip() for entry in rest.split(",") if entry.strip()]
        if kind in ("by_class", "by_name") and entries:
            made = getattr(policies, kind)(*entries)
        elif kind == "by_size" and len(entries) == 1 and entries[0].replace("_", "").isdigit():
            made = policies.by_size(int(entries[0]))
        elif kind == "from_model" and not entries:
            made = policies.from_model()
        else:
            expected = "by_class:NAME,...  by_name:GLOB,...  by_size:NUMBER  from_model"
            raise UsageError(f"{option}: expected {expected}, joined by |, found '{part.strip()}'")
        combined = made if combined is None else combined | made
    return combined
