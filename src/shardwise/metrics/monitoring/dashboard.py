"""A Grafana dashboard for runs, with what DCGM says of their GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from typing import Any

# A dashboard of 24 columns takes three panels side by side.
_WIDTH, _HEIGHT = 8, 7
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_JOB = '{job_name=~"$job_name"}'
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: its queries with what each is called."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def _quantile(kind: str) -> str:
    return (
        f"histogram_quantile(0.99, sum by (job_name, le) (rate(fsdp_{kind}_seconds_bucket"
        f"{_JOB}{_RATE})))"
    )


PANELS: dict[str, tuple[Panel, ...]] = {
    "Training": (
        Panel(
            "Loss",
            "none",
            (
                (f"training_loss{_JOB}", "{{job_name}}"),
                (f"training_eval_loss{_JOB}", "{{job_name}} held out"),
            ),
        ),
        Panel("Gradient norm", "none", ((f"fsdp_grad_norm{_JOB}", "{{job_name}}"),)),
        Panel("Learning rate", "none", ((f"training_learning_rate{_JOB}", "{{job_name}}"),)),
    ),
    "Speed": (
        Panel("Step time", "s", ((f"fsdp_step_duration_seconds{_JOB}", "{{job_name}} {{rank}}"),)),
        Panel(
            "Tokens per second of one device",
            "none",
            ((f"training_tokens_per_second{_JOB}", "{{job_name}}"),),
        ),
        Panel(
            "MFU beside the plan",
            "percentunit",
            (
                (f"training_mfu{_JOB}", "{{job_name}} MFU"),
                (f"training_hfu{_JOB}", "{{job_name}} HFU"),
                (f"training_mfu_planned{_JOB}", "{{job_name}} planned"),
            ),
        ),
        Panel(
            "Collectives, p99",
            "s",
            (
                (_quantile("allgather"), "{{job_name}} all-gather"),
                (_quantile("reducescatter"), "{{job_name}} reduce-scatter"),
                (_quantile("allreduce"), "{{job_name}} all-reduce"),
            ),
        ),
        Panel(
            "Bus bandwidth of collectives",
            "Bps",
            ((f"fsdp_collective_bus_bytes_per_second{_JOB}", "{{kind}} {{phase}}"),),
        ),
        Panel(
            "Straggler, behind by",
            "s",
            ((f"fsdp_straggler_behind_seconds{_JOB}", "{{job_name}} rank {{rank}}"),),
        ),
    ),
    "Safety": (
        Panel(
            "Goodput of the last hour",
            "percentunit",
            ((f"rate(training_productive_seconds_total{_JOB}[1h])", "{{job_name}}"),),
        ),
        Panel(
            "Steps that would be lost now",
            "none",
            ((f"training_step{_JOB} - training_last_checkpoint_step{_JOB}", "{{job_name}}"),),
        ),
        Panel(
            "Parts of a save",
            "s",
            ((f"training_checkpoint_duration_seconds{_JOB}", "{{job_name}} {{phase}}"),),
        ),
        Panel(
            "Restarts, rollbacks, bad batches, failed saves",
            "none",
            (
                (f"training_restarts_total{_JOB}", "{{job_name}} restarts"),
                (f"training_rollbacks_total{_JOB}", "{{job_name}} rollbacks"),
                (f"training_nonfinite_batches_total{_JOB}", "{{job_name}} not finite"),
                (f"training_checkpoint_failures_total{_JOB}", "{{job_name}} failed saves"),
            ),
        ),
        Panel(
            "Peak memory",
            "bytes",
            (
                (f"training_memory_peak_bytes{_JOB}", "{{job_name}} {{rank}} {{state}}"),
                (f"training_memory_capacity_bytes{_JOB}", "{{job_name}} capacity"),
            ),
        ),
        Panel(
            "Waiting for data",
            "percentunit",
            ((f"training_data_wait_ratio{_JOB}", "{{job_name}} {{rank}}"),),
        ),
    ),
    "GPUs (DCGM)": (
        Panel(
            "NVLink (collectives) and PCIe (offload) bytes sent",
            "Bps",
            (
                ("sum by (Hostname) (DCGM_FI_PROF_NVLINK_TX_BYTES)", "{{Hostname}} NVLink"),
                ("sum by (Hostname) (DCGM_FI_PROF_PCIE_TX_BYTES)", "{{Hostname}} PCIe"),
            ),
        ),
        Panel(
            "NVLink and PCIe bytes received",
            "Bps",
            (
                ("sum by (Hostname) (DCGM_FI_PROF_NVLINK_RX_BYTES)", "{{Hostname}} NVLink"),
                ("sum by (Hostname) (DCGM_FI_PROF_PCIE_RX_BYTES)", "{{Hostname}} PCIe"),
            ),
        ),
        Panel(
            "SM activity",
            "percentunit",
            (("DCGM_FI_PROF_SM_ACTIVE", "{{Hostname}} {{gpu}}"),),
        ),
        Panel(
            "Tensor core activity",
            "percentunit",
            (("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "{{Hostname}} {{gpu}}"),),
        ),
        Panel("Last XID error", "none", (("DCGM_FI_DEV_XID_ERRORS", "{{Hostname}} {{gpu}}"),)),
        Panel("Power", "watt", (("DCGM_FI_DEV_POWER_USAGE", "{{Hostname}} {{gpu}}"),)),
    ),
}


def dashboard_text() -> str:
    """The JSON that Grafana imports."""
    return json.dumps(dashboard_document(), indent=2) + "\n"


def dashboard_document() -> dict[str, Any]:
    """The dashboard as data."""
    return {
        "title": "shardwise runs",
        "uid": "shardwise-runs",
        "tags": ["shardwise", "fsdp"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _job_variable()]},
        "panels": _lay_out(),
    }


def _lay_out() -> list[dict[str, Any]]:
    """Rows of three panels under the title of each part."""
    ids = count(1)
    laid: list[dict[str, Any]] = []
    top = 0
    for title, panels in PANELS.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        laid.append(
            {
                "id": next(ids),
                "type": "row",
                "title": title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        top += 1
        for index, panel in enumerate(panels):
            column, row = index % 3, index // 3
            laid.append(_graph(panel, next(ids), x=column * _WIDTH, y=top + row * _HEIGHT))
        top += -(-len(panels) // 3) * _HEIGHT
    return laid


def _graph(panel: Panel, number: int, *, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(65 + n), "datasource": _DATASOURCE, "expr": expr, "legendFormat": legend}
            for n, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _job_variable() -> dict[str, Any]:
    return {
        "name": "job_name",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": "label_values(training_step, job_name)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    }
