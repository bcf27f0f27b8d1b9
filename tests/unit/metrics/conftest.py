from __future__ import annotations

import pytest

from shardwise.metrics.monitoring.metric_names import METRICS


@pytest.fixture(scope="session")
def exported_names() -> set[str]:
    """Every name as it stands on the page: counters end in _total, histograms have three."""
    suffixes = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + suffix for metric in METRICS for suffix in suffixes[metric.kind]}
