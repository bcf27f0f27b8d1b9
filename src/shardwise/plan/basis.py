"""Decisions that depend on neither mesh nor batch. All candidates share them."""

from __future__ import annotations

from math import log2

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.adam import choose_offload_optimizer
from shardwise.plan.adapted_parts import choose_adapter
from shardwise.plan.attention_kernel import choose_attention
from shardwise.plan.decisions import Choice, Choices
from shardwise.plan.expert_format import choose_experts
from shardwise.plan.float8_rules import choose_linear
from shardwise.plan.frozen_base import choose_base
from shardwise.plan.given import decide
from shardwise.plan.planned_objective import choose_kl_term, choose_objective
from shardwise.plan.router_losses import choose_router_aux_loss, choose_router_z_loss
from shardwise.plan.stage_cuts import splits_backward
from shardwise.units import format_bytes


def choose_basis(config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> Choices:
    """One choice for each of them, by the name of the decision."""
    on_gpu, memory = cluster.device == "cuda", config.memory
    param, why_param = _best_format(cluster)
    has_parts = splits_backward(config)
    compiles = on_gpu and not has_parts
    compiled = compiles if memory.compile == "auto" else memory.compile
    chunk = loss_slice_tokens(model, compiled=compiled)
    why_compile = "fuses norms, rope and activations"
    if not on_gpu:
        why_compile = "compiling takes longer than it saves"
    elif has_parts:
        why_compile = "zero_bubble runs backward in two parts, and a compiled block has one"
    why_state = "bf16 rounds Adam's moments stochastically, so it is not chosen unless asked for"
    why_fused = f"it supports {'host' if memory.offload == 'cpu' else cluster.device} parameters"
    wanted = decide(config, "param_dtype", param, why_param)
    return {
        "adapter": choose_adapter(config, model, cluster),
        "base": choose_base(config, model),
        "objective": choose_objective(config),
        "kl_term": choose_kl_term(config),
        "param_dtype": wanted,
        "linear": choose_linear(config, model, cluster),
        "experts": choose_experts(config, model, cluster, param_dtype=wanted.value),
        "reduce_dtype": decide(
            config, "reduce_dtype", "fp32", "sums over many ranks lose bits in narrower formats"
        ),
        "output_dtype": decide(
            config, "output_dtype", None, "the dtype of the last layer's output"
        ),
        "compile": decide(
            config,
            "compile",
            compiles,
            why_compile,
        ),
        "offload": _choose_offload(config, model, cluster),
        "overlap_optimizer": _choose_overlap(config),
        "offload_optimizer": choose_offload_optimizer(config, model, cluster),
        "offload_activations": decide(
            config,
            "offload_activations",
            0.0,
            "not asked for: measured with one GPU of a host, not with all at once",
        ),
        "attention": choose_attention(
            config, model, cluster, param_dtype=wanted.value, compiled=compiled
        ),
        "loss": _choose_loss(config, model),
        "loss_chunk_tokens": decide(
            config, "loss_chunk_tokens", chunk, f"{chunk} x {model.vocab_size} logits at a time"
        ),
        "optimizer": decide(config, "optimizer", "adamw", "what most recipes are made for"),
        "fused_optimizer": _choose_fused(config, why_fused),
        "optimizer_state": decide(config, "optimizer_state", "fp32", why_state),
        "decay_embeddings": decide(config, "decay_embeddings", True, "like all other matrices"),
        "kernels": _choose_kernels(config, cluster),
        "router_aux_loss": choose_router_aux_loss(config, model),
        "router_z_loss": choose_router_z_loss(config, model),
    }


def loss_slice_tokens(model: ModelSpec, *, compiled: bool) -> int:
    """Tokens of one slice of the chunked loss: a power of two.

    With the compiler and a head that learns there are at least as many as a hidden state has
    numbers: their logits fit where the head's gradient has a copy later. Each slice adds to that
    gradient in fp32, so fewer slices move fewer bytes.
    """
    tokens = narrow_slice_tokens(model.vocab_size, compiled=compiled)
    learns = model.adapter is None
    return max(tokens, 2 ** round(log2(model.hidden_size))) if compiled and learns else tokens


def narrow_slice_tokens(vocab_size: int, *, compiled: bool) -> int:
    """Those of at most 2**29 logits, or half as many without the compiler, because fp32 copies of
    the logits exist then."""
    most = 2**29 if compiled else 2**28
    return max(256, 2 ** ((most // vocab_size).bit_length() - 1))


def offloaded_bytes(model: ModelSpec, cluster: ClusterSpec) -> float:
    """The least host memory of one node that offload takes: the node's share of all states."""
    states = 16 * model.trained_params
    if model.adapter is not None:
        # Other frozen weights are stored in the format that they are computed with.
        states += 2 * (model.total_params - model.adapter.packed_params)
        states += model.adapter.packed_bytes
    return states * min(1.0, cluster.devices_per_node / cluster.world_size)


def _choose_fused(config: RunConfig, why: str) -> Choice[bool]:
    """Whether one kernel updates all parameters."""
    optim = config.optim
    plain = "optim.state=int8" if optim.state == "int8" else ""
    plain = plain or (f"optim.name={optim.name}" if optim.name != "adamw" else "")
    if plain:
        return decide(config, "fused_optimizer", False, f"{plain} is plain torch")
    return decide(config, "fused_optimizer", True, why)


def _choose_overlap(config: RunConfig) -> Choice[bool]:
    """Whether the host updates units beside the next forward."""
    if config.memory.offload == "none":
        return Choice(False, "the optimizer is on the device", "rule")
    if not config.memory.overlap_optimizer:
        return Choice(False, "given", "user")
    if config.optim.fused is False or config.optim.state == "int8":
        return Choice(False, "only torch's fused AdamW is run by a thread of its own", "rule")
    why = "the host updates units in the order of forward, and forward waits for each of them"
    return Choice(True, why, "rule")


def _choose_offload(config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> Choice[bool]:
    if config.memory.offload == "none":
        return Choice(False, "not asked for; it costs 2-3x in speed", "rule")
    needed = format_bytes(offloaded_bytes(model, cluster))
    return Choice(True, f"given; host memory needed on a node: at least {needed}", "user")


def _choose_loss(config: RunConfig, model: ModelSpec) -> Choice[str]:
    if model.whole_logits:
        return decide(config, "loss", "full", f"not chunked: {model.whole_logits}")
    return decide(config, "loss", "chunked", "all logits at once would be the peak of the step")


def _choose_kernels(config: RunConfig, cluster: ClusterSpec) -> Choice[str]:
    if cluster.device == "cuda":
        return decide(config, "kernels", "own", "they move and keep fewer bytes than torch's")
    if config.train.kernels == "own":
        raise UserError(
            f"train.kernels=own needs GPUs, and {cluster.name} has none",
            why="they are written in Triton",
            fix="leave train.kernels out",
        )
    return decide(config, "kernels", "torch", "our kernels are for GPUs")


def _best_format(cluster: ClusterSpec) -> tuple[str, str]:
    name, best = cluster.device_in_words, cluster.usual_format
    if cluster.device == "cpu":
        return best, "the same on every CPU, whether it computes bf16 or not"
    why = {
        "bf16": f"{name} computes bf16",
        "fp16": f"{name} has no bf16 arithmetic; fp16 with dynamic loss scaling",
        "fp32": f"{name} computes neither bf16 nor fp16 fast",
    }
    return best, why[best]
