"""How a model is wrapped and looped over, as far as a plan depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from ..stage import Stage

__all__ = ["Setup"]


@dataclass(frozen=True)
class Setup:
    """How a model is wrapped, and the loop around it.

    Attributes:
        stage: ZeRO stage.
        shard_size, replicate_size: Ranks that share one replica, and replicas.
        prefetch, reshard_after_forward: As for ``fsdp_wrap``.
        on_cpu: gloo on CPU, where the host waits for reductions.
        transport_copies: The transport sums in a copy of its own, as gloo does.
        shards_on_host: Shards of parameters and gradients rest in host memory, beside a device.
        shards_apart: They rest in buffers of their own in the memory of the CPU that computes.
        agrees_on_updates: After an update the ranks tell one another whether it went well, as with state in files.
        microbatches: Backwards per step.
        no_sync: All but the last of them run without synchronisation.
    """

    stage: Stage
    shard_size: int
    replicate_size: int = 1
    prefetch: int = 1
    reshard_after_forward: bool | None = None
    on_cpu: bool = False
    transport_copies: bool = False
    shards_on_host: bool = False
    shards_apart: bool = False
    agrees_on_updates: bool = False
    microbatches: int = 1
    no_sync: bool = False

    @property
    def size(self) -> int:
        return self.shard_size * self.replicate_size
