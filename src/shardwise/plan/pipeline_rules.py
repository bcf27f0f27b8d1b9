"""Which runs can have their blocks divided into stages: every rule, each with its error and its
fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.plan.axis_sizes import given_axes
from shardwise.plan.refused import RefusedSetting
from shardwise.plan.stage_cuts import MULTI, balanced_blocks, num_chunks
from shardwise.plan.stage_recompute import modes_in

# Those that were compared with one process. In these a block takes one hidden state and gives one,
# and nothing else goes from block to block.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "smollm3"),
    *("mixtral", "qwen3_moe", "olmoe"),
)
WITHOUT = "mesh.pipeline=1"
_ONE_BACKWARD = "mesh.pipeline_schedule=1f1b"
_RUNS_TWICE = "zero_bubble runs backward in two parts, and blocks would be recomputed in each"
# Settings that were not shown to give the same numbers, and why they may not.
REFUSED: tuple[RefusedSetting, ...] = (
    RefusedSetting(
        "adapter.method",
        lambda c: c.adapter.method != "none",
        "adapters in stages were not compared with one process",
    ),
    RefusedSetting(
        "preference.objective",
        lambda c: c.preference.objective != "none",
        "losses of whole answers were not compared with one process",
    ),
    RefusedSetting(
        "data.group_lengths",
        lambda c: c.data.group_lengths,
        "stages receive hidden states of one shape",
    ),
    RefusedSetting(
        "precision.linear",
        lambda c: c.precision.linear not in ("auto", "param"),
        "scales of float8 in stages were not compared with one process",
    ),
    RefusedSetting(
        "precision.experts",
        lambda c: c.precision.experts != "param",
        "scales of float8 in stages were not compared with one process",
    ),
    RefusedSetting(
        "precision.param=fp16",
        lambda c: c.precision.param == "fp16",
        "a loss scale that falls would repeat the passes of some stages",
    ),
    RefusedSetting(
        "memory.offload",
        lambda c: c.memory.offload != "none",
        "parameters in host memory were not tried with stages",
    ),
    RefusedSetting(
        "memory.offload_optimizer",
        lambda c: bool(c.memory.offload_optimizer),
        "an optimizer in host memory was not tried with stages",
    ),
    RefusedSetting(
        "memory.offload_activations",
        lambda c: c.memory.offload_activations not in ("auto", 0, 0.0),
        "several micro-batches are on their way at once, and each block copies out one",
    ),
    RefusedSetting(
        "optim.name",
        lambda c: c.optim.gathers_matrices,
        "updates of whole matrices in stages were not compared with one process",
    ),
    RefusedSetting(
        "launch.elastic",
        lambda c: c.launch.elastic,
        "a start on fewer nodes was not tried with stages",
    ),
    RefusedSetting(
        "shard.unit_classes",
        lambda c: bool(c.shard.unit_classes),
        "stages are cut between the blocks of the model's own list",
    ),
    RefusedSetting(
        "shard.unit_min_params",
        lambda c: bool(c.shard.unit_min_params),
        "stages are cut between the blocks of the model's own list",
    ),
    RefusedSetting(
        "shard.gather_in_place",
        lambda c: c.shard.gather_in_place is True,
        "several micro-batches use a block's parameters between two gathers",
    ),
    RefusedSetting(
        "train.router_z_loss",
        lambda c: c.train.router_z_loss not in ("auto", "off", 0, 0.0),
        "losses of routers are means over the blocks of all stages",
    ),
)


def check_pipeline(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any]
) -> Iterator[UserError]:
    """What forbids `mesh.pipeline` ranks, one error for each."""
    ranks = given_axes(config.mesh).pipeline
    if ranks == 1:
        yield from _check_idle_settings(config)
        return
    yield from _check_axes(config, ranks)
    yield from _check_model(config, model, hf_config, ranks)
    for refused in REFUSED:
        if refused.is_asked(config):
            yield _refusal(ranks, refused.why, f"leave {refused.path} out, or write {WITHOUT}")
    if config.mesh.pipeline_schedule == "zero_bubble":
        yield from _check_zero_bubble(config, ranks)
    yield from _check_stages(config, model, ranks)
    yield from _check_recompute(config, ranks)
    yield from _check_passes(config, ranks)


def _check_axes(config: RunConfig, ranks: int) -> Iterator[UserError]:
    if given_axes(config.mesh).context > 1:
        yield _refusal(
            ranks,
            "stages whose ranks also share a `context` axis were not compared with one process",
            f"write mesh.context=1, or {WITHOUT}",
        )


def _check_model(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any], ranks: int
) -> Iterator[UserError]:
    if model.model_type not in FAMILIES or config.model.trust_remote_code:
        yield _refusal(
            ranks,
            f"how to cut {model.model_type} models between blocks is not known; it is known for "
            f"{', '.join(FAMILIES)}",
            f"write {WITHOUT}",
        )
    if wants_aux_loss(config, model):
        yield _refusal(
            ranks,
            "losses of routers are means over the blocks of all stages",
            f"write train.router_aux_loss=off, or {WITHOUT}",
        )
    if hf_config.get("attention_dropout"):
        yield _refusal(
            ranks,
            "each stage would drop other values than one process does",
            f"write model.overrides.attention_dropout=0.0, or {WITHOUT}",
        )


def wants_aux_loss(config: RunConfig, model: ModelSpec) -> bool:
    """Whether the run would train on a load-balancing loss."""
    asked = config.train.router_aux_loss
    if asked == "auto":
        return bool(model.router_aux_loss) and model.num_routers > 0
    return asked not in ("off", 0, 0.0)


def with_full_pipeline(
    config: RunConfig, micros: Sequence[int], ranks: int, stages: int
) -> list[int]:
    """Those micro-batches that leave enough of them for every rank to have work."""
    train, batch = config.train, config.train.global_batch
    if stages == 1 or batch == "auto" or train.accumulation != "auto":
        return list(micros)
    per_rank = batch // ranks
    multi = config.mesh.pipeline_schedule in MULTI
    found = [
        micro
        for micro in micros
        if per_rank // micro >= stages and not (multi and per_rank // micro % stages)
    ]
    if not found:
        raise _too_few(stages, per_rank // min(micros), multi)
    return found


def _check_zero_bubble(config: RunConfig, ranks: int) -> Iterator[UserError]:
    if config.memory.checkpoint_activations not in ("auto", "none"):
        yield _refusal(
            ranks,
            _RUNS_TWICE,
            f"write memory.checkpoint_activations=none, or {_ONE_BACKWARD}",
        )
    if config.shard.reshard_after_forward not in ("auto", False):
        yield _refusal(
            ranks,
            "zero_bubble computes gradients of weights later, from parameters that are still "
            "gathered",
            "write shard.reshard_after_forward=false, or mesh.pipeline_schedule=1f1b",
        )
    if config.memory.compile is True:
        yield _refusal(
            ranks,
            "zero_bubble runs backward in two parts, and a compiled block has one",
            "leave memory.compile out, or write mesh.pipeline_schedule=1f1b",
        )
    if config.memory.accumulate == "sharded":
        yield _refusal(
            ranks,
            "zero_bubble leaves gradients on the rank until the last micro-batch of a step",
            "write memory.accumulate=unsharded, or mesh.pipeline_schedule=1f1b",
        )


def _check_idle_settings(config: RunConfig) -> Iterator[UserError]:
    mesh = config.mesh
    names = ("pipeline_chunks", "pipeline_blocks", "pipeline_recompute")
    for given in (f"mesh.{name}" for name in names if getattr(mesh, name) != "auto"):
        yield UserError(
            f"{given} needs stages, and there is one",
            why="mesh.pipeline is 1",
            fix=f"write mesh.pipeline=2, or leave {given} out",
        )


def _check_stages(config: RunConfig, model: ModelSpec, ranks: int) -> Iterator[UserError]:
    mesh, chunks = config.mesh, num_chunks(config)
    if chunks < 1 or (chunks > 1 and mesh.pipeline_schedule not in MULTI):
        yield _refusal(
            ranks,
            f"mesh.pipeline_schedule={mesh.pipeline_schedule} has one stage on each rank, and "
            f"mesh.pipeline_chunks is {chunks}",
            "write mesh.pipeline_chunks=1, or mesh.pipeline_schedule=interleaved_1f1b",
        )
        return
    stages = ranks * chunks
    if model.num_layers < stages:
        yield _refusal(
            ranks,
            f"{model.name} has {model.num_layers} blocks, and {stages} stages need one each",
            f"write {WITHOUT}",
        )
        return
    if mesh.pipeline_blocks == "auto":
        return
    parts = mesh.pipeline_blocks.split("+")
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in parts]
    if len(numbers) != stages or min(numbers) < 1 or sum(numbers) != model.num_layers:
        even = balanced_blocks(model.num_layers, stages, 0.0)
        yield UserError(
            f"mesh.pipeline_blocks={mesh.pipeline_blocks} does not name the blocks of {stages} "
            "stages",
            why=f"it takes {stages} numbers whose sum is the {model.num_layers} blocks of "
            f"{model.name}",
            fix=f"write mesh.pipeline_blocks={'+'.join(map(str, even))}, or "
            "mesh.pipeline_blocks=auto",
        )


def _check_recompute(config: RunConfig, ranks: int) -> Iterator[UserError]:
    words, path = config.mesh.pipeline_recompute, "memory.checkpoint_activations"
    if words == "auto":
        return
    try:
        modes = modes_in(words)
    except ValueError:
        modes = []
    if len(modes) != ranks:
        yield UserError(
            f"mesh.pipeline_recompute={words} does not say what each of {ranks} ranks recomputes",
            why=f"it takes {ranks} of none, selective, full or a share of the blocks from 0 to 1",
            fix=f"write mesh.pipeline_recompute={'+'.join(['full'] + ['none'] * (ranks - 1))}, or "
            "mesh.pipeline_recompute=auto",
        )
    elif config.memory.checkpoint_activations != "auto":
        yield UserError(
            f"mesh.pipeline_recompute={words} beside {path}={config.memory.checkpoint_activations}",
            why="both say what ranks recompute",
            fix=f"leave {path} out, or write mesh.pipeline_recompute=auto",
        )
    elif config.mesh.pipeline_schedule == "zero_bubble" and any(mode != "none" for mode in modes):
        yield _refusal(
            ranks, _RUNS_TWICE, f"write mesh.pipeline_recompute=auto, or {_ONE_BACKWARD}"
        )


def _check_passes(config: RunConfig, ranks: int) -> Iterator[UserError]:
    passes, multi = config.train.accumulation, config.mesh.pipeline_schedule in MULTI
    if passes != "auto" and (passes < ranks or (multi and passes % ranks)):
        yield _too_few(ranks, passes, multi)


def _too_few(ranks: int, passes: int, multi: bool) -> UserError:
    wanted = f"a multiple of {ranks}" if multi else f"at least {ranks}"
    return UserError(
        f"mesh.pipeline={ranks} with {passes} micro-batch{'' if passes == 1 else 'es'} in a step",
        why=f"each rank works on another micro-batch, so their number must be {wanted}",
        fix=f"write train.accumulation={-(-passes // ranks) * ranks} train.global_batch=auto, or "
        f"{WITHOUT}",
    )


def _refusal(ranks: int, why: str, fix: str) -> UserError:
    return UserError(f"mesh.pipeline={ranks} does not suit this run", why=why, fix=fix)
