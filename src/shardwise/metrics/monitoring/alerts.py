"""The alerts, as rows: what is wrong, for how long, what it means and where to look.

Every duration is spelled as Prometheus does it, in texts too, so that all can be scaled alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. `runbook` is the first thing to do about it."""

    name: str
    expr: str
    held: str
    severity: Severity = "warning"
    summary: str
    description: str
    runbook: str
    labels: dict[str, str] = field(default_factory=dict)

    def to_rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.held,
            "labels": {"severity": self.severity, "team": "training", **self.labels},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": self.runbook,
            },
        }


_ON_JOB = "{{ $labels.job_name }}"

# Alerts on figures of steps: time, all-gathers, gradient norm, MFU.
STEP_ALERTS = (
    Alert(
        name="FSDPStepTimeRegression",
        expr="avg_over_time(fsdp:step_time_seconds[5m])\n"
        "  > 1.10 * avg_over_time(fsdp:step_time_seconds[1h] offset 30m)",
        held="10m",
        summary=f"FSDP step time +10% vs 1h baseline on {_ON_JOB}",
        description="Steps of the last 5m take {{ $value | humanizeDuration }} on average.",
        runbook="Compare all-gather p99, data wait and the straggler panel: fabric, data or one "
        "slow rank. RUN/plan.json holds the expected time of a step and of its parts.",
    ),
    Alert(
        name="FSDPAllGatherP99",
        expr="histogram_quantile(0.99, rate(fsdp:allgather_seconds_bucket[5m])) > 0.2",
        held="10m",
        summary=f"FSDP AllGather p99 > 200ms on {_ON_JOB}: fabric or wrap-policy regression",
        description="The slowest 1% of all-gathers take over {{ $value | humanizeDuration }}.",
        runbook="Look for a straggler first: waiting for it counts as time of the collective. "
        "Then NVLink against PCIe bytes; a unit that is the whole model gathers it at once.",
    ),
    Alert(
        name="FSDPGradNormSpike",
        expr="fsdp:grad_norm > 10 * avg_over_time(fsdp:grad_norm[1h] offset 30m)",
        held="5m",
        summary=f"FSDP grad-norm spike on {_ON_JOB}: investigate LR or data corruption",
        description="The gradient norm is {{ $value | humanize }}, over ten times its mean.",
        runbook="Lower optim.lr or lengthen optim.warmup_steps; events.jsonl names the batches of "
        "the steps, so that the data can be read.",
    ),
    Alert(
        name="TrainingMFURegression",
        expr="avg_over_time(training_mfu[30m])\n"
        "  / avg_over_time(training_mfu[6h] offset 30m)\n"
        "  < 0.85",
        held="30m",
        summary=f"MFU of {_ON_JOB} is over 15% below its 6h baseline",
        description="MFU is {{ $value | humanizePercentage }} of what it was.",
        runbook="As for FSDPStepTimeRegression; then clocks and temperatures of the GPUs.",
    ),
)

_LATE = "time() - training_last_step_timestamp_seconds"
_UNSAVED = "training_step - training_last_checkpoint_step"
_HOUR_OF_RESTARTS = "training_restarts_total[1h]"

RUN_ALERTS = (
    Alert(
        name="TrainingHang",
        expr=f"{_LATE}\n  > seconds(5m) + 5 * (training_log_interval_seconds or\n"
        "    0 * training_last_step_timestamp_seconds)",
        held="2m",
        severity="critical",
        summary=f"{_ON_JOB} has logged no step for a long time",
        description="The last step was {{ $value | humanizeDuration }} ago, over 5m and five times "
        "the usual interval.",
        runbook="The launcher aborts ranks after train.hang_timeout_s, with all stacks in "
        "RUN/logs: they name the collective and the rank that is not in it.",
    ),
    Alert(
        name="TrainingStraggler",
        expr="fsdp_straggler_behind_seconds\n"
        "  > on (job_name, instance) group_left ()\n"
        "  0.1 * fsdp_step_duration_seconds",
        held="5m",
        summary=f"Rank {{{{ $labels.rank }}}} holds {_ON_JOB} up",
        description="It comes {{ $value | humanizeDuration }} late to collectives, over a tenth "
        "of a step.",
        runbook="Look at that GPU's clocks, XID errors and at what else runs on its node.",
    ),
    Alert(
        name="TrainingCheckpointStale",
        expr=f"{_UNSAVED}\n  > 1.5 * training_checkpoint_interval_steps",
        held="2m",
        severity="critical",
        summary=f"{_ON_JOB} has not published a checkpoint when it should have",
        description="{{ $value | humanize }} steps would be lost now.",
        runbook="`shardwise checkpoint ls RUN`; look for a save that failed or hangs in the log, "
        "then at the free space and the speed of the disk.",
    ),
    Alert(
        name="TrainingCheckpointFailed",
        expr="increase(training_checkpoint_failures_total[30m]) > 0\n"
        "  or increase(training_checkpoints_damaged_total[30m]) > 0",
        held="0m",
        summary=f"A checkpoint of {_ON_JOB} failed or was damaged",
        description="Training goes on and tries again at the next save.",
        runbook="events.jsonl gives the reason; `shardwise checkpoint verify RUN` checks the rest.",
    ),
    Alert(
        name="TrainingGoodputLow",
        expr="training:goodput:ratio < 0.8\n  and training_productive_seconds_total offset 1h",
        held="15m",
        summary=f"{_ON_JOB} spends over a fifth of its time on things other than new steps",
        description="{{ $value | humanizePercentage }} of the last 1h went to steps that count.",
        runbook="Restarts, rollbacks, checkpoints and evaluations take the rest: see their panels.",
    ),
    Alert(
        name="TrainingNonFinite",
        expr="increase(training_nonfinite_batches_total[15m]) > 0",
        held="0m",
        summary=f"{_ON_JOB} skips batches whose gradient is not finite",
        description="{{ $value | humanize }} in the last 15m.",
        runbook="events.jsonl names the sequences; after train.max_nonfinite in a row the run goes "
        "back to its newest checkpoint.",
    ),
    Alert(
        name="TrainingRestartLoop",
        # Restarts are read from the record, so that the counter never falls within a run.
        expr=f"max_over_time({_HOUR_OF_RESTARTS}) - min_over_time({_HOUR_OF_RESTARTS}) >= 2",
        held="0m",
        severity="critical",
        summary=f"{_ON_JOB} was started again twice or more within 1h",
        description="{{ $value | humanize }} restarts in the last 1h.",
        runbook="RUN/logs/attempt-N holds the first cause; a rank that dies each time is usually "
        "one GPU: look at XID errors.",
    ),
    Alert(
        name="TrainingDataStarved",
        expr="training_data_wait_ratio > 0.1",
        held="15m",
        summary=f"{_ON_JOB} waits for data",
        description="{{ $value | humanizePercentage }} of the time of rank {{ $labels.rank }}.",
        runbook="Put the data onto a local disk, or tokenise it beforehand.",
    ),
    Alert(
        name="TrainingMemoryNearLimit",
        expr='training_memory_peak_bytes{state="reserved"}\n'
        "  / ignoring (state) training_memory_capacity_bytes\n"
        "  > 0.97",
        held="5m",
        severity="info",
        summary=f"{_ON_JOB} is close to running out of memory",
        description="{{ $value | humanizePercentage }} of the device's memory is reserved.",
        runbook="`shardwise plan run.yaml` shows what it goes to, and what else would fit.",
    ),
    Alert(
        name="GPUXIDError",
        expr="DCGM_FI_DEV_XID_ERRORS > 0",
        held="0m",
        severity="critical",
        summary="GPU {{ $labels.gpu }} of {{ $labels.Hostname }} reports XID {{ $value }}",
        description="The driver has reported an error of this GPU.",
        runbook="Drain the node and look the number up in NVIDIA's list; 48, 63, 64, 79, 94 and "
        "95 are hardware.",
    ),
)

ALERTS = (*STEP_ALERTS, *RUN_ALERTS)
