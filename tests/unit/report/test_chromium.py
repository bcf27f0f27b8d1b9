"""The report in a real Chromium: points, console, network, by day, by night, on a phone, printed.

Screenshots are kept where SHARDWISE_SCREENSHOTS says.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from browser import Page
from looks import CUT, OVERLAPS, WIDER, look_everywhere
from sample_runs import eventful, keep_checkpoints, plan_of
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.report.collect import collect_run
from shardwise.report.write import write_report

COUNTS = """Object.fromEntries([...document.querySelectorAll("[id^=plot-]")].map(
  (plot) => [plot.id, [Number(plot.dataset.points), plot.querySelectorAll("circle").length]]))"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    common = ("train.steps=300", "train.global_batch=256")
    first = eventful(plan_of(home, "name=llama-8b", *common)).write()
    keep_checkpoints(first, 200, 250, 300)
    recomputed = plan_of(home, "name=llama-8b-full", *common, "memory.checkpoint_activations=full")
    return [first, eventful(recomputed, slow=1.18, seed=1).write()]


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2])
def test_chromium_shows_every_point_and_has_no_complaint(
    page: Page, runs: list[Path], tmp_path: Path, count: int
) -> None:
    target = tmp_path / "report.html"
    write_report(runs[:count], target)
    page.look(1280)
    page.open(target)
    found = page.ask(COUNTS)
    records = [collect_run(run) for run in runs[:count]]
    steps = sum(len(run.steps) for run in records)
    evals = sum(len(run.history("eval")) for run in records)
    curves = ("speed", "mfu", "memory", "step-time", "gradient", "data", "lr")
    expected = {f"plot-{name}": [steps, steps] for name in curves}
    expected["plot-loss"] = [steps + evals, steps + evals]
    for place, run in enumerate(records):
        timed = 3 * len(run.history("collectives"))
        expected[f"plot-collectives-{place}"] = [timed, timed]
    assert found == expected
    assert page.requests() == [target.resolve().as_uri()]
    look_everywhere(page, f"report-{count}", tmp_path, finds_nothing=(OVERLAPS, WIDER))
    papers = {_paper(page, scheme) for scheme in ("light", "dark")}
    assert papers == {"rgb(255, 255, 255)", "rgb(20, 23, 27)"}
    page.print(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert page.complaints() == []


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_table_is_cut(page: Page, runs: list[Path], tmp_path: Path, count: int) -> None:
    target = tmp_path / "report.html"
    names = [str(run) for run in runs[:count]]
    CliRunner().invoke(app, ["report", *names, "--to", str(target)], catch_exceptions=False)
    page.open(target)
    for width in (1600, 1280, 1024, 800, 600, 375):
        page.look(width)
        assert page.ask(CUT) == [], width


def _paper(page: Page, scheme: str) -> str:
    page.look(1280, scheme=scheme)
    return str(page.ask("getComputedStyle(document.body).backgroundColor"))


def test_the_pointer_reads_the_nearest_point(page: Page, runs: list[Path], tmp_path: Path) -> None:
    write_report(runs[:1], tmp_path / "report.html")
    page.look(1280)
    page.open(tmp_path / "report.html")
    place = page.ask(
        "(({left, top, width, height}) => [left + width / 2, top + height / 2])"
        "(document.querySelector('#plot-speed circle:nth-of-type(9)').getBoundingClientRect())"
    )
    read = "document.querySelector('#plot-speed').closest('figure').querySelector('.readout')"
    assert "step 300" in page.ask(f"{read}.textContent")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    assert "measured, step 80: " in page.ask(f"{read}.textContent")
    assert page.ask("document.querySelectorAll('#plot-speed .lit').length") == 1


def test_a_live_page_shows_what_was_written_since(
    page: Page, runs: list[Path], tmp_path: Path
) -> None:
    target = tmp_path / "report.html"
    write_report(runs[:1], target, reload_s=0.5)
    page.open(target)
    write_report(runs, target)
    until = time.monotonic() + 20
    while "llama-8b-full" not in page.ask("document.title"):
        assert time.monotonic() < until, "the page does not load itself again"
        time.sleep(0.1)
    assert page.ask("document.body.dataset.reload") is None
