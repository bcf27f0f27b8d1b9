"""How long a job may take, how long its save may take, and how much shared memory it needs."""

from __future__ import annotations

import math

from shardwise.plan.checkpoint_size import checkpoint_bytes
from shardwise.plan.decisions import Choice
from shardwise.plan.planned import Plan
from shardwise.units import GIB, format_bytes, format_duration

# What a node writes to a shared file system, when all nodes write at once. Local disks and good
# file servers are several times as fast.
WRITE_BYTES_PER_S = 0.5e9
# Imports, meeting, reading of weights and data, and the first compile.
_START_S = 900.0
# Forecasts of speed are within a few percent on quiet machines; evaluations and slow hours are not
# in them.
_MARGIN = 1.25
# A step of unknown length, which has to end before a save begins.
_UNKNOWN_STEP_S = 60.0
# For the signal to arrive and for the processes to end.
_ENDING_S = 30.0
_SHM_PER_RANK = GIB


def predict_save_s(plan: Plan) -> float:
    """Seconds until a checkpoint is on the disk: every node writes its own part."""
    return checkpoint_bytes(plan) / (plan.cluster.num_nodes * WRITE_BYTES_PER_S)


def choose_walltime(plan: Plan) -> Choice[float | None]:
    """The whole run by the plan's forecast, with a margin."""
    said, steps = plan.config.launch.walltime_s, plan.config.train.steps
    if said != "auto":
        return Choice(said, "given: launch.walltime_s", "user")
    if plan.forecast is None:
        why = "the plan has no speed for these devices, so the platform's own limit holds"
        return Choice(None, why, "rule")
    training_s = steps * plan.forecast.step_s
    every = plan.config.checkpoint.every
    saves_s = (steps // every if every else 1) * predict_save_s(plan)
    if plan.config.checkpoint.asynchronous:
        saves_s = predict_save_s(plan)
    grace = choose_grace(plan).value
    total = _START_S + _MARGIN * (training_s + saves_s) + grace
    why = (
        f"{steps} steps of {plan.forecast.step_s:.3g} s are {format_duration(training_s)} by the "
        f"plan; a quarter more, {format_duration(_START_S)} to start, {grace} s to save"
    )
    return Choice(total, why, "rule")


def choose_grace(plan: Plan) -> Choice[int]:
    """How long before its end a job is told: a step, a save, and the end of the processes."""
    said = plan.config.launch.grace_s
    if said != "auto":
        return Choice(math.ceil(said), "given: launch.grace_s", "user")
    step_s = _UNKNOWN_STEP_S if plan.forecast is None else plan.forecast.step_s
    save_s = predict_save_s(plan)
    why = (
        f"{_seconds(step_s)} to end a step, {_seconds(save_s)} to write a checkpoint of "
        f"{format_bytes(checkpoint_bytes(plan))} at {WRITE_BYTES_PER_S / 1e9:g} GB/s a node, "
        f"{_ENDING_S:.0f} s to end"
    )
    return Choice(math.ceil(step_s + save_s + _ENDING_S), why, "rule")


def choose_shm(plan: Plan) -> Choice[int]:
    """The size of /dev/shm where a platform sets it."""
    ranks = plan.cluster.devices_per_node
    why = (
        f"NCCL and loaders pass buffers through /dev/shm, and containers have 64 MiB of it: "
        f"{format_bytes(_SHM_PER_RANK)} for each of {ranks} ranks"
    )
    return Choice(ranks * _SHM_PER_RANK, why, "rule")


def _seconds(seconds: float) -> str:
    return f"{math.ceil(seconds)} s"
