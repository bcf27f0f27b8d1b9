"""The causes of a slow run as checks, and their ranking."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check, Finding
from shardwise.doctor.run.case import Case
from shardwise.doctor.slow import causes
from shardwise.doctor.slow.causes import Measure, TimeLost
from shardwise.doctor.slow.pace import Pace, pace_of
from shardwise.metrics.verdict import SPEED_BAND

# Of the run's time: below this a cause is not worth a line.
LEAST_SHARE = 0.05


def _check(name: str, title: str, measure: Measure, why: str, fix: str) -> Check[Case]:
    def look(case: Case) -> Iterator[str]:
        pace = pace_of(case)
        loss = None if pace is None else measure(pace)
        if loss is not None and loss.share >= LEAST_SHARE:
            yield f"{loss.evidence} (costs about {loss.share:.0%})"

    return Check(name, "warning", title, why, fix, look)


_ROWS: tuple[tuple[str, str, Measure, str, str], ...] = (
    (
        "SW401", "Steps wait for data", causes.input_wait,
        "Reading or preparing the data takes longer than a step computes.",
        "put the data onto a local disk, tokenise it beforehand, or raise data.workers",
    ),
    (
        "SW402", "One rank is late", causes.late_rank,
        "All others wait for it in every collective.",
        "look at its GPU's clocks and errors, its host's load and its links; leave the node out",
    ),
    (
        "SW403", "Links are slower than they should be", causes.slow_links,
        "Collectives then take longer than compute can hide.",
        "`shardwise fabric` names the pair; look for TCP instead of RDMA in the log of NCCL",
    ),
    (
        "SW404", "Communication is not hidden", causes.exposed_communication,
        "The links are as fast as planned, and compute is too short to hide them.",
        "raise train.micro_batch; leave shard.backward_prefetch out; `shardwise profile RUN` names "
        "the units",
    ),
    (
        "SW405", "Kernels are slower than the device should be", causes.slow_compute,
        "Clocks are throttled by heat or power, or the plan's rates are those of another device.",
        "nvidia-smi -q -d PERFORMANCE on the nodes; `shardwise plan --calibrate` measures rates",
    ),
    (
        "SW406", "Activations are recomputed though there is room", causes.recomputed_activations,
        "Recomputing costs up to a third of the compute of a step.",
        "write memory.checkpoint_activations=auto",
    ),
    (
        "SW407", "Memory is fragmented", causes.fragmentation,
        "The allocator gives blocks back and asks for others, which makes the device wait.",
        "export PYTORCH_ALLOC_CONF=expandable_segments:True, or a smaller train.micro_batch",
    ),
    (
        "SW408", "Checkpoints hold the training up", causes.checkpoint_stalls,
        "The loop waits while shards are copied to the host, or for the save before.",
        "raise checkpoint.every; write checkpoint.asynchronous=true; use a faster disk",
    ),
    (
        "SW409", "Compilation takes a large part of the run", causes.compilation,
        "Every start compiles; so does every new shape.",
        "give all batches one shape; for short runs write memory.compile=false",
    ),
    (
        "SW410", "Restarts cost much of the time", causes.restarts,
        "Steps since the last checkpoint are done again, and ranks load anew.",
        "find out why ranks died; save more often with checkpoint.every",
    ),
    (
        "SW411", "The device waits for the host", causes.launch_gaps,
        "Python launches kernels more slowly than the device runs them.",
        "write memory.compile=true, raise train.micro_batch, give each rank more CPU cores",
    ),
    (
        "SW412", "Copies between host and device are slow", causes.host_copies,
        "Offload moves parameters or activations over PCIe.",
        "check the PCIe generation and lanes; lower memory.offload_activations",
    ),
    (
        "SW413", "Evaluations take much of the time", causes.evaluations,
        "The held-out text is read too often, or too much of it.",
        "raise train.eval_every, or lower data.eval_sequences",
    ),
    (
        "SW414", "Some steps take much longer than others", causes.uneven_steps,
        "Something beside the training pauses it: other jobs, a disk, or a link that retries.",
        "see what else runs on the nodes at these steps; the report shows them",
    ),
    (
        "SW415", "Batches are computed again because fp16 overflows", causes.overflows,
        "Each overflow costs a whole step.",
        "write precision.param=bf16, or a smaller precision.loss_scale",
    ),
    (
        "SW419", "The run is slower than its plan, and nothing recorded tells why",
        causes.nothing_tells,
        "Without a profile compute, communication and gaps cannot be told apart.",
        "train some steps with observe.profile=20, and ask again; or `shardwise plan --calibrate`",
    ),
)  # fmt: skip

SLOW: tuple[Check[Case], ...] = tuple(
    _check(name, title, measure, why, fix) for name, title, measure, why, fix in _ROWS
)


def is_slow(pace: Pace) -> bool:
    """Whether steps miss their plan, or a tenth of the time went to something else."""
    lost = [pace.slower, 1 - pace.spent["productive"]]
    # Without a forecast the record itself shows what a step waits for.
    measured: list[Measure] = [causes.uneven_steps]
    if pace.planned_s is None:
        measured += [causes.input_wait, causes.late_rank, causes.slow_links]
    lost += [found.share for measure in measured if (found := measure(pace)) is not None]
    return max(lost) > SPEED_BAND


def rank_causes(case: Case) -> list[tuple[Finding, TimeLost]]:
    """Causes that cost enough to be named, the largest first; none for a run that is fast."""
    pace = pace_of(case)
    if pace is None:
        return []
    measured = [(check, row[2](pace)) for check, row in zip(SLOW, _ROWS, strict=True)]
    found = [(check, loss) for check, loss in measured if loss and loss.share >= LEAST_SHARE]
    if not is_slow(pace):
        found = [(check, loss) for check, loss in found if check.id == _ALWAYS]
    found.sort(key=lambda each: -each[1].share)
    return [
        (Finding(check, f"{loss.evidence} (costs about {loss.share:.0%})"), loss)
        for check, loss in found
    ]


# A setting that costs time is worth a line, though the plan knows of it.
_ALWAYS = "SW406"
