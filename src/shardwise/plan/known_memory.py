"""Estimates of memory that were made already, for searches that ask for the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Decisions
from shardwise.plan.memory import estimate_memory
from shardwise.plan.planned import MemoryEstimate
from shardwise.plan.stage_memory import FormMemory, RankPart
from shardwise.plan.stage_recompute import ALIKE


@dataclass(frozen=True, slots=True)
class KnownMemory:
    """The memory of one model on so many GPUs or ranks on CPUs, whatever their kind. A search asks
    for each estimate about twice, and for those of single ranks of a pipeline more often."""

    model: ModelSpec
    cluster: ClusterSpec
    _known: dict[Decisions, MemoryEstimate] = field(default_factory=dict, repr=False)
    _forms: dict[Decisions, FormMemory] = field(default_factory=dict, repr=False)
    _parts: dict[RankPart, ModelSpec] = field(default_factory=dict, repr=False)

    def of(self, decided: Decisions) -> MemoryEstimate:
        """Of the rank that needs most, at its peak."""
        if decided not in self._known:
            self._known[decided] = self._estimate(decided)
        return self._known[decided]

    def of_form(self, decided: Decisions) -> FormMemory:
        """Of the ranks of a pipeline, whatever blocks they have and however they recompute them."""
        form = replace(
            decided, pipeline_blocks=ALIKE, pipeline_recompute=ALIKE, checkpoint_activations="none"
        )
        if form not in self._forms:
            self._forms[form] = FormMemory(self.model, self.cluster, form, self._parts)
        return self._forms[form]

    def _estimate(self, decided: Decisions) -> MemoryEstimate:
        if decided.pipeline == 1:
            return estimate_memory(self.model, self.cluster, decided)
        ranks = self.of_form(decided).of_ranks(decided)
        return max(ranks, key=lambda each: each.total)
