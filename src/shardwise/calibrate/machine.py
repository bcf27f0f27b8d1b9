"""Calibrate this machine: start a rank on each of its devices, and keep what they find."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from shardwise.errors import ExitCode, UserError
from shardwise.facts.calibration import Calibration, load_calibration
from shardwise.facts.cluster import ClusterSpec, probe_cluster
from shardwise.launch.failure import error_of
from shardwise.launch.ranks import Ranks

_WORKER = "shardwise.calibrate.worker"


def calibrate(cluster: ClusterSpec, *, quick: bool = False) -> Calibration:
    """Measure a `measurable` cluster; the result is not yet saved."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        scratch = Path(folder)
        asked, found = scratch / "cluster.json", scratch / "calibration.json"
        asked.write_text(json.dumps(cluster.to_dict()), encoding="utf-8")
        arguments = [str(asked), str(found), "quick" if quick else "thorough"]
        ranks = Ranks(cluster.world_size, arguments, scratch, module=_WORKER)
        with ranks:
            failures = ranks.wait()
        if failures:
            error = error_of(failures, scratch)
            raise UserError(
                error.what,
                why=error.why,
                fix="its last words are above; the catalogue's rates stay in use",
                code=error.code,
            )
        return load_calibration(found)


def measurable(cluster: ClusterSpec) -> ClusterSpec:
    """What of the cluster this machine can stand for: all its GPUs, or ranks on its processor."""
    if cluster.device == "cpu":
        return cluster
    here = probe_cluster()
    if here.device != cluster.device or here.gpu != cluster.gpu:
        raise UserError(
            f"cannot measure {cluster.device_name} here: this machine has {here.device_name}",
            why="rates of one kind of device say nothing about another",
            fix="run it on a machine with such a GPU, or leave --cluster out to measure this one",
            code=ExitCode.ENVIRONMENT,
        )
    return here
