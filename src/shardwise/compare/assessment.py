"""Is this throughput right? What was expected, where the run stands, and why it may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.compare.faults import LikelyReason, likely_reasons
from shardwise.compare.profiles import PROFILES, Profiles, question_of, stack_of
from shardwise.compare.question import SpeedQuestion
from shardwise.compare.standing import (
    GENERIC,
    Likeness,
    Peer,
    Published,
    SpeedBand,
    mfu_of,
    read_published,
    splits_blocks,
    verdict,
)
from shardwise.compare.stated import StatedRun, read_stated
from shardwise.errors import UserError
from shardwise.facts.calibration import rates_for
from shardwise.facts.gpus import GpuSpec
from shardwise.metrics.verdict import SPEED_BAND
from shardwise.plan.planned import MemoryEstimate, Plan
from shardwise.plan.software import software_of

_OURS = "shardwise"
# From this share of what is expected on there is nothing to look for.
_NOTHING_MISSES = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAnswer:
    """All that is said of a throughput."""

    expected: float
    measured: float
    band: SpeedBand
    verdict: str
    mfu: float
    alike: tuple[float, ...]
    """The MFU of published runs of that kind."""

    kind: str

    nearest: tuple[Peer, ...]
    reasons: tuple[LikelyReason, ...]
    assumed: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Measured over expected."""
        return self.measured / self.expected

    @property
    def slower_ones(self) -> int:
        """Published runs of that kind with a lower MFU."""
        return sum(mfu < self.mfu for mfu in self.alike)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        low, high = self.band.around(self.expected)
        return {
            "expected": self.expected,
            "measured": self.measured,
            "low": low,
            "high": high,
            "band": self.band.words,
            "verdict": self.verdict,
            "mfu": self.mfu,
            "published_kind": self.kind,
            "published_alike": len(self.alike),
            "published_slower": self.slower_ones,
            "nearest": [
                {
                    "source": peer.run.source,
                    "run": peer.run.label,
                    "tokens_per_s": peer.run.published,
                    "expected": peer.expected,
                    "doubtful": peer.run.doubted,
                }
                for peer in self.nearest
            ],
            "reasons": [
                {
                    "title": reason.title,
                    "why": reason.why,
                    "check": reason.check,
                    "expected": reason.tokens_per_s,
                }
                for reason in self.reasons
            ],
            "assumed": list(self.assumed),
        }


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """What is said of a peak of memory, in bytes."""

    verdict: str
    measured: float
    low: float
    high: float


def answer_for_stack(stated: StatedRun) -> SpeedAnswer:
    """Of a run with another stack."""
    run, assumed = read_stated(stated)
    stack, profiles = stack_of(run.source), Profiles.load(PROFILES)
    parameters = profiles.calibrated(run) or profiles.unseen(run)
    name = GENERIC if stack is None else stack.name
    published = read_published()
    return _answer(
        question_of(run, parameters),
        published,
        measured=stated.tokens_per_s,
        gpu=run.gpu,
        band=published.band_of(name, split=splits_blocks(run)),
        likeness=Likeness(
            model=run.model,
            seq_len=stated.seq_len,
            gpu=run.gpu.name,
            stack=name,
            frozen=run.traits.frozen,
            float8=run.decided.linear != "param",
        ),
        assumed=tuple(assumed),
    )


def answer_for_plan(plan: Plan, tokens_per_s: float) -> SpeedAnswer:
    """Of a run of ours."""
    gpu, rates = plan.cluster.gpu, rates_for(plan.cluster)
    if plan.forecast is None or rates is None or gpu is None:
        raise UserError(
            f"nothing is expected of {plan.cluster.device_in_words}",
            why="published runs are of GPUs, and no rates are known here",
            fix="name GPUs: --cluster 8xH100",
        )
    decided = plan.decided
    question = SpeedQuestion(
        model=plan.model,
        fabric=plan.cluster.fabric,
        decided=decided,
        rates=rates,
        software=software_of(plan.cluster.device, plan.model, decided),
    )
    band = SpeedBand(factor=1 + SPEED_BAND, runs=0, words="a run's own gate")
    return _answer(
        question,
        read_published(),
        measured=tokens_per_s,
        gpu=gpu,
        band=band,
        likeness=Likeness(
            model=plan.model,
            seq_len=decided.seq_len,
            gpu=gpu.name,
            stack=_OURS,
            frozen=plan.model.adapter is not None,
            float8=decided.linear != "param",
        ),
        assumed=(),
    )


def memory_answer(memory: MemoryEstimate, measured: float) -> MemoryAnswer:
    """Where a peak is that `nvidia-smi` showed."""
    said = "as expected"
    if not memory.low <= measured <= memory.high:
        said = f"{'less' if measured < memory.low else 'more'} than expected"
    return MemoryAnswer(said, measured, memory.low, memory.high)


def _answer(
    question: SpeedQuestion,
    published: Published,
    *,
    measured: float,
    gpu: GpuSpec,
    band: SpeedBand,
    likeness: Likeness,
    assumed: tuple[str, ...],
) -> SpeedAnswer:
    expected = question.tokens_per_s()
    said = verdict(measured / expected, band)
    rest = said != "as expected" or measured < _NOTHING_MISSES * expected
    alike, kind = published.alike(likeness)
    return SpeedAnswer(
        expected=expected,
        measured=measured,
        band=band,
        verdict=said,
        mfu=mfu_of(likeness.model, likeness.seq_len, measured, gpu),
        alike=tuple(
            mfu_of(each.run.model, each.run.decided.seq_len, each.run.published, each.run.gpu)
            for each in alike
        ),
        kind=kind,
        nearest=tuple(published.nearest(likeness)),
        reasons=tuple(likely_reasons(question, measured)) if rest else (),
        assumed=assumed,
    )
