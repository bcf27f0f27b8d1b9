"""The dashboard and the scrape configuration speak of what is exported, in valid terms."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.metrics.monitoring.alert_rules import RECORDED
from shardwise.metrics.monitoring.alerts import ALERTS
from shardwise.metrics.monitoring.dashboard import dashboard_document
from shardwise.metrics.monitoring.metric_names import METRICS
from shardwise.metrics.monitoring.scrape import expand_nodes


def queries() -> list[str]:
    panels = dashboard_document()["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def metrics_in(expr: str) -> set[str]:
    found = set(re.findall(r"\b(?:fsdp|training)[a-z0-9_:]*[a-z0-9]\b", expr))
    return {name for name in found if "_" in name}


@pytest.mark.parametrize("expr", [*queries(), *(alert.expr for alert in ALERTS)])
def test_every_query_asks_for_something_that_exists(expr: str, exported_names: set[str]) -> None:
    assert metrics_in(expr) <= exported_names | set(RECORDED)
    assert metrics_in(expr) or "DCGM_FI_" in expr


def test_promtool_accepts_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    filled = [expr.replace("$__rate_interval", "5m") for expr in queries()]
    rules = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(filled)]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_shows_the_gpus() -> None:
    wanted = ("NVLINK_TX_BYTES", "PCIE_TX_BYTES", "PROF_SM_ACTIVE", "XID_ERRORS")
    assert all(any(name in expr for expr in queries()) for name in wanted)


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in dashboard_document()["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))


def write(tmp_path: Path, *words: str) -> Path:
    file = tmp_path / "out"
    done = CliRunner().invoke(app, ["observe", *words, "--to", str(file)])
    assert done.exit_code == 0, done.output
    return file


def targets(document: dict[str, Any], job: str) -> list[str]:
    found = {each["job_name"]: each for each in document["scrape_configs"]}
    return list(found[job]["static_configs"][0]["targets"])


@pytest.mark.parametrize(
    "words", [(), ("--nodes", "a,b"), ("--on", "slurm", "--nodes", "gpu[01-03]")]
)
def test_promtool_accepts_the_scrape_configuration(
    promtool: str, tmp_path: Path, words: tuple[str, ...]
) -> None:
    write(tmp_path, "rules").rename(tmp_path / "rules.yaml")
    file = write(tmp_path, "scrape", *words)
    done = subprocess.run([promtool, "check", "config", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hosts_are_scraped_on_their_ports(tmp_path: Path) -> None:
    file = write(tmp_path, "scrape", "--nodes", "a,b:7000", "--port", "9000")
    document = yaml.safe_load(file.read_text())
    assert targets(document, "shardwise") == ["a:9000", "b:7000"]
    assert targets(document, "dcgm") == ["a:9400", "b:9400"]


def test_kubernetes_pods_are_found_by_their_label(tmp_path: Path) -> None:
    document = yaml.safe_load(write(tmp_path, "scrape", "--on", "kubernetes").read_text())
    job = document["scrape_configs"][0]
    assert job["kubernetes_sd_configs"] == [{"role": "pod"}]
    assert job["relabel_configs"][0]["source_labels"] == [
        "__meta_kubernetes_pod_label_shardwise_io_run"
    ]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[08-10],login", ["gpu08", "gpu09", "gpu10", "login"]),
        ("gpu[1,3-4]-ib", ["gpu1-ib", "gpu3-ib", "gpu4-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_slurm_lists_are_expanded(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "gpu[a-b]", "gpu[1-99999999999]", "gpu[1-"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="node"):
        expand_nodes(text)


def test_the_dashboard_is_json(tmp_path: Path) -> None:
    assert json.loads(write(tmp_path, "dashboard").read_text())["title"] == "shardwise runs"


def test_without_a_file_it_goes_to_stdout() -> None:
    done = CliRunner().invoke(app, ["observe", "rules"])
    assert yaml.safe_load(done.output)["groups"][1]["name"] == "fsdp-training"


def test_the_docs_name_every_metric_and_alert() -> None:
    text = (Path(__file__).parents[4] / "docs/observe.md").read_text()
    for metric in METRICS:
        shown = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        assert f"| `{shown}`" in text, shown
    for alert in ALERTS:
        assert f"| `{alert.name}` |" in text, alert.name
