"""Why the best candidate was chosen: its decisions, each with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.activations import waiting_in_host
from shardwise.plan.axis_reasons import why_axis
from shardwise.plan.batch import choose_batch
from shardwise.plan.decisions import Choice, Choices, Decisions, Source
from shardwise.plan.given import decide
from shardwise.plan.memory import GRAD_BYTES
from shardwise.plan.rank_share import num_expert_shards, whole_gradients
from shardwise.plan.search import Option, fits
from shardwise.plan.stage_cuts import choose_stages
from shardwise.plan.stage_recompute import ALIKE
from shardwise.units import format_bytes, format_count


def choices_of(
    best: Option, options: list[Option], config: RunConfig, model: ModelSpec, cluster: ClusterSpec
) -> Choices:
    """The decisions that candidates differ in, and those that need a reason only once one is
    chosen."""
    decided, origin = best.decided, _origin(best)
    why = best.candidate.why if origin != "search" else _why_searched(best, options, cluster)
    recompute, micro = _why_recompute(best, cluster), _why_micro(best, cluster)
    micro_batch = _searched(config, "micro_batch", best, micro)
    accumulation, global_batch = choose_batch(
        config.train,
        decided.jobs * decided.data_ranks,
        micro_batch,
        least=decided.pipeline,
    )
    return {
        "strategy": Choice(decided.strategy, why, origin),
        "replicate": Choice(decided.replicate, "copies of the sharded model", origin),
        "shard": Choice(decided.shard, "ranks that hold one copy together", origin),
        **_choose_stages(config, model, decided),
        **{
            name: decide(
                config, name, getattr(decided, name), why_axis(name, best, options, cluster)
            )
            for name in ("tensor", "context", "expert")
        },
        "sequence_parallel": _choose_sequence(config, best),
        "pipeline_recompute": _by_stage(config, best),
        "keeps_experts": _choose_experts(config, best),
        "checkpoint_activations": _searched(config, "checkpoint_activations", best, recompute),
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "global_batch": global_batch,
        "accumulate": decide(
            config, "accumulate", decided.accumulate, _why_accumulate(best, model)
        ),
    }


def _choose_stages(config: RunConfig, model: ModelSpec, decided: Decisions) -> Choices:
    found = choose_stages(config, model, decided.pipeline)
    if found["pipeline_blocks"].value == decided.pipeline_blocks:
        return found
    why = "stages take about as long with what each recomputes, and fit"
    return {**found, "pipeline_blocks": Choice(decided.pipeline_blocks, why, "search")}


def _by_stage(config: RunConfig, best: Option) -> Choice[Any]:
    how = best.decided.pipeline_recompute
    if how == ALIKE:
        why = "all ranks do alike" if best.decided.pipeline > 1 else "every rank has all blocks"
        return Choice(how, why, "rule")
    why = "each rank does no more than it must; the first keeps the most micro-batches"
    return _searched(config, "pipeline_recompute", best, why)


def _choose_sequence(config: RunConfig, best: Option) -> Choice[bool]:
    if best.decided.tensor == 1:
        return Choice(False, "each rank computes whole matmuls", "rule")
    if not config.mesh.sequence_parallel:
        return Choice(False, "given", "user")
    return Choice(True, "norms and the residual take less memory, and no more is sent", "rule")


def _choose_experts(config: RunConfig, best: Option) -> Choice[bool]:
    decided = best.decided
    if decided.expert == 1:
        return Choice(False, "experts are gathered with their blocks", "rule")
    if config.shard.keep_experts != "auto":
        return Choice(decided.keeps_experts, "given", "user")
    if decided.keeps_gathered:
        return Choice(False, "all parameters are kept for backward", "rule")
    if num_expert_shards(decided) == 1:
        return Choice(False, "a rank has its experts whole, so nothing is gathered", "rule")
    if decided.keeps_experts:
        why = "experts stay for backward and the rest is freed: it fits, and they are gathered once"
        return Choice(True, why, "search")
    return Choice(
        False, "frees experts after forward; to keep them gains nothing or does not fit", "rule"
    )


def with_host_memory(offload: Choice[float], best: Option, model: ModelSpec) -> Choice[float]:
    """The same reason with the host memory that activations take."""
    if not offload.value:
        return offload
    waiting = format_bytes(waiting_in_host(model, best.decided))
    return replace(offload, why=f"given; {waiting} of host memory for each rank")


def _origin(best: Option) -> Source:
    """Who decided on the mesh."""
    if best.candidate.source == "user":
        return "user"
    return "rule" if best.rank == 0 or best.forecast is None else "search"


def _searched(config: RunConfig, name: str, best: Option, why: str) -> Choice[Any]:
    """A choice of the search, or of the first fit where no speed is known."""
    choice = decide(config, name, getattr(best.decided, name), why)
    searched = choice.source == "rule" and best.forecast is not None
    return replace(choice, source="search") if searched else choice


def _why_searched(best: Option, options: list[Option], cluster: ClusterSpec) -> str:
    """Why the decision tree's earlier answers lost: they do not fit, or are slower."""
    earlier = [each for each in options if each.rank < best.rank and fits(each.memory, cluster)]
    if not earlier:
        return best.candidate.why
    rival = max(earlier, key=lambda option: option.speed)
    gain, other = best.speed / rival.speed - 1, rival.decided
    digits = 0 if gain >= 0.01 else 1
    return (
        f"{gain:.{digits}%} faster than {other.strategy} {other.replicate} x "
        f"{other.shard}, the best of the decision tree's earlier answers"
    )


def _why_recompute(best: Option, cluster: ClusterSpec) -> str:
    expected = f"{format_bytes(best.memory.total)} expected"
    if not fits(best.memory, cluster):
        return f"takes the least memory: {expected}"
    if best.forecast is None:
        return f"the least recompute that fits: {expected}"
    return f"the fastest that fits: {format_count(best.speed)} tok/s, {expected}"


def _why_micro(best: Option, cluster: ClusterSpec) -> str:
    expected, capacity = format_bytes(best.memory.total), format_bytes(cluster.memory_bytes)
    if not fits(best.memory, cluster):
        return f"takes the least memory: {expected} of {capacity} expected"
    return f"the largest that fits and still gains: {expected} of {capacity} expected"


def _why_accumulate(best: Option, model: ModelSpec) -> str:
    if best.decided.accumulation == 1:
        return "no accumulation: gradients are reduced once anyway"
    params = whole_gradients(model, best.decided) / best.decided.pipeline
    whole = format_bytes(GRAD_BYTES * params)
    if best.decided.accumulates_unsharded:
        copied = ", and copied to the host once" if best.decided.offload else ""
        return f"{whole} of whole gradients fit; reduced once, on the last pass{copied}"
    return f"{whole} of whole gradients would not fit, or gain nothing; reduced every pass"
