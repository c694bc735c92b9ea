"""Bytes by what they are for, and the most there ever were in each phase of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BACKWARD_END", "BUFFERS", "COPIES", "FULL", "PHASES", "SHARDS", "UPDATE", "Memory", "Peak"]

FULL, BUFFERS, SHARDS, COPIES = "gathered parameters", "reduction buffers", "gradient shards", "transport copies"
UPDATE = "optimizer temporaries"

BACKWARD_END = "end of backward"
PHASES = ("forward", "backward", BACKWARD_END, "step")


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a phase.

    Attributes:
        bytes: All that is alive then.
        unit: Dotted name of the unit that runs then; ``""`` is the root.
        parts: Bytes by kind; they add up to ``bytes``.
    """

    bytes: int = 0
    unit: str = ""
    parts: dict[str, int] = field(default_factory=dict)


class Memory:
    """What the engine holds at a moment, by kind.

    Attributes:
        held: Bytes by kind.
        live: Bytes of activations and gradients that the model itself holds.
        phase, unit: Where the step is.
        peaks: The fullest moment of each phase.
        full_peak_bytes: Most bytes of gathered parameters at a time.
    """

    def __init__(self, resting: dict[str, int]) -> None:
        self.held = dict(resting)
        self.total = sum(resting.values())
        self.phase = PHASES[0]
        self.unit = ""
        self.live = 0
        self.peaks: dict[str, Peak] = {}
        self.full_peak_bytes = 0

    def add(self, kind: str, count: int) -> None:
        self.held[kind] = self.held.get(kind, 0) + count
        self.total += count

    def restart(self) -> None:
        """The next step is the one that counts."""
        self.peaks = {}
        self.full_peak_bytes = 0

    def grow(self, kind: str, count: int) -> None:
        """The engine allocates: a moment to look at."""
        self.add(kind, count)
        self.look(self.live)

    def look(self, activation_bytes: int) -> None:
        """Compare this moment with the fullest of its phase."""
        self.full_peak_bytes = max(self.full_peak_bytes, self.held.get(FULL, 0))
        total = self.total + activation_bytes
        best = self.peaks.get(self.phase)
        if best is None or total > best.bytes:
            parts = {kind: count for kind, count in self.held.items() if count}
            if activation_bytes:
                parts["activations"] = parts.get("activations", 0) + activation_bytes
            self.peaks[self.phase] = Peak(total, self.unit, parts)
