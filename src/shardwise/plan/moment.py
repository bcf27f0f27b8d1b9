"""One moment of a step, and what a rank holds then besides what it always holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes besides parameters, optimizer state and the gradients of earlier micro-batches."""

    where: str
    """What runs then, in words."""

    name: str
    """`loss` or `backward` where the moment may be the peak."""

    gathered: float
    buffers: float
    activations: float
    loss: float = 0.0
    recompute: float = 0.0
    grads: float = 0.0
    """Shards of this micro-batch."""

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.gathered
            + self.buffers
            + self.activations
            + self.loss
            + self.recompute
            + self.grads
        )
