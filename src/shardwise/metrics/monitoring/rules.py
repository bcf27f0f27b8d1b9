"""rules.yaml: recording rules under the seeds' names, and the alerts."""

from __future__ import annotations

from typing import Any

import yaml

from shardwise.metrics.monitoring import names
from shardwise.metrics.monitoring.alerts import ALERTS

_HEAD = """\
# Recording rules and alerts for shardwise runs; written by `shardwise observe rules`.
# promtool check rules FILE, then list FILE under rule_files in prometheus.yml.
"""

# Names with colons are for rules: an exporter must not use them, and the seeds' alerts do.
RECORDED = {
    "fsdp:step_time_seconds": names.STEP_DURATION.name,
    "fsdp:allgather_seconds_bucket": f"{names.ALL_GATHER.name}_bucket",
    "fsdp:grad_norm": names.GRAD_NORM.name,
    "training:goodput:ratio_rate1h": f"rate({names.PRODUCTIVE.name}_total[1h])",
}


def rules_document() -> dict[str, Any]:
    """The rules as data."""
    recording = [{"record": name, "expr": expr} for name, expr in RECORDED.items()]
    return {
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


def rules_text() -> str:
    """rules.yaml."""
    return _HEAD + dump_document(rules_document())


def dump_document(document: dict[str, Any]) -> str:
    """YAML in the order of the document, with texts of several lines as blocks."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as `|` blocks, which people can read."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
