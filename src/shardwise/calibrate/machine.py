"""Calibrate this machine: start a rank on each of its devices, and return what they measure."""

from __future__ import annotations

from shardwise.errors import ExitCode, UserError
from shardwise.facts.calibration import Calibration
from shardwise.facts.cluster import ClusterSpec, probe_cluster
from shardwise.launch.measuring import ask_ranks

_WORKER = "shardwise.calibrate.calibration_rank"


def calibrate(cluster: ClusterSpec, *, quick: bool = False) -> Calibration:
    """Measure a `measurable` cluster. The result is not saved yet."""
    question = {"cluster": cluster.to_dict(), "quick": quick}
    after = "its last words are above; the catalogue's rates stay in use"
    return Calibration.from_dict(ask_ranks(cluster.world_size, _WORKER, question, after=after))


def measurable(cluster: ClusterSpec) -> ClusterSpec:
    """The part of the cluster that this machine can measure: all its GPUs, or ranks on its CPU."""
    if cluster.device == "cpu":
        return cluster
    here = probe_cluster()
    if here.device != cluster.device or here.gpu != cluster.gpu:
        raise UserError(
            f"cannot measure {cluster.device_name} here: this machine has {here.device_in_words}",
            why="rates of one kind of device say nothing about another",
            fix="leave --cluster out to measure this machine, or run it on one with such a GPU",
            code=ExitCode.ENVIRONMENT,
        )
    return here
