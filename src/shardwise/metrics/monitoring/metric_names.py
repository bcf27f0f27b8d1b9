"""Every metric that a run exports: its name, kind and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The endpoint's own label. `job` is taken: Prometheus gives it to every target.
JOB = "job_name"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series; `labels` come after `job_name`."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()


STEP_DURATION = Metric(
    "fsdp_step_duration_seconds", "gauge", "Mean time of an optimizer step, last window.", ("rank",)
)
DATA_WAIT = Metric(
    "training_data_wait_ratio", "gauge", "Share of the last window spent on data.", ("rank",)
)
MEMORY = Metric(
    "training_memory_peak_bytes", "gauge", "Peak device memory of this rank.", ("rank", "state")
)
MEMORY_CAPACITY = Metric(
    "training_memory_capacity_bytes", "gauge", "Device memory of one rank.", ("rank",)
)
LAST_STEP = Metric(
    "training_last_step_timestamp_seconds",
    "gauge",
    "When the last step was logged, or the ranks started.",
    ("rank",),
)
LOG_INTERVAL = Metric(
    "training_log_interval_seconds", "gauge", "Time between logged steps, expected.", ("rank",)
)
GRAD_NORM = Metric("fsdp_grad_norm", "gauge", "Global gradient norm before clipping, last step.")
LOSS = Metric("training_loss", "gauge", "Mean loss per token, last window.")
AUX_LOSS = Metric(
    "training_router_aux_loss", "gauge", "Load-balancing loss of routers, last window."
)
Z_LOSS = Metric("training_router_z_loss", "gauge", "Z-loss of routers, last window.")
EXPERT_LOAD = Metric(
    "training_expert_load_ratio",
    "gauge",
    "Tokens of the busiest expert over the mean of its block, last window.",
)
EXPERT_LEAST = Metric(
    "training_expert_least_load_ratio",
    "gauge",
    "Tokens of the idlest expert over the mean of its block, last window.",
)
EXPERT_ENTROPY = Metric(
    "training_expert_entropy_ratio",
    "gauge",
    "Entropy of the expert of a token over its maximum, last window.",
)
EXPERT_DROPPED = Metric(
    "training_expert_dropped_tokens", "gauge", "Choices that no expert computed, last window."
)
EVAL_LOSS = Metric("training_eval_loss", "gauge", "Loss on held-out text, last evaluation.")
LEARNING_RATE = Metric("training_learning_rate", "gauge", "Learning rate of the last step.")
MFU = Metric("training_mfu", "gauge", "Model FLOPs utilisation, 0 to 1, last window.")
HFU = Metric("training_hfu", "gauge", "Hardware FLOPs utilisation with recompute, 0 to 1.")
MFU_PLANNED = Metric("training_mfu_planned", "gauge", "The MFU that the plan foresaw.")
TOKENS_PER_S = Metric("training_tokens_per_second", "gauge", "Tokens per second of one device.")
STEP = Metric("training_step", "gauge", "Optimizer steps done.")
STEPS_PLANNED = Metric("training_planned_steps", "gauge", "Optimizer steps of the whole run.")
TOKENS = Metric("training_tokens", "counter", "Tokens read by the whole run.")
PRODUCTIVE = Metric(
    "training_productive_seconds",
    "counter",
    "Time of steps that were made for the first time, without warm-up and waiting for data.",
)
NONFINITE = Metric("training_nonfinite_batches", "counter", "Batches without a finite gradient.")
ROLLBACKS = Metric("training_rollbacks", "counter", "Times the run went back to a checkpoint.")
RESTARTS = Metric("training_restarts", "counter", "Times the launcher started the ranks again.")
CHECKPOINTS = Metric("training_checkpoints", "counter", "Checkpoints that were published.")
CHECKPOINT_FAILURES = Metric("training_checkpoint_failures", "counter", "Saves that failed.")
CHECKPOINTS_DAMAGED = Metric(
    "training_checkpoints_damaged", "counter", "Checkpoints found damaged and quarantined."
)
CHECKPOINT_SECONDS = Metric(
    "training_checkpoint_duration_seconds", "gauge", "Parts of the last save.", ("phase",)
)
CHECKPOINT_STEP = Metric(
    "training_last_checkpoint_step", "gauge", "Step of the newest checkpoint, or of the start."
)
CHECKPOINT_INTERVAL = Metric(
    "training_checkpoint_interval_steps", "gauge", "Steps between checkpoints; absent for none."
)
STRAGGLER = Metric(
    "fsdp_straggler_behind_seconds", "gauge", "How far the slowest rank is behind.", ("rank",)
)
COLLECTIVE_RATE = Metric(
    "fsdp_collective_bus_bytes_per_second",
    "gauge",
    "Bus bandwidth of collectives, last measurement.",
    ("kind", "phase"),
)
BUBBLE = Metric(
    "training_pipeline_bubble_ratio",
    "gauge",
    "Share of forwards and backwards in which ranks of a pipeline wait, last window.",
)
BUBBLE_PLANNED = Metric(
    "training_pipeline_bubble_planned_ratio", "gauge", "The share that the plan foresaw."
)
STAGE_SECONDS = Metric(
    "training_pipeline_busy_seconds",
    "gauge",
    "Time of a step in which a rank of a pipeline computes.",
    ("stage",),
)
STAGE_MEMORY = Metric(
    "training_pipeline_memory_peak_bytes",
    "gauge",
    "Peak device memory of a rank of a pipeline.",
    ("stage", "state"),
)
ALL_GATHER = Metric("fsdp_allgather_seconds", "histogram", "Time of all-gathers.")
REDUCE_SCATTER = Metric("fsdp_reducescatter_seconds", "histogram", "Time of reduce-scatters.")
ALL_REDUCE = Metric("fsdp_allreduce_seconds", "histogram", "Time of all-reduces.")

# The kinds of collectives that have a histogram, under the names that events use.
HISTOGRAMS = {
    "all_gather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
}

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
