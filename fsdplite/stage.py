"""ZeRO stages as a table: what is sharded at rest.

The engine asks a row of this table and never compares stage numbers. Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["Stage", "stage_of"]


@dataclass(frozen=True)
class Stage:
    """One row of the table.

    Attributes:
        number: 0, 1, 2 or 3.
        shards_optimizer: Each rank holds, and updates, 1/N of the masters and of the optimizer state.
        shards_gradients: A unit's full gradient is given back as soon as it is reduced. Where False, full
            gradients may all live until the backward ends, so that no reduction waits for another.
        shards_parameters: Full parameters exist only while a unit computes.
    """

    number: int
    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool


_STAGES = (
    Stage(0, False, False, False),
    Stage(1, True, False, False),
    Stage(2, True, True, False),
    Stage(3, True, True, True),
)


def stage_of(number: int) -> Stage:
    """The row for a stage number; ``ConfigError`` for anything but 0, 1, 2, 3."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 3:
        raise ConfigError(
            "there is no such ZeRO stage",
            expected="0 (replicate), 1 (shard optimizer state), 2 (and gradients) or 3 (and parameters)",
            found=repr(number),
        )
    return _STAGES[number]
