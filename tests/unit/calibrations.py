"""A calibration as `shardwise plan --calibrate` would keep it, for tests of several rooms."""

from __future__ import annotations

from typing import Any

from shardwise.facts.calibration import Calibration, device_key
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.fabric import Link
from shardwise.facts.rates import Rates


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
