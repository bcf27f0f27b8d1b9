"""Fill every `auto`: the decision tree's candidates, the fastest of them that fits, the reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSource, ModelSpec
from shardwise.facts.prices import price_of
from shardwise.facts.rates import Rates
from shardwise.plan.batch import choose_batch
from shardwise.plan.candidates import (
    Common,
    choose_gather_in_place,
    choose_reshard,
    layouts,
    mesh_candidates,
)
from shardwise.plan.float8 import choose_float8_gather, choose_linear
from shardwise.plan.inputs import choose_tokenizer, choose_weights
from shardwise.plan.memory import waiting_in_host
from shardwise.plan.mesh import MAX_PADDING, padding
from shardwise.plan.plan import Choice, Plan, Source
from shardwise.plan.remedies import advise
from shardwise.plan.routers import choose_router_aux_loss, left_out
from shardwise.plan.search import Option, alternatives, best_of, fits, judge
from shardwise.units import format_bytes, format_count

# Memory that a server of eight GPUs has; offload that needs more of it is not offered.
USUAL_HOST_BYTES = 2 * 2**40


def choose_plan(
    config: RunConfig,
    model: ModelSpec,
    cluster: ClusterSpec,
    source: ModelSource,
    rates: Rates | None = None,
) -> Plan:
    """Decide everything that the user left open, and give each decision its reason.

    Without `rates` nothing is known of speed: the decision tree's first answer that fits is taken.
    """
    _refuse_several_datacenters(config)
    common = _choose_common(config, model, cluster)
    options = judge_all(config, model, cluster, common, rates)
    best = best_of(options, cluster)
    _validate_fits(best, config, model, cluster)
    mesh, layout = best.candidate.mesh, best.layout
    origin = _origin(best)
    why_mesh = best.candidate.why if origin != "search" else _why_searched(best, options, cluster)
    micro = _chosen(config.train.micro_batch, layout.micro_batch, _why_micro(best, cluster), best)
    accumulation, global_batch = choose_batch(config.train, cluster.world_size, micro)
    in_place = choose_gather_in_place(config, mesh, own_kernels=layout.own_kernels)
    forward, backward = _choose_prefetch(config, in_place.value)
    weights = choose_weights(config, source)
    return Plan(
        config=config,
        model=model,
        hf_config=source.hf_config,
        model_dir=None if source.directory is None else str(source.directory),
        weights_dir=None if weights.value == "random" else weights.value,
        cluster=cluster,
        memory=best.memory,
        forecast=best.forecast,
        alternatives=alternatives(best, options, cluster),
        weights=weights,
        tokenizer=choose_tokenizer(config),
        strategy=Choice(best.candidate.strategy, why_mesh, origin),
        replicate=Choice(mesh.replicate, "copies of the sharded model", origin),
        shard=Choice(mesh.shard, "ranks that hold one copy together", origin),
        reshard_after_forward=choose_reshard(config, mesh),
        gather_in_place=in_place,
        forward_prefetch=forward,
        backward_prefetch=backward,
        checkpoint_activations=_chosen(
            config.memory.checkpoint_activations,
            layout.checkpoint_activations,
            _why_recompute(best, cluster),
            best,
        ),
        offload_activations=_choose_offload_activations(config, best, model),
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch,
        accumulate=_choose_accumulate(config, best, model),
        float8_gather=choose_float8_gather(config, model, mesh.shard),
        warnings=[
            *_tight(best, cluster),
            *_padded_experts(config, model, mesh.shard),
            *_without_effect(config, cluster),
            *left_out(model, common["router_aux_loss"]),
        ],
        **common,
    )


def judge_all(
    config: RunConfig,
    model: ModelSpec,
    cluster: ClusterSpec,
    common: dict[str, Any],
    rates: Rates | None,
) -> list[Option]:
    """Every candidate with every layout, in the order of the decision tree."""
    offload = common["offload"].value
    price = price_of(cluster, config.cluster, offload=offload)
    chunked = common["loss"].value != "full"
    settled = Common(
        param_dtype=common["param_dtype"].value,
        reduce_dtype=common["reduce_dtype"].value,
        compile=common["compile"].value,
        offload=offload,
        loss_chunk_tokens=common["loss_chunk_tokens"].value if chunked else None,
        linear=common["linear"].value,
        flash_attention_4=common["attention"].value == "flash_attention_4",
        own_kernels=common["kernels"].value == "own",
        balances_routers=common["router_aux_loss"].value > 0,
    )
    return [
        judge(candidate, rank, layout, model, cluster, rates, price)
        for rank, candidate in enumerate(mesh_candidates(config, cluster))
        for layout in layouts(config, model, cluster, settled, candidate)
    ]


def loss_slice_tokens(vocab_size: int, *, compiled: bool) -> int:
    """Tokens of one slice of the chunked loss: a power of two, at most 2**29 logits.

    Half as many without the compiler, which would hold fp32 copies of them.
    """
    most = 2**29 if compiled else 2**28
    return max(256, 2 ** ((most // vocab_size).bit_length() - 1))


def _refuse_several_datacenters(config: RunConfig) -> None:
    if config.cluster.datacenters > 1:
        raise UserError(
            f"cluster.datacenters={config.cluster.datacenters}: FSDP does not train across "
            "datacenters",
            why="every step all-gathers and reduce-scatters each block; links between sites are "
            "hundreds of times slower than that needs",
            fix="write cluster.datacenters=1 to train inside one site; across sites use a "
            "low-communication method such as DiLoCo",
        )


def _choose_common(config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> dict[str, Any]:
    """Decisions that depend on neither mesh nor batch."""
    on_gpu = cluster.device == "cuda"
    precision, memory = config.precision, config.memory
    param, why_param = _best_format(cluster)
    compiled = on_gpu if memory.compile == "auto" else memory.compile
    chunk = loss_slice_tokens(model.vocab_size, compiled=compiled)
    host_bytes = _offload_bytes(model, cluster)
    fused_why = f"{'host' if memory.offload == 'cpu' else cluster.device} parameters have it"
    return {
        "param_dtype": _choice_of(precision.param, param, why_param),
        "linear": choose_linear(config, model, cluster),
        "reduce_dtype": _choice_of(
            precision.reduce, "fp32", "sums over many ranks lose bits in less"
        ),
        "output_dtype": Choice(
            precision.output,
            "as the last layer gives it" if precision.output is None else "given",
            "rule" if precision.output is None else "user",
        ),
        "compile": _choice_of(
            memory.compile,
            on_gpu,
            "fuses norms, rope and activations" if on_gpu else "start-up costs more than it gains",
        ),
        "offload": Choice(
            memory.offload == "cpu",
            f"given; host memory needed on a node: at least {format_bytes(host_bytes)}"
            if memory.offload == "cpu"
            else "not asked for; it costs 2-3x in speed",
            "user" if memory.offload == "cpu" else "rule",
        ),
        "attention": _choose_attention(config, model),
        "loss": _choice_of(
            memory.loss, "chunked", "all logits at once would be the peak of the step"
        ),
        "loss_chunk_tokens": _choice_of(
            memory.loss_chunk_tokens, chunk, f"{chunk} x {model.vocab_size} logits at a time"
        ),
        "fused_optimizer": _choice_of(config.optim.fused, True, fused_why),
        "optimizer_state": _choose_optimizer_state(config),
        "kernels": _choose_kernels(config, cluster),
        "router_aux_loss": choose_router_aux_loss(config, model),
    }


def _choose_attention(config: RunConfig, model: ModelSpec) -> Choice[str]:
    given, first = config.model.attention, model.attentions[0]
    if given != "auto" and given not in model.attentions:
        raise UserError(
            f"model.attention={given} is not there for {model.model_type} models",
            why=f"their class in transformers has {', '.join(model.attentions)}",
            fix=f"leave model.attention out, or set model.attention={first}",
        )
    why = "torch picks the fastest kernel of the device"
    if first != "sdpa":
        why = f"transformers' {model.model_type} class has no sdpa"
    elif config.data.document_mask:
        why = "runs everywhere, with a mask of documents that flash_attention_4 needs not"
    return _choice_of(given, first, why)


def _choose_optimizer_state(config: RunConfig) -> Choice[str]:
    if config.optim.state != "fp32":
        return Choice(config.optim.state, "given", "user")
    why = "bf16 rounds Adam's moments at random, so it is not chosen unless asked for"
    return Choice("fp32", why, "rule")


def _choose_kernels(config: RunConfig, cluster: ClusterSpec) -> Choice[str]:
    given = config.train.kernels
    if cluster.device == "cuda":
        return _choice_of(given, "own", "they move and keep fewer bytes than torch's")
    if given == "own":
        raise UserError(
            f"train.kernels=own needs GPUs, and {cluster.name} has none",
            why="they are written in Triton",
            fix="leave train.kernels out",
        )
    return _choice_of(given, "torch", "ours are for GPUs")


def _choose_offload_activations(config: RunConfig, best: Option, model: ModelSpec) -> Choice[float]:
    given = config.memory.offload_activations
    if not given:
        why = "not asked for: measured for one GPU of a host, not for all at once"
        return Choice(0.0, why, "rule")
    waiting = format_bytes(waiting_in_host(model, best.layout))
    return Choice(given, f"given; {waiting} of host memory for each rank", "user")


def _offload_bytes(model: ModelSpec, cluster: ClusterSpec) -> float:
    """What the host memory of one node holds at least: its share of all states."""
    return 16 * model.total_params * min(1.0, cluster.devices_per_node / cluster.world_size)


def _best_format(cluster: ClusterSpec) -> tuple[str, str]:
    name = cluster.device_in_words
    if "bf16" in cluster.compute_formats:
        return "bf16", f"{name} computes bf16"
    if "fp16" in cluster.compute_formats:
        return "fp16", f"{name} has no bf16 arithmetic; fp16 with dynamic loss scaling"
    return "fp32", f"{name} computes neither bf16 nor fp16 fast"


def _validate_fits(best: Option, config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> None:
    """A tight plan is run with a warning; one that is larger than the device is refused.

    On CPUs too: what ranks took there was never below the estimate.
    """
    if best.memory.total <= cluster.memory_bytes:
        return

    def fits_with(changed: RunConfig, place: ClusterSpec) -> bool:
        if changed.memory.offload == "cpu" and _offload_bytes(model, place) > USUAL_HOST_BYTES:
            return False
        common = _choose_common(changed, model, place)
        options = judge_all(changed, model, place, common, None)
        return fits(best_of(options, place).memory, place)

    raise UserError(
        f"{model.name} does not fit on {cluster.name}",
        why=f"{format_bytes(best.memory.total)} are needed on a rank that has "
        f"{format_bytes(cluster.memory_bytes)}, {format_bytes(best.memory.states)} of them for "
        f"parameters, gradients and Adam, even with {best.label}",
        fix=advise(config, cluster, fits_with),
        code=ExitCode.DOES_NOT_FIT,
    )


def _origin(best: Option) -> Source:
    """Who decided on the mesh."""
    if best.candidate.source == "user":
        return "user"
    return "rule" if best.rank == 0 or best.forecast is None else "search"


def _why_searched(best: Option, options: list[Option], cluster: ClusterSpec) -> str:
    """Against the decision tree's answers before it: they do not fit, or are slower."""
    earlier = [each for each in options if each.rank < best.rank and fits(each.memory, cluster)]
    if not earlier:
        return best.candidate.why
    rival = max(earlier, key=lambda option: option.speed)
    gain, mesh = best.speed / rival.speed - 1, rival.candidate.mesh
    digits = 0 if gain >= 0.01 else 1
    return (
        f"{gain:.{digits}%} faster than {rival.candidate.strategy} {mesh.replicate} x "
        f"{mesh.shard}, the best of the decision tree's earlier answers"
    )


def _why_recompute(best: Option, cluster: ClusterSpec) -> str:
    expected = f"{format_bytes(best.memory.total)} expected"
    if not fits(best.memory, cluster):
        return f"takes the least memory: {expected}"
    if best.forecast is None:
        return f"the least recompute that fits: {expected}"
    return f"the fastest that fits: {format_count(best.speed)} tok/s, {expected}"


def _choose_prefetch(config: RunConfig, in_place: bool) -> tuple[Choice[int], Choice[int]]:
    shard = config.shard
    limit = None if shard.all_gather_limit == "auto" else shard.all_gather_limit - 1
    ahead = (1, "gathers in place are hidden if they are asked for one unit ahead")
    by_itself = (0, "FSDP2 overlaps the next all-gather by itself")
    forward = _choice_of(shard.forward_prefetch, *(ahead if in_place else by_itself))
    backward = _choice_of(shard.backward_prefetch, 1, "FSDP2's own order, one unit ahead")
    return _cap(forward, limit), _cap(backward, limit)


def _cap(depth: Choice[int], limit: int | None) -> Choice[int]:
    if limit is None or depth.value <= limit:
        return depth
    return Choice(limit, f"capped by shard.all_gather_limit={limit + 1}", "user")


def _choose_accumulate(config: RunConfig, best: Option, model: ModelSpec) -> Choice[str]:
    given = config.memory.accumulate
    if given != "auto":
        return Choice(given, "given", "user")
    if best.layout.accumulation == 1:
        return Choice("unsharded", "no accumulation: gradients are reduced once anyway", "rule")
    whole = format_bytes(4 * model.total_params)
    if best.layout.accumulates_unsharded:
        why = f"{whole} of whole gradients fit; reduced once, on the last pass"
        return Choice("unsharded", why, "rule")
    why = f"{whole} of whole gradients would not fit, or gain nothing; reduced every pass"
    return Choice("sharded", why, "rule")


def _tight(best: Option, cluster: ClusterSpec) -> list[str]:
    """The warning of a plan that may not fit."""
    if fits(best.memory, cluster):
        return []
    expected, capacity = format_bytes(best.memory.total), format_bytes(cluster.memory_bytes)
    return [
        f"{expected} expected of {capacity}, up to {format_bytes(best.memory.high)} likely: it may "
        "run out of memory"
    ]


def _padded_experts(config: RunConfig, model: ModelSpec, shard: int) -> list[str]:
    """The warning of stacked experts that FSDP2 can only cut one from the other, and pads."""
    group, experts = config.shard.reshard_after_forward, model.num_experts
    too_few = experts > 1 and padding(experts, shard) > MAX_PADDING
    if not too_few or isinstance(group, bool | str):
        return []
    return [
        f"shard.reshard_after_forward={group} makes every rank hold and move "
        f"{1 + padding(experts, shard):.1f} times its part of the experts, which the memory above "
        f"leaves out: FSDP2 reshards to groups along the first dim only, and {experts} stacked "
        f"experts are padded to {shard} ranks there; true and false cut another dim"
    ]


def _without_effect(config: RunConfig, cluster: ClusterSpec) -> list[str]:
    """The warning of a setting that only GPUs know."""
    if config.observe.memory_history and cluster.device == "cpu":
        return ["observe.memory_history has no effect here: torch keeps it for GPUs alone"]
    return []


def _why_micro(best: Option, cluster: ClusterSpec) -> str:
    expected, capacity = format_bytes(best.memory.total), format_bytes(cluster.memory_bytes)
    if not fits(best.memory, cluster):
        return f"takes the least memory: {expected} of {capacity} expected"
    return f"the largest that fits and still gains: {expected} of {capacity} expected"


def _chosen(given: Any, value: Any, why: str, best: Option) -> Choice[Any]:
    """A decision of the search, or of the first fit where no speed is known."""
    choice = _choice_of(given, value, why)
    searched = choice.source == "rule" and best.forecast is not None
    return replace(choice, source="search") if searched else choice


def _choice_of(given: Any, chosen: Any, why: str) -> Choice[Any]:
    if given != "auto":
        return Choice(given, "given", "user")
    return Choice(chosen, why, "rule")
