"""rules.yaml: recording rules for dashboards and alerts, and the alerts."""

from __future__ import annotations

from typing import Any

import yaml

from shardwise.metrics.monitoring import metric_names
from shardwise.metrics.monitoring.alerts import ALERTS
from shardwise.metrics.monitoring.durations import stretch_durations

_HEAD = """\
# Recording rules and alerts for shardwise runs; written by `shardwise observe rules`.
# promtool check rules FILE, then list FILE under rule_files in prometheus.yml.
"""

# Names with colons are for recording rules. An exporter must not use them.
RECORDED = {
    "fsdp:step_time_seconds": metric_names.STEP_DURATION.name,
    "fsdp:allgather_seconds_bucket": f"{metric_names.ALL_GATHER.name}_bucket",
    "fsdp:grad_norm": metric_names.GRAD_NORM.name,
    "training:goodput:ratio": f"rate({metric_names.PRODUCTIVE.name}_total[1h])",
}


def rules_document(scale: float = 1.0) -> dict[str, Any]:
    """The rules as data, every window and waiting time multiplied by `scale`."""
    recording = [{"record": name, "expr": expr} for name, expr in RECORDED.items()]
    document = {
        "groups": [
            # Alerts read what the group records, so that it is evaluated often and comes first.
            {"name": "fsdp-recording", "interval": "15s", "rules": recording},
            {
                "name": "fsdp-training",
                "interval": "60s",
                "rules": [alert.to_rule() for alert in ALERTS],
            },
        ]
    }
    return dict(_stretched(document, scale))


def rules_text(scale: float = 1.0) -> str:
    """rules.yaml."""
    note = (
        "" if scale == 1 else f"# Every window and waiting time is {scale:g} times the usual one.\n"
    )
    return _HEAD + note + dump_document(rules_document(scale))


def dump_document(document: dict[str, Any]) -> str:
    """YAML in the order of the document, with texts of several lines as blocks."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def _stretched(value: Any, scale: float) -> Any:
    """All durations inside texts of a document."""
    if isinstance(value, dict):
        return {key: _stretched(inner, scale) for key, inner in value.items()}
    if isinstance(value, list):
        return [_stretched(inner, scale) for inner in value]
    return stretch_durations(value, scale) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as `|` blocks, which people can read."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
