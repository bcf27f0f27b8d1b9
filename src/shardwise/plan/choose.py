"""Fill every `auto`: the decision tree first, then the first settings that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSource, ModelSpec
from shardwise.plan.batch import choose_batch, micro_batch_candidates
from shardwise.plan.memory import Layout, estimate_memory
from shardwise.plan.mesh import MeshShape, complete_mesh, mesh_of_strategy, strategy_of_mesh
from shardwise.plan.plan import Choice, MemoryEstimate, Plan, Source
from shardwise.units import format_bytes

# Plans stay under this share of the card: above it the allocator starts to retry.
HEADROOM = 0.85
# Logits of one slice of the chunked loss, in elements.
LOSS_CHUNK_ELEMENTS = 2**28


def choose_plan(
    config: RunConfig, model: ModelSpec, cluster: ClusterSpec, source: ModelSource
) -> Plan:
    """Decide everything that the user left open, and give each decision its reason."""
    _refuse_several_datacenters(config)
    common = _choose_common(config, model, cluster)
    fit = _first_that_fits(config, model, cluster, common)
    mesh = fit.mesh
    micro = _choice_of(config.train.micro_batch, fit.layout.micro_batch, _why_micro(fit, cluster))
    accumulation, global_batch = choose_batch(config.train, cluster.world_size, micro)
    forward, backward = _choose_prefetch(config)
    return Plan(
        config=config,
        model=model,
        hf_config=source.hf_config,
        model_dir=None if source.directory is None else str(source.directory),
        weights_dir=_weights_dir(config, source),
        cluster=cluster,
        memory=fit.memory,
        strategy=Choice(fit.strategy, fit.why, fit.source),
        replicate=Choice(mesh.replicate, "copies of the sharded model", fit.source),
        shard=Choice(mesh.shard, "ranks that hold one copy together", fit.source),
        reshard_after_forward=_choose_reshard(config, mesh),
        forward_prefetch=forward,
        backward_prefetch=backward,
        checkpoint_activations=_choice_of(
            config.memory.checkpoint_activations,
            fit.layout.checkpoint_activations,
            f"the least recompute that fits: {format_bytes(fit.memory.total)} expected",
        ),
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch,
        accumulate=_choose_accumulate(config, accumulation.value, fit, model),
        warnings=_warnings(config, fit, cluster),
        **common,
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    strategy: str
    mesh: MeshShape
    why: str
    source: Source
    recompute_allowed: bool = True


@dataclass(frozen=True, slots=True)
class _Fit:
    strategy: str
    mesh: MeshShape
    why: str
    source: Source
    layout: Layout
    memory: MemoryEstimate


def _refuse_several_datacenters(config: RunConfig) -> None:
    if config.cluster.datacenters > 1:
        raise UserError(
            f"cluster.datacenters={config.cluster.datacenters}: FSDP does not train across "
            "datacenters",
            why="every step all-gathers and reduce-scatters each block; links between sites are "
            "hundreds of times slower than that needs",
            fix="train inside one site, or use a low-communication method such as DiLoCo",
        )


def _choose_common(config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> dict[str, Any]:
    """Decisions that depend on neither mesh nor batch."""
    on_gpu = cluster.device == "cuda"
    precision, memory = config.precision, config.memory
    param, why_param = _best_format(cluster)
    chunk = max(256, 2 ** ((LOSS_CHUNK_ELEMENTS // model.vocab_size).bit_length() - 1))
    fused_why = f"{'host' if memory.offload == 'cpu' else cluster.device} parameters have it"
    return {
        "param_dtype": _choice_of(precision.param, param, why_param),
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
            f"given; host memory needed on a node: {_offload_bytes(model, cluster)}"
            if memory.offload == "cpu"
            else "not asked for; it costs 2-3x in speed",
            "user" if memory.offload == "cpu" else "rule",
        ),
        "attention": _choice_of(
            config.model.attention, "sdpa", "torch picks the fastest kernel of the device"
        ),
        "loss": _choice_of(
            memory.loss, "chunked", "all logits at once would be the peak of the step"
        ),
        "loss_chunk_tokens": _choice_of(
            memory.loss_chunk_tokens, chunk, f"{chunk} x {model.vocab_size} logits at a time"
        ),
        "fused_optimizer": _choice_of(config.optim.fused, True, fused_why),
    }


def _offload_bytes(model: ModelSpec, cluster: ClusterSpec) -> str:
    share = min(1.0, cluster.devices_per_node / cluster.world_size)
    return f"at least {format_bytes(16 * model.total_params * share)}"


def _best_format(cluster: ClusterSpec) -> tuple[str, str]:
    name = cluster.device_name
    if "bf16" in cluster.compute_formats:
        return "bf16", f"{name} computes bf16"
    if "fp16" in cluster.compute_formats:
        return "fp16", f"{name} has no bf16 arithmetic; fp16 with dynamic loss scaling"
    return "fp32", f"{name} computes neither bf16 nor fp16 fast"


def _first_that_fits(
    config: RunConfig, model: ModelSpec, cluster: ClusterSpec, common: dict[str, Any]
) -> _Fit:
    last: _Fit | None = None
    for candidate in _mesh_candidates(config, cluster):
        if candidate.source == "rule" and not _reshard_divides(config, candidate.mesh):
            continue
        for layout in _layouts(config, cluster, common, candidate):
            memory = estimate_memory(model, cluster, layout)
            last = _Fit(
                candidate.strategy,
                candidate.mesh,
                candidate.why,
                candidate.source,
                layout,
                memory,
            )
            if memory.total <= HEADROOM * cluster.memory_bytes:
                return last
    if last is None:
        raise _reshard_error(config, cluster.world_size)
    return _validate_states_fit(last, model, cluster)


def _validate_states_fit(fit: _Fit, model: ModelSpec, cluster: ClusterSpec) -> _Fit:
    """The smallest plan is still run when only the estimate says no; states are certain."""
    if fit.memory.states > cluster.memory_bytes:
        needed = -(-16 * model.total_params // int(HEADROOM * cluster.memory_bytes))
        raise UserError(
            f"{model.name} does not fit on {cluster.name}",
            why=f"parameters, gradients and Adam take {format_bytes(fit.memory.states)} on each "
            f"rank, which has {format_bytes(cluster.memory_bytes)}",
            fix=f"use at least {needed} such devices, or memory.offload=cpu",
            code=ExitCode.DOES_NOT_FIT,
        )
    return fit


def _mesh_candidates(config: RunConfig, cluster: ClusterSpec) -> Iterator[_Candidate]:
    """The seeds' decision tree, each answer followed by what to try when it does not fit."""
    world, domain = cluster.world_size, min(cluster.nvlink_domain, cluster.world_size)
    given = complete_mesh(config.mesh, world)
    strategy = config.shard.strategy
    if strategy != "auto":
        yield _given_strategy(strategy, given, world, domain)
        return
    if given is not None:
        name = strategy_of_mesh(*given)
        reshard = mesh_of_strategy(name, world, given[1]).reshard_after_forward
        yield _Candidate(name, MeshShape(*given, reshard), "mesh given", "user")
        return
    alone = "a whole copy fits on one device: plain data parallelism has the least traffic"
    yield _Candidate(
        "no_shard", mesh_of_strategy("no_shard", world, domain), alone, "rule", world == 1
    )
    sizes = [size for size in range(domain, world, domain) if world % size == 0]
    for smaller, size in zip([None, *sizes], sizes, strict=False):
        if smaller is None:
            why = (
                f"several nodes: shard inside {size} GPUs, so that only the gradient all-reduce "
                "crosses replicas"
            )
        else:
            why = f"a copy over {smaller} GPUs does not fit; {size} do"
        mesh = mesh_of_strategy("hybrid_shard", world, size)
        yield _Candidate("hybrid_shard", mesh, why, "rule")
    why = (
        "does not fit on one device; all ranks share one fast domain"
        if world <= domain
        else "a copy over fewer ranks does not fit"
    )
    yield _Candidate("full_shard", mesh_of_strategy("full_shard", world, domain), why, "rule")


def _given_strategy(
    strategy: str, given: tuple[int, int] | None, world: int, domain: int
) -> _Candidate:
    mesh = mesh_of_strategy(strategy, world, domain)
    if given is not None and strategy == "hybrid_shard":
        mesh = MeshShape(*given, mesh.reshard_after_forward)
    if given is not None and given != (mesh.replicate, mesh.shard):
        raise UserError(
            f"shard.strategy={strategy} is a mesh of replicate={mesh.replicate} x "
            f"shard={mesh.shard}, but the mesh section says {given[0]} x {given[1]}",
            why=f"with {world} ranks {strategy} leaves no choice of axes",
            fix="drop the mesh section, or set shard.strategy=hybrid_shard",
        )
    return _Candidate(strategy, mesh, "given", "user")


def _layouts(
    config: RunConfig, cluster: ClusterSpec, common: dict[str, Any], candidate: _Candidate
) -> Iterator[Layout]:
    """Least recompute first, then the largest micro-batch."""
    modes: list[str | float] = ["none", "selective", "full"]
    if config.memory.checkpoint_activations != "auto":
        modes = [config.memory.checkpoint_activations]
    elif not candidate.recompute_allowed:
        modes = ["none"]
    micros = micro_batch_candidates(
        config.train, cluster.world_size, config.data.seq_len, cluster.device
    )
    chunked = common["loss"].value != "full"
    reshard = _choose_reshard(config, candidate.mesh).value
    for mode, micro in product(modes, micros):
        for unsharded in _ways_to_accumulate(config, micro, cluster.world_size):
            yield Layout(
                shard=candidate.mesh.shard,
                keeps_gathered=reshard is False,
                param_dtype=common["param_dtype"].value,
                reduce_dtype=common["reduce_dtype"].value,
                checkpoint_activations=mode,
                compile=common["compile"].value,
                offload=common["offload"].value,
                micro_batch=micro,
                seq_len=config.data.seq_len,
                loss_chunk_tokens=common["loss_chunk_tokens"].value if chunked else None,
                accumulates_unsharded=unsharded,
            )


def _choose_reshard(config: RunConfig, mesh: MeshShape) -> Choice[bool | int]:
    given = config.shard.reshard_after_forward
    if given != "auto":
        if not _reshard_divides(config, mesh):
            raise _reshard_error(config, mesh.shard)
        return Choice(given, "given", "user")
    why = "frees gathered parameters" if mesh.reshard_after_forward else "keeps them for backward"
    return Choice(mesh.reshard_after_forward, f"{why}, as the strategy says", "rule")


def _reshard_divides(config: RunConfig, mesh: MeshShape) -> bool:
    given = config.shard.reshard_after_forward
    if given == "auto" or isinstance(given, bool):
        return True
    return given < mesh.shard and mesh.shard % given == 0


def _reshard_error(config: RunConfig, ranks: int) -> UserError:
    return UserError(
        f"shard.reshard_after_forward={config.shard.reshard_after_forward} does not divide the "
        f"shard axis of {ranks} ranks into smaller groups",
        fix="use a smaller divisor of the shard axis, true or false",
    )


def _ways_to_accumulate(config: RunConfig, micro: int, ranks: int) -> list[bool]:
    """Whether whole gradients are kept over micro-batches; both where the planner may decide."""
    passes = choose_batch(config.train, ranks, Choice(micro, "", "rule"))[0].value
    if passes == 1 or config.memory.accumulate == "sharded":
        return [False]
    return [True] if config.memory.accumulate == "unsharded" else [True, False]


def _choose_prefetch(config: RunConfig) -> tuple[Choice[int], Choice[int]]:
    shard = config.shard
    limit = None if shard.all_gather_limit == "auto" else shard.all_gather_limit - 1
    forward = _choice_of(shard.forward_prefetch, 0, "FSDP2 overlaps the next all-gather by itself")
    backward = _choice_of(shard.backward_prefetch, 1, "FSDP2's own order, one unit ahead")
    return _cap(forward, limit), _cap(backward, limit)


def _cap(depth: Choice[int], limit: int | None) -> Choice[int]:
    if limit is None or depth.value <= limit:
        return depth
    return Choice(limit, f"capped by shard.all_gather_limit={limit + 1}", "user")


def _choose_accumulate(config: RunConfig, passes: int, fit: _Fit, model: ModelSpec) -> Choice[str]:
    given = config.memory.accumulate
    if given != "auto":
        return Choice(given, "given", "user")
    if passes == 1:
        return Choice("unsharded", "no accumulation: gradients are reduced once anyway", "rule")
    whole = format_bytes(4 * model.total_params)
    if fit.layout.accumulates_unsharded:
        why = f"{whole} of whole gradients fit; reduced once, on the last pass"
        return Choice("unsharded", why, "rule")
    why = f"{whole} of whole gradients would not fit; reduced every pass"
    return Choice("sharded", why, "rule")


def _warnings(config: RunConfig, fit: _Fit, cluster: ClusterSpec) -> list[str]:
    expected, capacity = format_bytes(fit.memory.total), format_bytes(cluster.memory_bytes)
    if fit.memory.total <= HEADROOM * cluster.memory_bytes:
        return []
    return [
        f"{expected} expected of {capacity}, above the {HEADROOM:.0%} that leaves room to breathe: "
        "it may run out of memory"
    ]


def _weights_dir(config: RunConfig, source: ModelSource) -> str | None:
    if config.model.weights == "random":
        return None
    if source.has_weights:
        return str(source.directory)
    if config.model.weights == "pretrained":
        raise UserError(
            f"model.weights=pretrained, but {config.model.name!r} comes without weights",
            why="presets are shapes only"
            if source.kind == "preset"
            else f"there are no safetensors files in {source.directory}",
            fix="give model.name a directory or hub id with safetensors, or model.weights=random",
        )
    return None


def _why_micro(fit: _Fit, cluster: ClusterSpec) -> str:
    expected, capacity = format_bytes(fit.memory.total), format_bytes(cluster.memory_bytes)
    return f"the largest that fits and still gains: {expected} of {capacity} expected"


def _choice_of(given: Any, chosen: Any, why: str) -> Choice[Any]:
    if given != "auto":
        return Choice(given, "given", "user")
    return Choice(chosen, why, "rule")
