"""What an expectation is asked about: a model, a layout, the devices and the software."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.collective_cost import Fabric
from shardwise.facts.models import ModelSpec
from shardwise.facts.rates import Rates
from shardwise.plan.decisions import Decisions
from shardwise.plan.software import Software
from shardwise.plan.time import TimeEstimate, estimate_time


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedQuestion:
    """How fast is this?"""

    model: ModelSpec
    fabric: Fabric
    decided: Decisions
    rates: Rates
    software: Software

    def estimate(self) -> TimeEstimate:
        """Where a step goes."""
        return estimate_time(self.model, self.fabric, self.decided, self.rates, self.software)

    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens_of_device() / self.estimate().total

    def tokens_of_device(self) -> float:
        """What one device adds to a step's tokens."""
        decided = self.decided
        return decided.tokens * decided.accumulation / (decided.tensor * decided.pipeline)
