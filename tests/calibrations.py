"""A calibration as `shardwise plan --calibrate` would keep it, for tests of several folders."""

from __future__ import annotations

from typing import Any

from shardwise.facts.calibration import Calibration, device_key
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import Link
from shardwise.facts.rates import Rates


def flat_rates(flops: float) -> Rates:
    """Rates of a device that computes everything at `flops`, whatever the shapes."""
    return Rates(
        matmul_flops={"fp32": flops},
        half_width=0,
        attention_forward_flops=flops,
        attention_backward_flops=flops,
        half_context=0,
        memory_bytes_per_s=1e10,
        launch_s=0.0,
        source="measured",
    )


def make_calibration(
    cluster: ClusterSpec,
    rates: Rates,
    *,
    inside: Link | None,
    between: Link | None = None,
    curves: dict[str, Any] | None = None,
) -> Calibration:
    return Calibration(
        device=device_key(cluster),
        device_name=cluster.device_name,
        created="2026-11-15 06:00:00",
        torch="2.11.0",
        ranks=cluster.world_size,
        domain=cluster.nvlink_domain,
        rates=rates,
        inside=inside,
        between=between,
        curves=curves or {},
    )
