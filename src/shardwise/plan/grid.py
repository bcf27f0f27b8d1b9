"""What a plan becomes with other sequences, micro-batches, recompute and devices: all of it
beforehand, by the planner itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.calibration import with_measured_links
from shardwise.facts.cluster import ClusterSpec
from shardwise.plan.axis_sizes import given_axes
from shardwise.plan.batch import MAX_AUTO_TOKENS
from shardwise.plan.candidates import Candidate, mesh_candidates, variants
from shardwise.plan.elsewhere import sizes_of
from shardwise.plan.joint_searches import JointSearches
from shardwise.plan.planned import Plan
from shardwise.plan.remedies import change_config
from shardwise.plan.search import Option, best_of, fits
from shardwise.plan.searched import Searched, over_sites
from shardwise.plan.stage_recompute import RECOMPUTE_MODES

_SHARES = (1 / 4, 1 / 2, 1, 2, 4)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_SHORTEST = 128  # tokens
_AXES = ("pipeline", "tensor", "context", "expert")


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of the values of four settings, and what the planner makes of it.

    The planner decides all else at each spot, but the axes along which ranks share work: those stay
    as the plan has them.
    """

    clusters: tuple[ClusterSpec, ...]
    seq_lens: tuple[int, ...]
    recompute: tuple[str | float, ...]
    micro_batches: tuple[int, ...]
    spots: tuple[Option | str, ...]
    """In the order of the settings above, the last varying fastest: the best option, or what takes
    least memory where nothing fits; or why there is none."""


def look_around(searches: JointSearches) -> Grid:
    """The grid around a plan, with the plan itself in it."""
    plan = searches.plan
    decided, limit = plan.decided, plan.model.max_positions
    clusters = tuple(sizes_of(plan, _SHARES))
    lengths = [int(decided.seq_len * share) for share in _SHARES]
    seq_lens = tuple(
        length
        for length in lengths
        if length == decided.seq_len or _SHORTEST <= length <= (limit or length)
    )
    own_mode = decided.checkpoint_activations
    recompute = RECOMPUTE_MODES + (() if own_mode in RECOMPUTE_MODES else (own_mode,))
    most = MAX_AUTO_TOKENS[plan.cluster.device] // min(seq_lens)
    sizes = {1, *(size for size in _MICRO_BATCHES if size <= most), decided.micro_batch}
    micro_batches = tuple(sorted(sizes))
    spots: list[Option | str] = []
    for cluster, seq_len in product(clusters, seq_lens):
        corner = _Corner(searches, with_measured_links(cluster), seq_len)
        spots += corner.options_for(recompute, micro_batches)
    return Grid(clusters, seq_lens, recompute, micro_batches, tuple(spots))


@dataclass(frozen=True, slots=True)
class _Corner:
    """One number of devices and one length of sequences."""

    searches: JointSearches
    cluster: ClusterSpec
    seq_len: int

    @property
    def plan(self) -> Plan:
        """What stands in the middle."""
        return self.searches.plan

    def options_for(
        self, recompute: tuple[str | float, ...], micro_batches: tuple[int, ...]
    ) -> Iterator[Option | str]:
        """One answer for each way to recompute and each micro-batch."""
        config = self._config()
        try:
            open_search = self.searches.search(config, self.cluster)
            candidates = mesh_candidates(config, self.cluster, given_axes(config.mesh))
        except UserError as error:
            # The batch does not divide over these devices, or the user gave another mesh.
            yield from [_reason(error)] * (len(recompute) * len(micro_batches))
            return
        leanest = max(candidates, key=lambda c: (c.mesh.shard, c.mesh.reshard_after_forward))
        fitting: dict[tuple[str | float, int], list[Option]] = {}
        for option in open_search.options:
            if fits(option.memory, self.cluster):
                key = (option.decided.checkpoint_activations, option.decided.micro_batch)
                fitting.setdefault(key, []).append(option)
        for mode, micro in product(recompute, micro_batches):
            found = fitting.get((mode, micro))
            if not found:
                yield self._settle(open_search, leanest, config, mode, micro)
                continue
            yield over_sites(best_of(found, self.cluster), config, self.plan.model)

    def _settle(
        self,
        searched: Searched,
        leanest: Candidate,
        config: RunConfig,
        mode: str | float,
        micro: int,
    ) -> Option | str:
        """What a given micro-batch needs at the least; where that fits, the best option."""
        most = MAX_AUTO_TOKENS[self.cluster.device]
        is_own = micro == self.plan.decided.micro_batch
        if micro != 1 and micro * self.seq_len > most and not is_own:
            return f"a micro-batch of more than {most:,} tokens gains no speed"
        given = {"memory.checkpoint_activations": mode, "train.micro_batch": micro}
        config = change_config(config, given)
        try:
            model = self.plan.model
            decisions = variants(config, model, self.cluster, searched.basis, leanest)
            looked = [searched.appraiser.look_at(leanest, 0, decided) for decided in decisions]
            least = min(looked, key=lambda option: option.memory.total)
            # The search passes over some that fit where it may choose.
            best = (
                self.searches.search(config, self.cluster).best
                if fits(least.memory, self.cluster)
                else least
            )
            return over_sites(best, config, model)
        except UserError as error:
            return _reason(error)

    def _config(self) -> RunConfig:
        """The plan's configuration with both settings left open, and its axes given."""
        axes = {f"mesh.{name}": getattr(self.plan.decided, name) for name in _AXES}
        opened = {"memory.checkpoint_activations": "auto", "train.micro_batch": "auto"}
        return change_config(self.plan.config, {"data.seq_len": self.seq_len, **axes, **opened})


def _reason(error: UserError) -> str:
    """What contradicts the settings of a spot. Anything else is an error here too."""
    if error.code != ExitCode.CONFIG:
        raise error
    return error.what
