"""How a row says that its run was laid out: fields as numbers, and the decisions they make."""

from __future__ import annotations

import re
from dataclasses import replace

from shardwise.compare.traits import Row, has_light_states, notes_of
from shardwise.facts.gpus import GpuSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Decisions
from shardwise.plan.stage_cuts import balanced_blocks, head_in_blocks


class UnusableRow(Exception):
    """A row that no estimate can be made for; the text says why."""


def number_in(row: Row, key: str) -> float | None:
    """A field as a number above zero, None where it is empty or something else."""
    try:
        value = float(row.get(key, "").replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def count_in(row: Row, key: str, otherwise: int | None = None) -> int:
    """A field as a whole number; UnusableRow where it has none and nothing is usual."""
    value = number_in(row, key)
    if value is not None:
        return max(1, round(value))
    if otherwise is None:
        text = row.get(key, "")
        raise UnusableRow(f"{key} is {text!r}" if text else f"{key} is not stated")
    return otherwise


def decisions_of(row: Row) -> Decisions:
    """The layout as the planner would have decided it."""
    tensor, pipeline, context = (count_in(row, key, 1) for key in ("tp", "pp", "cp"))
    replicas = count_in(row, "dp_replicate", 1)
    left = count_in(row, "n_gpus", 1) // (tensor * pipeline * context * replicas)
    shard = count_in(row, "dp_shard", max(1, left))
    strategy = row.get("strategy", "").upper()
    if strategy in ("ZERO1", "DDP", "NO_SHARD"):
        # ZeRO-1 scatters gradients and gathers parameters: an all-reduce in two halves.
        replicas, shard = replicas * shard, 1
    notes, precision = notes_of(row), row.get("precision", "").lower()
    micro_batch, accumulation = _batch(row, pipeline)
    chunk, interleaved = re.search(r"loss chunk (\d+)", notes), re.search(r"vp (\d+)", notes)
    decided = Decisions(
        replicate=replicas,
        shard=shard,
        reshard_after_forward=not (strategy in ("SHARD_GRAD_OP", "ZERO2") or pipeline > 1),
        param_dtype=next((fmt for fmt in ("fp16", "fp32") if precision.startswith(fmt)), "bf16"),
        reduce_dtype="bf16" if "reduce bf16" in notes else "fp32",
        checkpoint_activations=_checkpointing(row),
        # Hand-fused kernels do what the compiler does.
        compile=row.get("compile", "").lower() == "yes" or "fused norm" in notes,
        offload="params" in row.get("cpu_offload", "").lower(),
        micro_batch=micro_batch,
        accumulation=accumulation,
        seq_len=count_in(row, "seq_len"),
        loss="chunked" if chunk else "full",
        loss_chunk_tokens=int(chunk[1]) if chunk else 0,
        accumulate="unsharded" if pipeline > 1 else "sharded",
        linear="float8" if "fp8" in precision else "param",
        float8_gather=True,
        kernels="torch",
        tensor=tensor,
        context=context,
        expert=count_in(row, "ep", 1),
        pipeline=pipeline,
        pipeline_chunks=int(interleaved[1]) if interleaved else 1 + ("interleaved" in notes),
    )
    if decided.tokens < 1:
        raise UnusableRow("there is less than one token for each rank")
    return decided


def in_stages(row: Row, decided: Decisions, model: ModelSpec) -> Decisions:
    """With the blocks of each stage, which no row states: as its stack divides them."""
    if decided.pipeline == 1:
        return decided
    layers, stages = model.num_layers, decided.pipeline * decided.pipeline_chunks
    if stages > layers:
        raise UnusableRow(f"{layers} blocks do not make {stages} stages")
    # torchtitan's and Megatron's stages are equal, whatever the head takes. Where blocks do not
    # divide, the head counts as one. nanotron goes by FLOPs.
    head = 0.0 if layers % stages == 0 else 1.0
    if "nanotron" in row.get("source", "").lower():
        head = head_in_blocks(model, decided.seq_len)
    blocks = balanced_blocks(layers, stages, head)
    return replace(
        decided,
        pipeline_schedule="1f1b" if decided.pipeline_chunks == 1 else "interleaved_1f1b",
        pipeline_blocks="+".join(map(str, blocks)),
        # Stacks with both axes send each token once, whatever the rows call it.
        sequence_parallel=decided.tensor > 1,
    )


def _batch(row: Row, pipeline: int) -> tuple[int, int]:
    """(micro-batch, number of them). Where a pipeline's split is a guess of the table's, it is as
    many as there are stages, which is what schedules default to."""
    micro_batch, accumulation = count_in(row, "micro_batch"), count_in(row, "grad_accum", 1)
    if pipeline > 1 and "microbatch size not stated" in notes_of(row):
        return max(1, micro_batch * accumulation // pipeline), pipeline
    return micro_batch, accumulation


def _checkpointing(row: Row) -> str | float:
    mode = row.get("activation_ckpt", "").lower()
    if mode.startswith("selective"):
        every_other = re.search(r"selective layer|every (2nd|second|other) layer", notes_of(row))
        return 0.5 if every_other else "selective"
    return "full" if mode.startswith("full") else "none"


def fits_without_recompute(row: Row, model: ModelSpec, gpu: GpuSpec, decided: Decisions) -> bool:
    """Whether the usual states and all activations would have had room; asked where the row does
    not say what was recomputed."""
    lora, light = "lora" in row.get("method", "").lower(), has_light_states(row)
    split = decided.replicate if row.get("strategy", "").upper() == "ZERO1" else 1
    state_bytes = 2 if lora else 6 if light else 6 + 10 / split
    params = model.total_params / (decided.shard * decided.tensor * decided.pipeline)
    in_flight = min(decided.pipeline, decided.accumulation) * decided.tokens / decided.tensor
    channels = 10 * model.hidden_size + 4 * model.ffn_size
    kept = 2 * in_flight * channels * model.num_layers / decided.pipeline
    logits = 12 * decided.tokens * model.vocab_size / decided.tensor
    return state_bytes * params + kept + logits < 0.95 * gpu.memory_bytes
