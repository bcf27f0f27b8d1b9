"""All windows of the rules are stretched alike, and stay durations that Prometheus reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.metrics.monitoring.alert_rules import rules_document
from shardwise.metrics.monitoring.durations import spell_duration, stretch_durations


@pytest.mark.parametrize(
    ("text", "factor", "stretched"),
    [
        ("rate(x[5m]) offset 1h", 0.1, "rate(x[30s]) offset 6m"),
        ("x > seconds(5m) + 1", 0.5, "x > 150 + 1"),
        ("x > seconds(5m) + 1", 1.0, "x > 300 + 1"),
        ("p99 > 200ms, over 10%", 0.1, "p99 > 200ms, over 10%"),
        ("ratio_rate1h[1h]", 2.0, "ratio_rate1h[2h]"),
        ("0m", 0.1, "0m"),
    ],
)
def test_durations_in_texts_are_stretched(text: str, factor: float, stretched: str) -> None:
    assert stretch_durations(text, factor) == stretched


@pytest.mark.parametrize(
    ("seconds", "spelled"), [(90, "90s"), (120, "2m"), (0.25, "250ms"), (7200, "2h"), (0, "0m")]
)
def test_durations_are_whole_numbers(seconds: float, spelled: str) -> None:
    assert spell_duration(seconds) == spelled


def test_an_alert_keeps_its_parts_in_proportion() -> None:
    def alert(scale: float) -> dict[str, object]:
        rules = rules_document(scale)["groups"][1]["rules"]
        return next(rule for rule in rules if rule["alert"] == "TrainingMFURegression")

    assert alert(1.0)["for"] == "30m" and "[6h] offset 30m" in str(alert(1.0)["expr"])
    assert alert(0.1)["for"] == "3m" and "[36m] offset 3m" in str(alert(0.1)["expr"])
    assert "36m baseline" in str(alert(0.1)["annotations"])


def test_promtool_accepts_stretched_rules(promtool: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    done = CliRunner().invoke(app, ["observe", "rules", "--scale", "0.0033", "--to", str(file)])
    assert done.exit_code == 0
    checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("scale", ["0", "-1", "0.0001", "1000"])
def test_a_scale_without_sense_is_refused(scale: str) -> None:
    done = CliRunner().invoke(app, ["observe", "rules", f"--scale={scale}"])
    assert isinstance(done.exception, UserError) and "--scale" in done.exception.what
