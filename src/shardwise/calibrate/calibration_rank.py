"""One rank of a calibration. It measures together with the others, and the first rank writes the
result."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.calibrate.attention_rate import fit_attention, measure_attention
from shardwise.calibrate.collective_times import fit_collectives, measure_collectives
from shardwise.calibrate.copy_rate import (
    fit_elementwise,
    measure_copies,
    measure_elementwise,
    measure_launch,
)
from shardwise.calibrate.matmul import DTYPES, fit_matmul, measure_matmul, why_no_float8
from shardwise.facts.calibration import Calibration, device_key
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import Link
from shardwise.facts.rates import Rates
from shardwise.launch.group import join_process_group
from shardwise.launch.parent import leave_with_launcher
from shardwise.metrics.clock import QUICK, THOROUGH, Clock
from shardwise.parallel.mesh import World

# With a smaller share of the CPU, other programs have slowed the measurements down.
_UNDISTURBED = 0.85


class MeasurementLog:
    """Reports on the first rank what is being measured, and keeps every point."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.curves: dict[str, list[dict[str, Any]]] = {}
        self._started = time.perf_counter()

    def say(self, text: str) -> None:
        """Print to stderr, because stdout belongs to the plan."""
        if self.world.is_first:
            sys.stderr.write(f"  {time.perf_counter() - self._started:5.1f} s  {text}\n")
            sys.stderr.flush()

    def follow(self, what: str, points: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Report what is measured, and keep every point of it."""
        self.say(f"measuring {what}")
        self.curves[what] = list(points)
        return self.curves[what]


@record
def main(question_path: str, answer_path: str) -> None:
    """Measure the cluster that this process is one rank of, and write the result."""
    leave_with_launcher()
    # torch 2.13 warns about names that 2.11 needs, and about formats that a CPU only emulates.
    warnings.simplefilter("ignore")
    question = json.loads(Path(question_path).read_text(encoding="utf-8"))
    cluster = ClusterSpec.from_dict(question["cluster"])
    join_process_group(cluster.device)
    world = World.joined()
    index = torch.cuda.current_device() if cluster.device == "cuda" else 0
    device = torch.device(cluster.device, index)
    choice = QUICK if question["quick"] else THOROUGH
    clock = Clock(device, choice[cluster.device], world)
    found = measure(cluster, clock, MeasurementLog(world))
    if world.is_first:
        Path(answer_path).write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.destroy_process_group()


def measure(cluster: ClusterSpec, clock: Clock, progress: MeasurementLog) -> Calibration:
    """Measure the rates of the device, then the links between ranks."""
    rates = _measure_rates(cluster, clock, progress)
    share = clock.cpu_share()
    inside, between = _measure_links(cluster, clock, progress)
    if cluster.device == "cpu" and share < _UNDISTURBED:
        progress.say(
            f"ALERT: other programs took {1 - share:.0%} of the CPU meanwhile; for a better "
            "forecast measure again when they have ended"
        )
    return Calibration(
        device=device_key(cluster),
        device_name=cluster.device_name,
        created=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        torch=torch.__version__,
        ranks=cluster.world_size,
        domain=cluster.nvlink_domain,
        rates=rates,
        inside=inside,
        between=between,
        curves=progress.curves,
    )


def _measure_rates(cluster: ClusterSpec, clock: Clock, progress: MeasurementLog) -> Rates:
    base = cluster.usual_format
    dtype = DTYPES[base]
    points = progress.follow("matmul", measure_matmul(clock, base, cluster.compute_formats))
    matmul, half_width = fit_matmul(points, base)
    if (reason := why_no_float8(clock.device)) is not None:
        progress.say(f"float8 matmuls left out: {reason}")
    points = progress.follow("attention", measure_attention(clock, dtype))
    forward, backward, half_context = fit_attention(points)
    elementwise = progress.follow("element-wise work", measure_elementwise(clock, dtype))
    progress.follow("copies", measure_copies(clock))
    launch_s = measure_launch(clock)
    return Rates(
        matmul_flops=matmul,
        half_width=half_width,
        attention_forward_flops=forward,
        attention_backward_flops=backward,
        half_context=half_context,
        memory_bytes_per_s=fit_elementwise(elementwise),
        launch_s=launch_s,
        source="measured",
    )


def _measure_links(
    cluster: ClusterSpec, clock: Clock, progress: MeasurementLog
) -> tuple[Link | None, Link | None]:
    """The links (between the ranks of a domain, between all ranks)."""
    world, domain = cluster.world_size, cluster.nvlink_domain
    found: list[Link | None] = []
    for what, ranks in (("inside", domain), ("between", world)):
        if ranks == 1 or (what == "between" and world == domain):
            found.append(None)
            continue
        group, _ = dist.new_subgroups(group_size=ranks)
        label = f"collectives of {ranks} ranks"
        points = progress.follow(label, measure_collectives(clock, group))
        found.append(fit_collectives(points, f"measured {what} a domain", cluster.device))
    return found[0], found[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
