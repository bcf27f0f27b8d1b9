"""Rows of published runs, turned into what the planner would have been asked.

A row says how a run was laid out; nothing here looks at which run it is. What a row leaves out is
taken as usual where there is a usual (eight devices a node, no accumulation); where there is none
the row is skipped and the reason is kept. Of the notes only words that name a feature count.
"""

from __future__ import annotations

import csv
import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from foresight_shapes import Shape, read_shape
from foresight_traits import Row, Traits, has_light_states, notes_of, read_traits
from shardwise.facts.counted import preset_spec
from shardwise.facts.fabric import NETWORK_SHARE, Fabric, fabric_of
from shardwise.facts.flops import flops_per_token, recompute_flops_per_token, recomputed_share
from shardwise.facts.gpus import NODE, GpuSpec, match_gpu
from shardwise.facts.models import ModelSpec
from shardwise.facts.rates import Rates, rates_of
from shardwise.plan.decisions import Decisions, computes_float8


class Unusable(Exception):
    """A row that no estimate can be made for; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run: the question, and its answer."""

    line: int
    label: str
    source: str
    model: ModelSpec
    gpu: GpuSpec
    fabric: Fabric
    decided: Decisions
    rates: Rates
    traits: Traits
    gated: bool
    """The feed-forward is gated, as in all models with RMSNorm and rope."""

    published: float
    """Tokens per second and GPU."""

    doubted: bool
    """The table itself has doubts about the row."""

    @property
    def key(self) -> str:
        """The same for the same run in another file."""
        text = f"{self.source}|{self.label}|{self.published:g}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is no run."""

    line: int
    source: str
    why: str


@dataclass(slots=True)
class Table:
    """What a file holds."""

    runs: list[Run] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def read_table(path: Path) -> Table:
    """Every row of a CSV file, as a run or as a reason."""
    table = Table()
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for line, raw in enumerate(csv.DictReader(file), start=2):
            row = {key: value.strip() for key, value in raw.items() if isinstance(value, str)}
            try:
                table.runs.append(read_run(line, row))
            except Unusable as reason:
                source = row.get("source") or "(no source)"
                table.skipped.append(Skipped(line, source, str(reason)))
    return table


def read_run(line: int, row: Row) -> Run:
    """The run that a row describes, or Unusable."""
    if strange := re.search(r"dpo|ppo|grpo|inference", row.get("method", "").lower()):
        raise Unusable(f"{strange[0]} is not plain training")
    named = _named_gpu(row)
    gpu = _as_installed(named, row)
    shape = _shape(row)
    decided = _decisions(row)
    if not row.get("activation_ckpt") and not _fits_without_recompute(
        row, shape.model, gpu, decided
    ):
        decided = replace(decided, checkpoint_activations="full")
    rates = rates_of(gpu)
    fmt = "fp8" if computes_float8(shape.model, decided) else decided.param_dtype
    if not rates.matmul_flops.get(fmt):
        raise Unusable(f"{gpu.name} has no {fmt}")
    traits, published = read_traits(row, gpu), _tokens_per_s(row, shape.model, named, decided)
    share = published * _needed_flops(shape.model, decided, traits) / named.peak_flops[fmt]
    if share > 1:
        raise Unusable(f"it computes at {share:.0%} of the peak of {named.name}: another card?")
    return Run(
        line=line,
        label=_label(row, decided),
        source=row.get("source") or "(no source)",
        model=shape.model,
        gpu=gpu,
        fabric=_fabric(row, named),
        decided=decided,
        rates=rates,
        traits=traits,
        gated=shape.gated,
        published=published,
        doubted="flag:" in notes_of(row),
    )


def _needed_flops(model: ModelSpec, decided: Decisions, traits: Traits) -> float:
    """FLOPs of one token that no software can save; a frozen model's weights get no gradients."""
    again = recomputed_share(decided.checkpoint_activations)
    flops = flops_per_token(model, decided.seq_len)
    flops += recompute_flops_per_token(model, decided.seq_len, again)
    return flops - 2.0 * model.matmul_params_per_token * traits.frozen


def _number(row: Row, key: str) -> float | None:
    """A field as a number above zero, None where it is empty or something else."""
    try:
        value = float(row.get(key, "").replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _count(row: Row, key: str, otherwise: int | None = None) -> int:
    value = _number(row, key)
    if value is not None:
        return max(1, round(value))
    if otherwise is None:
        text = row.get(key, "")
        raise Unusable(f"{key} is {text!r}" if text else f"{key} is not stated")
    return otherwise


# What the table calls a card, where the catalogue's own names do not cover it.
_CARDS = {
    "A6000": "RTX-A6000",
    "A6000Ada": "RTX-6000-Ada",
    "RTX3090": "RTX-3090",
    "RTX4090": "RTX-4090",
    "RTX5090": "RTX-5090",
}
# The H100 of Meta's servers, which torchtitan's and torchao's own tables are from: HBM2e, 500 W
# instead of 700. What less power leaves of the peak is chosen so that one profile explains these
# and cards of full power.
_META_MEMORY_GB, _META_BANDWIDTH, _META_SHARE = (94, 95, 96), 2.4e12, 0.85
_POWER_LIMITED_SHARE = 0.72


def _named_gpu(row: Row) -> GpuSpec:
    name, memory = row.get("gpu", ""), _number(row, "gpu_mem_gb")
    with_memory = None if memory is None else match_gpu(f"{name}-{memory:.0f}GB")
    gpu = with_memory or match_gpu(_CARDS.get(name, name))
    if gpu is None:
        raise Unusable(f"GPU {name!r} is not in the catalogue" if name else "gpu is not stated")
    return gpu


def _as_installed(gpu: GpuSpec, row: Row) -> GpuSpec:
    """The card with the power and the memory that the row says or that its source has."""
    memory = _number(row, "gpu_mem_gb")
    unsaid = memory is None and "torchao" in row.get("source", "").lower()
    if gpu.name == "H100" and (unsaid or memory in _META_MEMORY_GB):
        return replace(
            gpu,
            peak_flops=_scaled(gpu, _META_SHARE),
            memory_bandwidth=_META_BANDWIDTH,
        )
    if "power-limited" in notes_of(row):
        return replace(gpu, peak_flops=_scaled(gpu, _POWER_LIMITED_SHARE))
    return gpu


def _scaled(gpu: GpuSpec, share: float) -> dict[str, float]:
    return {fmt: share * peak for fmt, peak in gpu.peak_flops.items()}


def _fabric(row: Row, gpu: GpuSpec) -> Fabric:
    """Links as the row states them: network cards a node or a GPU, else what is usual."""
    ranks, per_node = _count(row, "n_gpus", NODE), _count(row, "gpus_per_node", NODE)
    domain = min(ranks, max(per_node, gpu.nvlink_domain if gpu.nvlink_domain > NODE else 1))
    text = row.get("interconnect", "").lower()
    rate = re.search(r"(?:(\d+)x\D*)?(\d+(?:\.\d+)?)\s*([gt])b(?:ps|it/s|/s)", text)
    if rate is None:
        return fabric_of(gpu, domain)
    gigabits = float(rate[2]) * int(rate[1] or 1) * (1000 if rate[3] == "t" else 1)
    if "gpu" in text:
        gigabits *= per_node
    return fabric_of(gpu, domain, NETWORK_SHARE * gigabits / 8)


def _shape(row: Row) -> Shape:
    if preset := row.get("preset"):
        # Mixtures of experts: the columns have no place for their sizes.
        return Shape(preset_spec(preset), gated=True)
    heads = _count(row, "n_heads")
    stated = _number(row, "n_params")
    shape = read_shape(
        layers=_count(row, "n_layers"),
        hidden=_count(row, "d_model"),
        heads=heads,
        kv_heads=_count(row, "n_kv_heads", heads),
        ffn=_count(row, "d_ff"),
        vocab=_count(row, "vocab"),
        positions=_count(row, "seq_len"),
        stated_params=stated,
    )
    explained = shape.model.total_params / (stated or shape.model.total_params)
    if not 0.8 < explained < 1.25:
        raise Unusable(f"its sizes explain {explained:.0%} of its parameters: experts unstated?")
    return shape


def _decisions(row: Row) -> Decisions:
    tensor, pipeline, context = (_count(row, key, 1) for key in ("tp", "pp", "cp"))
    replicas = _count(row, "dp_replicate", 1)
    left = _count(row, "n_gpus", 1) // (tensor * pipeline * context * replicas)
    shard = _count(row, "dp_shard", max(1, left))
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
        seq_len=_count(row, "seq_len"),
        loss="chunked" if chunk else "full",
        loss_chunk_tokens=int(chunk[1]) if chunk else 0,
        accumulate="unsharded" if pipeline > 1 else "sharded",
        linear="float8" if "fp8" in precision else "param",
        float8_gather=True,
        kernels="torch",
        tensor=tensor,
        context=context,
        expert=_count(row, "ep", 1),
        pipeline=pipeline,
        pipeline_chunks=int(interleaved[1]) if interleaved else 1 + ("interleaved" in notes),
    )
    if decided.tokens < 1:
        raise Unusable("there is less than one token for each rank")
    return decided


def _batch(row: Row, pipeline: int) -> tuple[int, int]:
    """(micro-batch, number of them). Where a pipeline's split is a guess of the table's, it is as
    many as there are stages, which is what schedules default to."""
    micro_batch, accumulation = _count(row, "micro_batch"), _count(row, "grad_accum", 1)
    if pipeline > 1 and "microbatch size not stated" in notes_of(row):
        return max(1, micro_batch * accumulation // pipeline), pipeline
    return micro_batch, accumulation


def _checkpointing(row: Row) -> str | float:
    mode = row.get("activation_ckpt", "").lower()
    if mode.startswith("selective"):
        every_other = re.search(r"selective layer|every (2nd|second|other) layer", notes_of(row))
        return 0.5 if every_other else "selective"
    return "full" if mode.startswith("full") else "none"


def _fits_without_recompute(row: Row, model: ModelSpec, gpu: GpuSpec, decided: Decisions) -> bool:
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


def _tokens_per_s(row: Row, model: ModelSpec, gpu: GpuSpec, decided: Decisions) -> float:
    """As published, or worked back from a share of the peak.

    Where only a share is given it is by the convention that nearly all publish: 6 FLOPs a parameter
    plus 12 for each block, channel and token of the whole square of attention, over the dense peak
    of the 16-bit format; hardware shares count the recomputed forward as well.
    """
    if (stated := _number(row, "tokens_per_s_per_gpu")) is not None:
        return stated
    square = decided.seq_len * model.num_layers * model.num_heads * model.head_dim
    flops = 6 * model.total_params + 12 * square
    recomputed = 8 / 6 if decided.checkpoint_activations == "full" else 1.0
    peak = gpu.peak_flops.get("fp8" if "fp8 peak" in notes_of(row) else decided.param_dtype)
    if peak and (mfu := _number(row, "mfu_pct")) is not None:
        return mfu / 100 * peak / flops
    if peak and (hfu := _number(row, "hfu_pct")) is not None:
        return hfu / 100 * peak / (recomputed * flops)
    if (tflops := _number(row, "model_tflops_per_gpu")) is not None:
        return tflops * 1e12 / flops
    raise Unusable("neither tokens per second nor a share of the peak is stated")


def _label(row: Row, decided: Decisions) -> str:
    split = f"tp{decided.tensor} pp{decided.pipeline} cp{decided.context}"
    parts = [
        row.get("model_family", ""),
        row.get("model_size_label", ""),
        f"{row.get('n_gpus') or '?'}x{row.get('gpu', '?')}",
        f"s{decided.seq_len} mb{decided.micro_batch}x{decided.accumulation}",
        "" if split == "tp1 pp1 cp1" else split,
        row.get("precision", ""),
        f"ac {row.get('activation_ckpt') or '?'}",
        "" if row.get("method") == "pretrain" else row.get("method", ""),
    ]
    return " ".join(part for part in parts if part)
