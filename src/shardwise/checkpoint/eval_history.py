"""What evaluations on the held-out split have found so far.

Needs no torch: it is part of a manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The last evaluation, the best one, and how many have passed since the loss fell."""

    step: int | None = None
    """The step of the last evaluation."""

    loss: float | None = None
    """Its loss; None where that was not finite."""

    best_step: int | None = None
    """The step with the lowest loss. Step 0 is not among them: it is the model that training began
    with."""

    best_loss: float | None = None
    reference: float | None = None
    """The loss when it last fell by enough, which the next ones are compared with."""

    without_gain: int = 0
    """Evaluations since then."""

    def after(self, step: int, loss: float, min_gain: float) -> HeldOut:
        """This and one more evaluation. A fall below the reference counts from `min_gain` on."""
        is_finite = math.isfinite(loss)
        best = (self.best_step, self.best_loss)
        if step > 0 and is_finite and (self.best_loss is None or loss < self.best_loss):
            best = (step, loss)
        gains = is_finite and (
            self.reference is None or (loss < self.reference and self.reference - loss >= min_gain)
        )
        return HeldOut(
            step=step,
            loss=loss if is_finite else None,
            best_step=best[0],
            best_loss=best[1],
            reference=loss if gains else self.reference,
            without_gain=0 if gains else self.without_gain + 1,
        )

    def is_best_at(self, step: int) -> bool:
        """Whether the weights of this step are the best so far."""
        return self.best_step == step


def held_out_of(data: Mapping[str, Any]) -> HeldOut:
    """What a manifest says. Raises ValueError, TypeError or KeyError where that is something
    else."""
    found = HeldOut(**data)
    for item in fields(HeldOut):
        value = getattr(found, item.name)
        is_step = item.name in ("step", "best_step", "without_gain")
        fits = type(value) is int and value >= 0 if is_step else _is_number(value)
        if not fits and (value is not None or item.name == "without_gain"):
            raise ValueError(f"held_out.{item.name} is {value!r}")
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
