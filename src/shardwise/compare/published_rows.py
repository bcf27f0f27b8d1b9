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

from shardwise.compare.layout import (
    UnusableRow,
    count_in,
    decisions_of,
    fits_without_recompute,
    in_stages,
    number_in,
)
from shardwise.compare.shapes import Shape, read_shape
from shardwise.compare.traits import Row, Traits, notes_of, read_traits
from shardwise.facts.collective_cost import NETWORK_SHARE, Fabric, fabric_of
from shardwise.facts.counted import preset_spec
from shardwise.facts.flops import flops_per_token, recompute_flops_per_token, recomputed_share
from shardwise.facts.gpus import NODE, GpuSpec, match_gpu
from shardwise.facts.models import ModelSpec
from shardwise.facts.rates import Rates, rates_of
from shardwise.plan.decisions import Decisions, computes_float8

PUBLISHED = Path(__file__).with_name("published_runs.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
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
class SkippedRow:
    """A row that is no run."""

    line: int
    source: str
    why: str
    doubted: bool = False
    """The table itself has doubts about the row."""


@dataclass(slots=True)
class PublishedTable:
    """What a file holds."""

    runs: list[PublishedRun] = field(default_factory=list)
    skipped: list[SkippedRow] = field(default_factory=list)


def read_table(path: Path) -> PublishedTable:
    """Every row of a CSV file, as a run or as a reason."""
    table = PublishedTable()
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for line, raw in enumerate(csv.DictReader(file), start=2):
            row = {key: value.strip() for key, value in raw.items() if isinstance(value, str)}
            try:
                table.runs.append(read_run(line, row))
            except UnusableRow as reason:
                source = row.get("source") or "(no source)"
                doubted = "flag:" in notes_of(row)
                table.skipped.append(SkippedRow(line, source, str(reason), doubted))
    return table


def read_run(line: int, row: Row, known: Shape | None = None) -> PublishedRun:
    """The run that a row describes, or UnusableRow. A known shape needs no columns."""
    if strange := re.search(r"dpo|ppo|grpo|inference", row.get("method", "").lower()):
        raise UnusableRow(f"{strange[0]} is not plain training")
    named = _named_gpu(row)
    gpu = _as_installed(named, row)
    shape = known or _shape(row)
    decided = decisions_of(row)
    if not row.get("activation_ckpt") and not fits_without_recompute(
        row, shape.model, gpu, decided
    ):
        decided = replace(decided, checkpoint_activations="full")
    decided = in_stages(row, decided, shape.model)
    rates = rates_of(gpu)
    fmt = "fp8" if computes_float8(shape.model, decided) else decided.param_dtype
    if not rates.matmul_flops.get(fmt):
        raise UnusableRow(f"{gpu.name} has no {fmt}")
    traits, published = read_traits(row, gpu), _tokens_per_s(row, shape.model, named, decided)
    share = published * _needed_flops(shape.model, decided, traits) / named.peak_flops[fmt]
    if share > 1:
        raise UnusableRow(f"it computes at {share:.0%} of the peak of {named.name}: another card?")
    return PublishedRun(
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
    name, memory = row.get("gpu", ""), number_in(row, "gpu_mem_gb")
    with_memory = None if memory is None else match_gpu(f"{name}-{memory:.0f}GB")
    gpu = with_memory or match_gpu(_CARDS.get(name, name))
    if gpu is None:
        raise UnusableRow(f"GPU {name!r} is not in the catalogue" if name else "gpu is not stated")
    return gpu


def _as_installed(gpu: GpuSpec, row: Row) -> GpuSpec:
    """The card with the power and the memory that the row says or that its source has."""
    memory = number_in(row, "gpu_mem_gb")
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
    ranks, per_node = count_in(row, "n_gpus", NODE), count_in(row, "gpus_per_node", NODE)
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
    heads = count_in(row, "n_heads")
    stated = number_in(row, "n_params")
    shape = read_shape(
        layers=count_in(row, "n_layers"),
        hidden=count_in(row, "d_model"),
        heads=heads,
        kv_heads=count_in(row, "n_kv_heads", heads),
        ffn=count_in(row, "d_ff"),
        vocab=count_in(row, "vocab"),
        positions=count_in(row, "seq_len"),
        stated_params=stated,
    )
    explained = shape.model.total_params / (stated or shape.model.total_params)
    if not 0.8 < explained < 1.25:
        raise UnusableRow(f"its sizes explain {explained:.0%} of its parameters: experts unstated?")
    return shape


def _tokens_per_s(row: Row, model: ModelSpec, gpu: GpuSpec, decided: Decisions) -> float:
    """As published, or worked back from a share of the peak.

    Where only a share is given it is by the convention that nearly all publish: 6 FLOPs a parameter
    plus 12 for each block, channel and token of the whole square of attention, over the dense peak
    of the 16-bit format; hardware shares count the recomputed forward as well.
    """
    if (stated := number_in(row, "tokens_per_s_per_gpu")) is not None:
        return stated
    square = decided.seq_len * model.num_layers * model.num_heads * model.head_dim
    flops = 6 * model.total_params + 12 * square
    recomputed = 8 / 6 if decided.checkpoint_activations == "full" else 1.0
    peak = gpu.peak_flops.get("fp8" if "fp8 peak" in notes_of(row) else decided.param_dtype)
    if peak and (mfu := number_in(row, "mfu_pct")) is not None:
        return mfu / 100 * peak / flops
    if peak and (hfu := number_in(row, "hfu_pct")) is not None:
        return hfu / 100 * peak / (recomputed * flops)
    if (tflops := number_in(row, "model_tflops_per_gpu")) is not None:
        return tflops * 1e12 / flops
    raise UnusableRow("neither tokens per second nor a share of the peak is stated")


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
