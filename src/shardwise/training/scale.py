"""The factor of the loss before backward, so that fp16 gradients do not vanish.

bf16 and fp32 have the range, and their scale is one. fp16's scale falls when gradients overflow,
and rises when they have not for long. All ranks see the same gradient norm, so all have the same
scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.planned import Plan

# The values of torch.amp.GradScaler.
_FACTOR = 2.0
_RISES_AFTER = 2000
# At this scale an overflow comes from the gradient of the loss itself.
_LOWEST = 1.0


@dataclass(slots=True)
class LossScale:
    """The scale, and for how many updates it has held."""

    value: float = 1.0
    held: int = 0
    adapts: bool = False

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale may help against an overflow."""
        return self.adapts and self.value > _LOWEST

    def fall(self) -> None:
        """Note that gradients have overflowed."""
        self.value, self.held = max(_LOWEST, self.value / _FACTOR), 0

    def hold(self) -> None:
        """Note that they have not."""
        if not self.adapts:
            return
        self.held += 1
        if self.held == _RISES_AFTER:
            self.value, self.held = self.value * _FACTOR, 0

    def to_dict(self) -> dict[str, float] | None:
        """The state for a checkpoint; None where there is nothing to keep."""
        return {"scale": self.value, "held": self.held} if self.adapts else None

    def restore(self, saved: dict[str, float] | None) -> None:
        """Continue with a saved scale."""
        if saved is not None and self.adapts:
            self.value, self.held = saved["scale"], int(saved["held"])


def scale_of(plan: Plan) -> LossScale:
    """The scale that a run begins with."""
    if plan.decided.param_dtype != "fp16":
        return LossScale()
    return LossScale(plan.settings.precision.loss_scale, adapts=True)
