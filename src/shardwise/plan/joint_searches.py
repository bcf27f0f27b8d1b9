"""The searches around a plan: with other settings and on other devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.config.schema import RunConfig
from shardwise.facts.calibration import rates_for, with_measured_links
from shardwise.facts.cluster import ClusterSpec
from shardwise.plan.known_memory import KnownMemory
from shardwise.plan.planned import Plan
from shardwise.plan.searched import Searched, search_options


@dataclass(frozen=True, slots=True)
class JointSearches:
    """What searches around a plan have in common: none is made twice, and those for as many devices
    share their estimates of memory, which does not depend on the kind of a device."""

    plan: Plan
    _known: dict[int, KnownMemory] = field(default_factory=dict, repr=False)
    _made: list[tuple[RunConfig, ClusterSpec, Searched]] = field(default_factory=list, repr=False)

    def search(self, config: RunConfig, cluster: ClusterSpec) -> Searched:
        """All options for the plan's model with another configuration or on other devices."""
        linked, plan = with_measured_links(cluster), self.plan
        for asked, place, searched in self._made:
            if (asked, place) == (config, linked):
                return searched
        known = self._known.setdefault(linked.world_size, KnownMemory(plan.model, linked))
        rates = rates_for(linked)
        searched = search_options(config, plan.model, plan.hf_config, linked, rates, known)
        self._made.append((config, linked, searched))
        return searched
