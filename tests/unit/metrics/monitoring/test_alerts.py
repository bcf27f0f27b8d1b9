"""promtool runs every alert over series: it fires when it should, and no other does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from alert_cases import CASES, HEALTHY, Case

from shardwise.metrics.monitoring.alert_rules import rules_document, rules_text
from shardwise.metrics.monitoring.alerts import ALERTS


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(rules_text())
    return path


def promtool_test(case: Case) -> dict[str, object]:
    """The alerts that fire are series too: all of them are asked for at once."""
    series = HEALTHY | case.changes
    return {
        "interval": "1m",
        "name": case.name,
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{case.minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in case.fires
                ],
            }
        ],
    }


def test_promtool_accepts_the_rules(promtool: str, rules: Path) -> None:
    done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    count = sum(len(group["rules"]) for group in rules_document()["groups"])
    assert f"SUCCESS: {count} rules found" in done.stdout


def test_every_alert_fires_when_it_should_and_not_otherwise(promtool: str, rules: Path) -> None:
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [promtool_test(case) for case in CASES],
    }
    file = rules.with_name("tests.yaml")
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    assert {alert for case in CASES for alert in case.fires} == {alert.name for alert in ALERTS}


def test_every_alert_says_what_to_do() -> None:
    for alert in ALERTS:
        annotations = alert.to_rule()["annotations"]
        assert all(annotations[key] for key in ("summary", "description", "runbook")), alert.name


def test_names_for_dashboards_are_recorded() -> None:
    recorded = {rule["record"] for rule in rules_document()["groups"][0]["rules"]}
    assert {"fsdp:step_time_seconds", "fsdp:allgather_seconds_bucket", "fsdp:grad_norm"} < recorded
