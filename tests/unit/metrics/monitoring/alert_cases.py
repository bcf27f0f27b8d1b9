"""A healthy run of some hours as series, one sample a minute, and what goes wrong in each case."""

from __future__ import annotations

from dataclasses import dataclass, field

LABELS = 'job_name="r", instance="node:9630"'
RANK = f'{LABELS}, rank="0"'
MINUTES = 160


def steady(value: float, minutes: int = MINUTES) -> str:
    return f"{value}+0x{minutes}"


def then(before: float, after: float, at: int = 100) -> str:
    """One value up to a minute, another from the next on."""
    return f"{steady(before, at)} {steady(after, MINUTES - at)}"


def buckets(*rises: str) -> dict[str, str]:
    bounds = ("0.1", "0.2", "0.5", "+Inf")
    return {
        f'fsdp_allgather_seconds_bucket{{{LABELS}, le="{bound}"}}': rise
        for bound, rise in zip(bounds, rises, strict=True)
    }


STEP_TIME = f"fsdp_step_duration_seconds{{{RANK}}}"
GRAD_NORM = f"fsdp_grad_norm{{{LABELS}}}"
MFU = f"training_mfu{{{LABELS}}}"
LAST_STEP = f"training_last_step_timestamp_seconds{{{RANK}}}"
LOG_INTERVAL = f"training_log_interval_seconds{{{RANK}}}"
STEP = f"training_step{{{LABELS}}}"
SAVED = f"training_last_checkpoint_step{{{LABELS}}}"
EVERY = f"training_checkpoint_interval_steps{{{LABELS}}}"
PRODUCTIVE = f"training_productive_seconds_total{{{LABELS}}}"
NONFINITE = f"training_nonfinite_batches_total{{{LABELS}}}"
RESTARTS = f"training_restarts_total{{{LABELS}}}"
FAILED_SAVES = f"training_checkpoint_failures_total{{{LABELS}}}"
DAMAGED = f"training_checkpoints_damaged_total{{{LABELS}}}"
DATA_WAIT = f"training_data_wait_ratio{{{RANK}}}"
RESERVED = f'training_memory_peak_bytes{{{RANK}, state="reserved"}}'
ALLOCATED = f'training_memory_peak_bytes{{{RANK}, state="allocated"}}'
CAPACITY = f"training_memory_capacity_bytes{{{RANK}}}"
XID = 'DCGM_FI_DEV_XID_ERRORS{instance="node:9400", gpu="0", Hostname="node"}'
STRAGGLER = f'fsdp_straggler_behind_seconds{{{LABELS}, rank="3"}}'

HEALTHY = {
    STEP_TIME: steady(2.0),
    GRAD_NORM: steady(1.0),
    MFU: steady(0.45),
    LAST_STEP: f"0+60x{MINUTES}",
    LOG_INTERVAL: steady(20.0),
    STEP: f"0+30x{MINUTES}",
    SAVED: f"-100+30x{MINUTES}",
    EVERY: steady(500),
    PRODUCTIVE: f"0+57x{MINUTES}",
    NONFINITE: steady(0),
    RESTARTS: steady(0),
    FAILED_SAVES: steady(0),
    DAMAGED: steady(0),
    DATA_WAIT: steady(0.01),
    RESERVED: steady(70e9),
    ALLOCATED: steady(60e9),
    CAPACITY: steady(80e9),
    XID: steady(0),
    **buckets(*[f"0+600x{MINUTES}"] * 4),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is changed in the healthy run, and which alerts fire at `minute`, all others silent."""

    name: str
    fires: tuple[str, ...]
    changes: dict[str, str] = field(default_factory=dict)
    minute: int = 125


def _slow_gathers(share: float) -> dict[str, str]:
    """From minute 100 on this share of all-gathers takes 200 to 500 ms."""
    fast = 600 * (1 - share)
    quick = f"0+600x100 {600 * 100 + fast}+{fast}x59"
    return buckets(quick, quick, f"0+600x{MINUTES}", f"0+600x{MINUTES}")


CASES = (
    Case("a healthy run", ()),
    Case("steps 20% slower", ("FSDPStepTimeRegression",), {STEP_TIME: then(2.0, 2.4)}),
    Case("steps 5% slower", (), {STEP_TIME: then(2.0, 2.1)}),
    Case("steps slower for five minutes", (), {STEP_TIME: then(2.0, 2.4, at=120)}),
    Case("one all-gather in twenty slow", ("FSDPAllGatherP99",), _slow_gathers(0.05)),
    Case("one all-gather in a thousand slow", (), _slow_gathers(0.001)),
    Case("a gradient spike", ("FSDPGradNormSpike",), {GRAD_NORM: then(1.0, 20.0)}),
    Case("a gradient five times its mean", (), {GRAD_NORM: then(1.0, 5.0)}),
    Case("MFU down by a third", ("TrainingMFURegression",), {MFU: then(0.45, 0.3)}, 155),
    Case("MFU down by a tenth", (), {MFU: then(0.45, 0.405)}, 155),
    Case("no step any more", ("TrainingHang",), {LAST_STEP: f"0+60x100 {steady(6000, 59)}"}),
    Case("no step after the start", ("TrainingHang",), {LAST_STEP: steady(0), LOG_INTERVAL: "_"}),
    Case(
        "steps that take minutes",
        (),
        {LAST_STEP: f"0+60x100 {steady(6000, 59)}", LOG_INTERVAL: steady(600)},
    ),
    Case("a slow rank", ("TrainingStraggler",), {STRAGGLER: steady(0.5)}),
    Case("a rank a little behind", (), {STRAGGLER: steady(0.12)}),
    Case(
        "a checkpoint that stalls",
        ("TrainingCheckpointStale",),
        {SAVED: f"-100+30x100 {steady(2800, 59)}"},
    ),
    Case("a checkpoint under way", (), {SAVED: f"-100+30x100 {steady(2900, 59)}"}, 112),
    Case("no checkpoints wanted", (), {SAVED: "_", EVERY: "_"}),
    Case("a save that failed", ("TrainingCheckpointFailed",), {FAILED_SAVES: then(0, 1)}),
    Case("a damaged checkpoint", ("TrainingCheckpointFailed",), {DAMAGED: then(0, 1)}),
    Case(
        "half of the time lost",
        ("TrainingGoodputLow",),
        {PRODUCTIVE: f"0+57x40 {57 * 40 + 30}+30x119"},
    ),
    Case("a slow start", (), {PRODUCTIVE: f"0+10x{MINUTES}"}, 50),
    Case("gradients that are not finite", ("TrainingNonFinite",), {NONFINITE: then(0, 2, at=120)}),
    Case(
        "two restarts in an hour",
        ("TrainingRestartLoop",),
        {RESTARTS: f"{steady(0, 100)} {steady(1, 9)} {steady(2, 49)}"},
    ),
    Case("one restart", (), {RESTARTS: then(0, 1)}),
    Case("waiting for data", ("TrainingDataStarved",), {DATA_WAIT: then(0.01, 0.3)}),
    Case("waiting for data for ten minutes", (), {DATA_WAIT: then(0.01, 0.3, at=115)}),
    Case("memory almost full", ("TrainingMemoryNearLimit",), {RESERVED: steady(79e9)}),
    Case("a GPU error", ("GPUXIDError",), {XID: then(0, 79)}),
)
