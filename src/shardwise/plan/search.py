"""Compare every candidate: whether it fits, how fast it is, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from shardwise.config.schema import WITH_REFERENCE
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.facts.prices import Price
from shardwise.facts.rates import Rates
from shardwise.plan.axis_sizes import InnerAxes
from shardwise.plan.candidates import Candidate
from shardwise.plan.decisions import Decisions
from shardwise.plan.known_memory import KnownMemory
from shardwise.plan.planned import Alternative, Forecast, MemoryEstimate
from shardwise.plan.software import software_of
from shardwise.plan.stage_recompute import ALIKE, RECOMPUTE_MODES
from shardwise.plan.time import estimate_time, forward_seconds, speed_of
from shardwise.units import format_bytes

# The upper estimate must stay under this share of the device's memory: above it the allocator
# retries.
HEADROOM = 0.95
# An earlier answer of the decision tree stands until a later one is faster by this. Forecasts of
# one model on one cluster err against each other by about as much.
STANDS_UNTIL = 0.01
# An axis along which ranks share work stays at one rank until it gains this much. It adds
# collectives that nothing hides, and its forecasts are less exact: published runs with such axes
# are off by twice as much as others.
AXIS_GAIN = 0.05
# On one mesh, speeds closer than this are equal: the least recompute and memory decide.
EQUAL = 0.005


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate with all decisions, its memory and its speed."""

    candidate: Candidate
    decided: Decisions
    rank: int
    """Place of its mesh in the decision tree."""

    memory: MemoryEstimate
    forecast: Forecast | None

    @property
    def speed(self) -> float:
        """Tokens per second of one device; 0 where no rates are known."""
        return self.forecast.tokens_per_s if self.forecast else 0.0

    @property
    def standing(self) -> float:
        """The speed by which it is chosen."""
        decided = self.decided
        axes = InnerAxes(decided.tensor, decided.context, decided.expert, decided.pipeline)
        return self.speed / (1 + AXIS_GAIN) ** axes.num_used

    @property
    def label(self) -> str:
        """Its decisions in a few words."""
        decided = self.decided
        mode = decided.checkpoint_activations
        recompute = f"recompute {mode:.0%}" if isinstance(mode, float) else f"recompute {mode}"
        if decided.pipeline_recompute != ALIKE:
            recompute = f"recompute by stage, {recompute.removeprefix('recompute ')} at most"
        passes = f" x {decided.accumulation}" if decided.accumulation > 1 else ""
        kept = ", whole gradients kept" if decided.accumulates_unsharded else ""
        strategy = decided.strategy
        if strategy == "hybrid_shard" and decided.keeps_gathered:
            strategy = "hybrid_shard (parameters kept)"
        more = ("pipeline", "context", "tensor", "expert")
        axes = "".join(f", {name} {n}" for name in more if (n := getattr(decided, name)) > 1)
        return (
            f"{strategy} {decided.replicate} x {decided.shard}{axes}, {recompute}, micro-batch "
            f"{decided.micro_batch}{passes}{kept}"
        )


@dataclass(frozen=True, slots=True)
class Appraiser:
    """Looks at decisions about one model on one cluster."""

    model: ModelSpec
    cluster: ClusterSpec
    rates: Rates | None
    price: Price | None
    known: KnownMemory

    def fits(self, decided: Decisions) -> bool:
        """Whether they leave the headroom that a steady run needs."""
        return fits(self.memory_of(decided), self.cluster)

    def memory_of(self, decided: Decisions) -> MemoryEstimate:
        """What they take at the peak."""
        return self.known.of(decided)

    def look_at(self, candidate: Candidate, rank: int, decided: Decisions) -> Option:
        """Memory, and where it fits the speed."""
        memory = self.memory_of(decided)
        option = Option(candidate, decided, rank, memory, None)
        return self.with_forecast(option) if fits(memory, self.cluster) else option

    def with_forecast(self, option: Option) -> Option:
        """The same with its speed, where rates are known."""
        if self.rates is None or option.forecast is not None:
            return option
        foreseen = foresee(self.model, self.cluster, option.decided, self.rates, self.price)
        return replace(option, forecast=foreseen)


def foresee(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions, rates: Rates, price: Price | None
) -> Forecast:
    """The expected speed of one set of decisions."""
    fabric = cluster.fabric
    software = software_of(cluster.device, model, decided)
    estimate = estimate_time(model, fabric, decided, rates, software)
    peak = cluster.peak_flops(decided.param_dtype)
    speed = speed_of(estimate, model, fabric, decided, rates, peak, software)
    hours = 1e9 / (speed.tokens_per_s * cluster.world_size) / 3600
    return Forecast(
        step_s=speed.step_s,
        terms={item.name: getattr(estimate, item.name) for item in fields(estimate)},
        tokens_per_s=speed.tokens_per_s,
        mfu=speed.mfu,
        hfu=speed.hfu,
        tokens_to_hide=speed.tokens_to_hide,
        usd_per_billion_tokens=None if price is None else price.usd_per_hour * hours,
        hours_per_billion_tokens=hours,
        source=rates.source,
        price_source=None if price is None else price.source,
        reference_s=(1 + decided.kl_term) * forward_seconds(model, fabric, decided, rates, software)
        if decided.objective in WITH_REFERENCE
        else None,
    )


def fits(memory: MemoryEstimate, cluster: ClusterSpec) -> bool:
    """Whether it leaves the headroom that a steady run needs."""
    return memory.high <= HEADROOM * cluster.memory_bytes


def best_of(options: list[Option], cluster: ClusterSpec) -> Option:
    """The fastest that fits. Without rates it is the first that fits, and without a fit the
    smallest."""
    fitting = [option for option in options if fits(option.memory, cluster)]
    if not fitting:
        # Where gradients are the peak, the batch does not change the total.
        return min(options, key=lambda option: (option.memory.total, option.memory.activations))
    best = max(option.standing for option in fitting)
    if best == 0.0:
        return fitting[0]
    rank = min(option.rank for option in fitting if option.standing * (1 + STANDS_UNTIL) >= best)
    on_mesh = [option for option in fitting if option.rank == rank]
    limit = (1 - EQUAL) * max(option.speed for option in on_mesh)
    return min((option for option in on_mesh if option.speed >= limit), key=_preference)


def alternatives(best: Option, options: list[Option], appraiser: Appraiser) -> list[Alternative]:
    """The best of every other mesh and of every other way to recompute, and why each lost."""
    cluster = appraiser.cluster
    kinds: dict[tuple[int, str | float, bool], list[Option]] = {}
    for option in options:
        kinds.setdefault(_kind(option), []).append(option)
    others = [_champion(group, cluster) for kind, group in kinds.items() if kind != _kind(best)]
    others.sort(key=lambda option: _merit(option, cluster), reverse=True)
    return [
        Alternative(
            label=option.label,
            tokens_per_s=option.speed or None,
            memory_bytes=option.memory.total,
            why_not=why_not(option, best, cluster),
        )
        for option in map(appraiser.with_forecast, others)
    ]


def _champion(group: list[Option], cluster: ClusterSpec) -> Option:
    return max(group, key=lambda option: _merit(option, cluster))


def _merit(option: Option, cluster: ClusterSpec) -> tuple[bool, float, int]:
    """The order of options: those that fit by speed, the others by how little memory they lack."""
    fitting = fits(option.memory, cluster)
    return fitting, option.speed if fitting else 0.0, -option.memory.total


def _preference(option: Option) -> tuple[int, int]:
    mode = option.decided.checkpoint_activations
    recompute = RECOMPUTE_MODES.index(mode) if mode in RECOMPUTE_MODES else 0
    return recompute, option.memory.total


def _kind(option: Option) -> tuple[int, str | float, bool]:
    decided = option.decided
    return option.rank, decided.checkpoint_activations, decided.pipeline_recompute == ALIKE


def why_not(option: Option, best: Option, cluster: ClusterSpec) -> str:
    """Why an option lost."""
    if not fits(option.memory, cluster):
        needed = format_bytes(option.memory.total)
        return f"{needed} of {format_bytes(cluster.memory_bytes)} leaves too little room"
    if option.forecast is None or best.forecast is None:
        return "comes later in the decision tree"
    loss = 1 - option.speed / best.speed
    more_axes = option.standing / option.speed < best.standing / best.speed
    if loss < 0 and more_axes:
        return f"{-loss:.1%} faster: an axis more has to gain {AXIS_GAIN:.0%}"
    if abs(loss) < EQUAL:
        return f"as fast, within {EQUAL:.1%}"
    if loss < 0:
        return f"{-loss:.0%} faster: too little to replace the decision tree's answer"
    return f"{loss:.0%} slower: {_cause(option.forecast, best.forecast)}"


def _cause(slower: Forecast, faster: Forecast) -> str:
    """The term that grows most, for the same number of tokens."""
    scale = faster.tokens_per_s * faster.step_s / (slower.tokens_per_s * slower.step_s)
    extra = {name: s * scale - faster.terms[name] for name, s in slower.terms.items()}
    name = max(extra, key=lambda term: extra[term])
    return f"{name.replace('_', ' ')} +{extra[name] / faster.step_s:.0%} of the step"
