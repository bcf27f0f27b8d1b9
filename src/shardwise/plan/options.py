"""Every option that is worth a look: first without axes that ranks share work along, then with
them.

A mesh of replicas and shards alone is looked at in all its variants. Other axes multiply the
meshes, so there only the first meshes that fit are looked at, with the largest micro-batches that
fit. More than one such axis, or a context axis, is tried only where nothing fits without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.axis_rules import Question, axes_error
from shardwise.plan.axis_sizes import InnerAxes, given_axes
from shardwise.plan.candidates import (
    Candidate,
    StepForm,
    leanest_forms,
    mesh_candidates,
    on_mesh,
    step_forms,
)
from shardwise.plan.decisions import Choices, Decisions
from shardwise.plan.rank_share import num_expert_shards
from shardwise.plan.search import Appraiser, Option, fits
from shardwise.plan.stage_balance import LeastOn, evened, work_of
from shardwise.plan.stage_cuts import blocks_of_ranks
from shardwise.plan.stage_recompute import (
    RECOMPUTE_MODES,
    RecomputeMode,
    least_that,
    modes_of,
    with_modes,
)

# Of the decision tree's meshes with other axes, so many that fit: the first, and one that shards
# over more ranks or keeps its parameters.
_MESHES = 2
# Experts are not dealt out over more domains: each token would cross more links for no less memory.
_MOST_DOMAINS = 8
# Larger micro-batches gain little, and the memory of a few is enough to know which fit.
_LARGEST = 2


@dataclass(frozen=True, slots=True)
class Search:
    """What is searched: all that the user left open for one model on one cluster."""

    config: RunConfig
    model: ModelSpec
    hf_config: Mapping[str, Any]
    cluster: ClusterSpec

    def find_options(self, basis: Choices, appraiser: Appraiser) -> list[Option]:
        """All options, in the order of the decision tree."""
        found: list[Option] = []
        given = mesh_candidates(self.config, self.cluster, given_axes(self.config.mesh))
        for rank, candidate in enumerate(given):
            found += self._options_of(candidate, rank, basis, appraiser)
        alone, together = self._other_axes()
        for axes in alone:
            found += self._options_with(axes, len(found), basis, appraiser)
        if not any(fits(option.memory, self.cluster) for option in found):
            for axes in together:
                found += self._options_with(axes, len(found), basis, appraiser)
        return found

    def all_candidates(self) -> Iterator[Candidate]:
        """Every mesh that the search may come to."""
        yield from mesh_candidates(self.config, self.cluster, given_axes(self.config.mesh))
        alone, together = self._other_axes()
        for axes in (*alone, *together):
            yield from self._meshes_with(axes)

    def _other_axes(self) -> tuple[list[InnerAxes], list[InnerAxes]]:
        """One axis alone, which is always tried; and split sequences or several axes, which are
        tried where nothing else fits, the fewest ranks that share work first. Stages are given, so
        an axis beside them counts as alone."""
        legal = list(self._legal())
        alone = [
            axes for axes in legal if replace(axes, pipeline=1).num_used == 1 and axes.context == 1
        ]
        together = [axes for axes in legal if axes not in alone]
        together.sort(key=lambda axes: (axes.num_used, axes.ranks, axes.expert))
        return alone, together

    def _legal(self) -> Iterator[InnerAxes]:
        """The sizes that no rule refuses, where the user leaves the mesh to the planner. CPUs have
        no links that would make them worth it."""
        mesh, world, domain = self.config.mesh, self.cluster.world_size, self.cluster.nvlink_domain
        given = given_axes(mesh)
        left_open = (self.config.shard.strategy, mesh.replicate, mesh.shard) == ("auto",) * 3
        if not left_open or self.cluster.device != "cuda":
            return
        furthest = min(world, self.model.num_experts, _MOST_DOMAINS * domain)
        for tensor in _sizes(mesh.tensor, self._fast_ranks):
            for context in _sizes(mesh.context, world):
                for expert in _sizes(mesh.expert, furthest):
                    axes = InnerAxes(tensor, context, expert, given.pipeline)
                    asked = Question(axes, self.config, self.model, self.hf_config, world)
                    if axes != given and axes_error(asked) is None:
                        yield axes

    @property
    def _fast_ranks(self) -> int:
        """Ranks that NVLink joins; one where cards have none."""
        gpu, domain = self.cluster.gpu, self.cluster.nvlink_domain
        return domain if gpu is None else min(domain, gpu.nvlink_domain)

    def _meshes_with(self, axes: InnerAxes) -> list[Candidate]:
        """The decision tree's meshes; none where all its copies are too small for the experts."""
        try:
            return mesh_candidates(self.config, self.cluster, axes)
        except UserError:
            return []

    def _options_with(
        self, axes: InnerAxes, rank: int, basis: Choices, appraiser: Appraiser
    ) -> list[Option]:
        """The best that the decision tree's meshes make of some axes."""
        found: list[Option] = []
        fitting = 0
        for number, candidate in enumerate(self._meshes_with(axes)):
            try:
                options = self._options_of(
                    candidate, rank + number, basis, appraiser, most=_LARGEST
                )
            except UserError:
                return []  # the batch does not divide over the ranks that read
            found += options
            fitting += any(fits(option.memory, self.cluster) for option in options)
            if fitting == _MESHES:
                break
        return found

    def _options_of(
        self,
        candidate: Candidate,
        rank: int,
        basis: Choices,
        appraiser: Appraiser,
        most: int | None = None,
    ) -> list[Option]:
        """For every way to recompute and to accumulate the micro-batches that fit, at `most` so
        many of the largest, or else the smallest one."""
        where = (self.config, self.cluster, candidate)
        decided = on_mesh(self.config, self.model, basis, candidate)
        least = [form.of(decided) for form in leanest_forms(*where)]
        if not any(map(appraiser.fits, least)):
            roomier = [each for each in self._with_room(least, appraiser) if appraiser.fits(each)]
            looked = [*least, *roomier, *self._by_stage(roomier, appraiser)]
            return [appraiser.look_at(candidate, rank, each) for each in dict.fromkeys(looked)]
        # Only the forms that are looked at become decisions, which have sixty fields.
        made = cache(lambda form: form.of(decided))
        kept: list[tuple[int, StepForm]] = []
        for _, group in groupby(sorted(enumerate(step_forms(*where)), key=_way), key=_way):
            sizes = sorted(group, key=lambda each: each[1].micro_batch)
            # Memory grows with the micro-batch.
            fitting = sizes[
                : bisect_left(sizes, True, key=lambda each: not appraiser.fits(made(each[1])))
            ]
            kept += (fitting if most is None else fitting[-most:]) or sizes[:1]
        kept.sort(key=lambda each: each[0])
        decisions = [made(form) for _, form in kept]
        decisions = [*dict.fromkeys((*decisions, *self._by_stage(decisions, appraiser)))]
        options = [appraiser.look_at(candidate, rank, each) for each in decisions]
        if not self._may_keep_experts(decided):
            return options
        keeping = (replace(each.decided, keeps_experts=True) for each in options)
        return options + [
            appraiser.look_at(candidate, rank, each) for each in keeping if appraiser.fits(each)
        ]

    def _with_room(self, looked: list[Decisions], appraiser: Appraiser) -> Iterator[Decisions]:
        """The same with blocks moved from the fullest ranks of a pipeline to the emptiest."""
        if self.config.mesh.pipeline_blocks == "auto":
            yield from (_roomier(each, appraiser) for each in looked if each.pipeline > 1)

    def _by_stage(self, looked: list[Decisions], appraiser: Appraiser) -> Iterator[Decisions]:
        """Of the forms with most recompute: each rank of the pipeline with the least that it
        needs, and blocks moved to ranks that recompute less."""
        memory, mesh = self.config.memory, self.config.mesh
        if (memory.checkpoint_activations, mesh.pipeline_recompute) != ("auto", "auto"):
            return
        for decided in looked:
            if decided.pipeline == 1 or decided.checkpoint_activations != RECOMPUTE_MODES[-1]:
                continue
            least = _least_on_ranks(decided, appraiser)
            cuts = [decided]
            if mesh.pipeline_blocks == "auto":
                cuts.append(evened(decided, work_of(self.model, decided, least)))
            for cut in cuts:
                modes = [least(rank, blocks) for rank, blocks in enumerate(blocks_of_ranks(cut))]
                found = [mode for mode in modes if mode is not None]
                if len(found) == len(modes):
                    yield with_modes(cut, found)

    def _may_keep_experts(self, decided: Decisions) -> bool:
        """Whether it is open, and would spare an all-gather."""
        is_open = self.config.shard.keep_experts == "auto" and decided.pipeline == 1
        gathers = decided.expert > 1 and num_expert_shards(decided) > 1
        return is_open and gathers and not decided.keeps_gathered and not decided.offload


def _sizes(given: int | str, most: int) -> list[int]:
    """The size that the user gave, or powers of two."""
    if given != "auto":
        return [int(given)]
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def _roomier(decided: Decisions, appraiser: Appraiser) -> Decisions:
    memory, modes = appraiser.known.of_form(decided), modes_of(decided)
    return evened(decided, lambda rank, blocks: memory.of_rank(rank, blocks, modes[rank]).total)


def _least_on_ranks(decided: Decisions, appraiser: Appraiser) -> LeastOn:
    """What finds the least recompute that fits on a rank with so many blocks."""
    memory, most = appraiser.known.of_form(decided), decided.checkpoint_activations

    @cache
    def least(rank: int, blocks: int) -> RecomputeMode | None:
        return least_that(
            lambda mode: fits(memory.of_rank(rank, blocks, mode), appraiser.cluster), most
        )

    return least


def _way(numbered: tuple[int, StepForm]) -> tuple[str, str, bool]:
    _, form = numbered
    return str(form.recompute), form.accumulate, form.accumulation > 1
