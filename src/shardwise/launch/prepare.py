"""From a config to a plan: find the model, the cluster and the sizes, then choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from shardwise.config.schema import AdapterConfig, RunConfig
from shardwise.data.size import size_of_data
from shardwise.errors import ExitCode, UserError, brief
from shardwise.facts.calibration import rates_for, with_measured_links
from shardwise.facts.cluster import ClusterSpec, probe_cluster, resolve_cluster
from shardwise.facts.counted import keep_spec, kept_spec, shipped_spec
from shardwise.facts.families import UnknownFamily, spec_from_config
from shardwise.facts.models import ModelSource, ModelSpec, read_model_config
from shardwise.launch.patience import shown_progress
from shardwise.plan import choose
from shardwise.plan.axis_sizes import warn_of_axes
from shardwise.plan.frozen_base import SHIPPED, choose_format, shipped_by
from shardwise.plan.goal import Goal, choose_for
from shardwise.plan.inputs import choose_weights
from shardwise.plan.planned import Plan
from shardwise.plan.sequence_limit import validate_positions, warn_of_positions

# This is a gigabyte of weights and a few seconds.
TRIAL_PARAMS = 300_000_000
# What the blocks of a smaller model save is counted by nobody: that takes seconds, and memory is no
# concern there.
COUNTED_PARAMS = 300_000_000


def choose_plan(
    config: RunConfig, environ: Mapping[str, str] | None = None, goal: Goal = "fastest"
) -> Plan:
    """The plan for `config`, with a reason for every choice. Starts nothing.

    `environ` is this process's own unless given.
    """
    source = read_model_config(config.model)
    model = with_adapters(measure_model(config, source), config, source)
    pretrained = choose_weights(config, source).value != "random"
    validate_positions(config, model, source.hf_config, pretrained=pretrained)
    _validate_attention(config, model, source)

    def plan_on(cluster: ClusterSpec) -> Plan:
        linked = with_measured_links(cluster)
        return choose.choose_plan(config, model, linked, source, rates_for(linked))

    plan = choose_for(goal, resolve_cluster(config.cluster, environ), plan_on)
    warnings = [
        *warn_of_positions(config, model),
        *_warn_of_blocks(model),
        *warn_of_axes(plan.decided, plan.cluster.device),
    ]
    plan = _with_epochs(replace(plan, warnings=[*plan.warnings, *warnings]))
    return plan if config.data.format == "text" else _with_share(plan)


def _with_epochs(plan: Plan) -> Plan:
    """The same plan with the steps that its epochs will take, by the size of the data. Ranks count
    them exactly."""
    epochs = plan.config.train.epochs
    if epochs is None:
        return plan
    size = size_of_data(plan.config.data, plan.decided.tokenizer)
    if size.tokens is None:
        why = f"train.epochs={epochs:g} becomes steps once the data was read: {size.words}"
        return replace(plan, warnings=[*plan.warnings, why])
    return plan.with_steps(max(1, math.ceil(epochs * size.tokens / plan.tokens_per_step)))


def _with_share(plan: Plan) -> Plan:
    """The same plan, which says how much of conversations is trained on."""
    from shardwise.data.survey import share_in_words

    packing, config = plan.choices["packing"], plan.config
    why = f"{packing.why}; {share_in_words(config.data, config.model)}"
    return plan.with_choices(packing=replace(packing, why=why))


def measure_model(config: RunConfig, source: ModelSource) -> ModelSpec:
    """The model's sizes: computed from config.json where the family is known, else counted from a
    model without weights, which imports torch, and kept for the next time."""
    name, hf_config = config.model.name, source.hf_config
    try:
        return spec_from_config(name, hf_config)
    except UnknownFamily:
        if config.model.trust_remote_code:
            # Its code may change, so nothing that was counted from it is kept.
            return count_model(name, hf_config, str(source.directory))
        known = shipped_spec(name, hf_config) or kept_spec(name, hf_config)
        if known is None:
            known = count_model(name, hf_config)
            keep_spec(known, hf_config)
        return known


def with_adapters(model: ModelSpec, config: RunConfig, source: ModelSource) -> ModelSpec:
    """The sizes of a model with the adapters that the configuration asks for.

    They are counted from a model without weights, which imports torch: patterns are matched against
    the names of its layers. What was counted is kept for the next time.
    """
    if config.adapter.method == "none":
        return model
    shipped = shipped_by(config, source)
    base, why = choose_format(config, shipped)
    unpacked = shipped.unpacked if shipped is not None and base in SHIPPED else ()
    code_dir = str(source.directory) if config.model.trust_remote_code else None
    about = (model, source.hf_config, code_dir)
    try:
        adapted = _count_adapted(*about, replace(config.adapter, base=base), unpacked)
    except UserError as error:
        if config.adapter.base != "auto" or base == "param":
            raise
        # A family whose experts or widths do not suit the format of its files trains all the same.
        adapted = _count_adapted(*about, replace(config.adapter, base="param"), ())
        why = f"{error.what}, because {error.why}"
    if adapted.adapter is None:
        return adapted
    return replace(adapted, adapter=replace(adapted.adapter, why_packing=why))


def _count_adapted(
    model: ModelSpec,
    hf_config: Mapping[str, Any],
    code_dir: str | None,
    adapter: AdapterConfig,
    unpacked: tuple[str, ...],
) -> ModelSpec:
    sizes: list[Any] = [adapter.targets, adapter.rank, adapter.dora, adapter.dropout > 0]
    sizes += [adapter.modules_to_save, adapter.base, unpacked]
    key = {"model": hf_config, "adapter": sizes}
    known = None if code_dir else kept_spec(model.name, key)
    if known is not None:
        return known
    from shardwise.model.build import build_on_meta
    from shardwise.model.lora import count_adapters

    # Nothing is computed, so `eager`, which every family has, will do.
    empty = build_on_meta(hf_config, attention="eager", code_dir=code_dir)
    counted = count_adapters(empty, adapter, model.experts_per_token, unpacked)
    adapted = _with_kinds(replace(model, adapter=counted, kinds=()), hf_config, code_dir, adapter)
    if code_dir is None:
        keep_spec(adapted, key)
    return adapted


def count_model(name: str, hf_config: Mapping[str, Any], code_dir: str | None = None) -> ModelSpec:
    """The sizes of any family that transformers can build, and what its blocks save."""
    from shardwise.model.counted_sizes import count_on_meta

    return _with_kinds(count_on_meta(name, hf_config, code_dir=code_dir), hf_config, code_dir)


def _with_kinds(
    spec: ModelSpec,
    hf_config: Mapping[str, Any],
    code_dir: str | None,
    adapter: AdapterConfig | None = None,
) -> ModelSpec:
    """The same with what its blocks save and compute, where the model is large enough."""
    if spec.total_params < COUNTED_PARAMS:
        return spec
    from shardwise.parallel.saved import CannotCount, count_saved

    try:
        with shown_progress(f"counting what the blocks of {spec.name} save and compute, once"):
            kinds = count_saved(
                hf_config, attentions=spec.attentions, code_dir=code_dir, adapter=adapter
            )
    except CannotCount as reason:
        return replace(spec, uncounted=str(reason))
    return replace(spec, kinds=kinds)


def _validate_attention(config: RunConfig, model: ModelSpec, source: ModelSource) -> None:
    """Try a family that had to be counted with an attention of ours that the user names."""
    wanted = config.model.attention
    is_ours = wanted in ("flash_attention_4", "flex_attention") and wanted in model.attentions
    if model.source != "counted" or not is_ours:
        return
    from shardwise.model.attention_trial import validate_attention

    code_dir = str(source.directory) if config.model.trust_remote_code else None
    validate_attention(wanted, source.hf_config, config.data.seq_len, code_dir=code_dir)


def _warn_of_blocks(model: ModelSpec) -> list[str]:
    if not model.uncounted:
        return []
    return [
        "memory and speed are those of a Llama of this shape, because what the blocks save for "
        f"backward and compute could not be counted: {model.uncounted}"
    ]


def validate_family(plan: Plan) -> None:
    """Try an unknown family before ranks start, if this process can hold the model.

    Ranks try larger models themselves, on their shards.
    """
    if plan.model.source != "counted" or plan.model.total_params > TRIAL_PARAMS:
        return
    import torch

    from shardwise.model.build import build_model
    from shardwise.training.trial import validate_trainable

    code_dir = plan.model_dir if plan.config.model.trust_remote_code else None
    model = build_model(plan.hf_config, attention=None, code_dir=code_dir, device="cpu")
    try:
        validate_trainable(model, plan, torch.device("cpu"))
    except RuntimeError as error:
        raise UserError(
            f"transformers cannot run a {plan.model.model_type} model of these sizes",
            why=brief(error),
            fix="mend config.json or model.overrides; a model of `shardwise config ls` shows what "
            "such a file holds",
        ) from error


def fetch_weights(config: RunConfig) -> None:
    """Download a hub model's weights, once, before ranks start."""
    source = read_model_config(config.model)
    elsewhere = source.kind != "hub" or source.weights_from is not None
    if elsewhere or config.model.weights == "random" or source.has_all_weights:
        return
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> None:
        snapshot_download(
            config.model.name,
            revision=config.model.revision,
            allow_patterns=list(patterns),
            # Weights in folders are other forms of the same (gpt-oss has `original`).
            ignore_patterns=["*/*.safetensors"],
        )

    fetch("*.safetensors", "*.json", "*.model", "tokenizer*", "*.py")
    # Many repositories hold the same weights in two formats. The older one is fetched only where
    # the other is missing.
    if not source.has_all_weights:
        fetch("pytorch_model*.bin")


def validate_machine(cluster: ClusterSpec, command: str = "train FILE") -> None:
    """Raise where this machine is not the cluster that `shardwise COMMAND` is meant for."""
    if cluster.num_nodes > 1:
        raise UserError(
            f"cluster {cluster.name} has {cluster.num_nodes} nodes; this command starts ranks on "
            "one machine",
            fix="start it on every node: shardwise torchrun --nnodes "
            f"{cluster.num_nodes} --nproc-per-node {cluster.devices_per_node} --rdzv-backend c10d "
            f"--rdzv-endpoint HOST:29500 -m shardwise {command}",
            code=ExitCode.ENVIRONMENT,
        )
    here = probe_cluster()
    if cluster.device == "cuda" and (
        here.device != "cuda" or here.devices_per_node < cluster.devices_per_node
    ):
        found = f"{here.devices_per_node} x {here.device_name}"
        raise UserError(
            f"cluster {cluster.name} needs {cluster.devices_per_node} GPUs; this machine has "
            f"{found if here.device == 'cuda' else 'none that nvidia-smi shows'}",
            fix="write cluster.name=local to use what is here, or cluster.name=2xCPU to try it "
            "without GPUs; `shardwise plan` works for any cluster from anywhere",
            code=ExitCode.ENVIRONMENT,
        )


def validate_sinks(config: RunConfig) -> None:
    """Raise where a sink is asked for that this installation does not have."""
    if config.observe.wandb != "off" and find_spec("wandb") is None:
        raise UserError(
            f"observe.wandb={config.observe.wandb} needs wandb, which is not installed",
            fix="pip install 'shardwise[wandb]', or write observe.wandb=off",
            code=ExitCode.ENVIRONMENT,
        )
