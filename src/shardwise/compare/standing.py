"""Published runs beside what was expected of them, and the band that such expectations hold in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from shardwise.compare.profiles import PROFILES, Profiles, predict, stack_of
from shardwise.compare.published_rows import PUBLISHED, PublishedRun, SkippedRow, read_table
from shardwise.facts.flops import flops_per_token
from shardwise.facts.gpus import GpuSpec
from shardwise.facts.models import ModelSpec

GENERIC = "other stacks"
# Nine of ten published runs of a kind are inside of its band.
_WITHIN = 0.9
# A kind with fewer runs takes the band of its stack, and a stack with fewer the band of all.
_FEWEST = 8
_FEW_ALIKE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A published run and what was expected of it by numbers that have not seen it."""

    run: PublishedRun
    stack: str
    expected: float

    @property
    def ratio(self) -> float:
        """Published over expected."""
        return self.run.published / self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBand:
    """How far runs of a kind are from what is expected of them."""

    factor: float
    """Nine of ten are at most this many times faster or slower."""

    runs: int
    words: str
    """Which runs these are."""

    def around(self, expected: float) -> tuple[float, float]:
        """The least and the most that such a run reaches."""
        return expected / self.factor, expected * self.factor

    def holds(self, ratio: float) -> bool:
        """Whether measured over expected is inside."""
        return abs(log(ratio)) <= log(self.factor)


@dataclass(frozen=True, slots=True)
class Published:
    """All published runs, and those rows that are none."""

    peers: tuple[Peer, ...]
    skipped: tuple[SkippedRow, ...]

    def kind_of(self, stack: str, *, split: bool) -> tuple[list[Peer], str]:
        """Runs of a stack that share blocks between ranks, or do not; of the whole stack where
        these are few; of all where it has few itself."""
        sound = [peer for peer in self.peers if not peer.run.doubted]
        own = [peer for peer in sound if peer.stack == stack]
        alike = [peer for peer in own if splits_blocks(peer.run) == split]
        how = "with" if split else "without"
        if len(alike) >= _FEWEST:
            return alike, f"{stack} {how} tensor, context, expert or pipeline parallelism"
        if len(own) >= _FEWEST:
            return own, stack
        return sound, "all stacks"

    def band_of(self, stack: str, *, split: bool, without: PublishedRun | None = None) -> SpeedBand:
        """Where such runs are, seen without one of them."""
        kind, words = self.kind_of(stack, split=split)
        others = [peer for peer in kind if peer.run is not without]
        sizes = sorted(abs(log(peer.ratio)) for peer in others)
        return SpeedBand(factor=exp(_quantile(sizes, _WITHIN)), runs=len(others), words=words)

    def verdict_of(self, peer: Peer) -> str:
        """What is said of a published run by the band of the others."""
        band = self.band_of(peer.stack, split=splits_blocks(peer.run), without=peer.run)
        if peer.run.doubted:
            return "doubtful"
        return verdict(peer.ratio, band)

    def nearest(self, likeness: Likeness, number: int = 3) -> list[Peer]:
        """The published runs that are most like a run."""
        return sorted(self.peers, key=lambda peer: likeness.distance(peer))[:number]

    def alike(self, likeness: Likeness) -> tuple[list[Peer], str]:
        """Published runs of that kind on the same GPU, or on any where these are few. Mixtures of
        experts, float8 and frozen weights are kinds of their own: MFU says other things of them."""
        same = [peer for peer in self.peers if not peer.run.doubted and likeness.is_kind(peer)]
        here = [peer for peer in same if peer.run.gpu.name == likeness.gpu]
        if len(here) >= _FEW_ALIKE:
            return here, f"{likeness.kind} on {likeness.gpu}"
        if len(same) >= _FEW_ALIKE:
            return same, f"{likeness.kind} on any GPU"
        return [peer for peer in self.peers if not peer.run.doubted], "any kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """What of a run makes it like a published one."""

    model: ModelSpec
    seq_len: int
    gpu: str
    stack: str
    frozen: bool
    float8: bool

    @property
    def is_mixture(self) -> bool:
        """Whether it has experts."""
        return _is_mixture(self.model)

    @property
    def kind(self) -> str:
        """What runs are compared with it, in words."""
        models = "mixtures of experts" if self.is_mixture else "dense models"
        frozen = " with frozen weights" if self.frozen else ""
        return f"{models} in {'8' if self.float8 else '16'} bits{frozen}"

    def is_kind(self, peer: Peer) -> bool:
        """Whether a run is of that kind."""
        other = peer.run
        return (
            _is_mixture(other.model) == self.is_mixture
            and other.traits.frozen == self.frozen
            and (other.decided.linear != "param") == self.float8
        )

    def distance(self, peer: Peer) -> float:
        """How unlike it is: half as many parameters count as much as half the sequence."""
        other = peer.run
        return (
            abs(log(other.model.total_params / self.model.total_params))
            + abs(log(other.decided.seq_len / self.seq_len))
            + 1.0 * (other.gpu.name != self.gpu)
            + 1.0 * (peer.stack != self.stack)
            + 2.0 * (_is_mixture(other.model) != self.is_mixture)
            + 2.0 * (other.traits.frozen != self.frozen)
        )


def mfu_of(model: ModelSpec, seq_len: int, tokens_per_s: float, gpu: GpuSpec) -> float:
    """Model FLOPs over the peak in 16 bits, for runs in any format."""
    peak = max(gpu.peak_flops.get("bf16", 0.0), gpu.peak_flops["fp16"])
    return flops_per_token(model, seq_len) * tokens_per_s / peak


def _is_mixture(model: ModelSpec) -> bool:
    return model.num_experts > 1


def verdict(ratio: float, band: SpeedBand) -> str:
    """In words, where a run is."""
    if band.holds(ratio):
        return "as expected"
    return "slower than expected" if ratio < 1 else "faster than expected"


def read_published() -> Published:
    """The table that comes with the package."""
    table, profiles = read_table(PUBLISHED), Profiles.load(PROFILES)
    peers = []
    for run in table.runs:
        calibrated, stack = profiles.calibrated(run), stack_of(run.source)
        expected, _ = predict(run, calibrated or profiles.unseen(run))
        name = stack.name if stack is not None else GENERIC
        peers.append(Peer(run=run, stack=name, expected=expected))
    return Published(tuple(peers), tuple(table.skipped))


def splits_blocks(run: PublishedRun) -> bool:
    """Whether ranks share blocks, or the layers of a model."""
    decided = run.decided
    return max(decided.tensor, decided.context, decided.expert, decided.pipeline) > 1


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
