"""The report in a real Chromium: points, console, network, by day, by night, on a phone, printed.

Screenshots are kept where SHARDWISE_SCREENSHOTS says.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, chromium_page, find_chromium
from sample_runs import eventful, keep_checkpoints, plan_of
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.report.collect import collect_run
from shardwise.report.write import write_report

COUNTS = """Object.fromEntries([...document.querySelectorAll("[id^=plot-]")].map(
  (plot) => [plot.id, [Number(plot.dataset.points), plot.querySelectorAll("circle").length]]))"""
# Text that lies over other text of the same plot.
OVERLAPS = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].map((it) => [it, it.getBoundingClientRect()]);
  return texts.flatMap(([one, a], place) => texts.slice(place + 1)
    .filter(([other, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom - 2
      && b.top < a.bottom - 2)
    .map(([other]) => `${svg.id}: ${one.textContent} / ${other.textContent}`));
})"""
SMALLEST = """Math.min(...[...document.querySelectorAll("figure.plot svg")].map(
  (svg) => 11.5 * svg.getScreenCTM().a))"""
WIDER = """[...document.querySelectorAll("body *")].filter((element) =>
  !element.closest(".scroll, pre, svg") && element.getBoundingClientRect().right > innerWidth + 1)
  .map((element) => element.outerHTML.slice(0, 80))"""

# Tables that are wider than their place: their last columns are out of sight.
CUT = """[...document.querySelectorAll(".scroll")].filter(
  (box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.closest("section").id)"""


@pytest.fixture(scope="module")
def page(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Page]:
    program = find_chromium()
    if program is None:
        reason = "no Chromium is installed; `python tests/unit/report/browser.py` installs it"
        plugins = request.config.pluginmanager
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            plugins.getplugin("terminalreporter").write_line(f"skipped: {reason}")
        pytest.skip(reason)
    with chromium_page(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    common = ("train.steps=300", "train.global_batch=256")
    first = eventful(plan_of(home, "name=llama-8b", *common)).write()
    keep_checkpoints(first, 200, 250, 300)
    recomputed = plan_of(home, "name=llama-8b-full", *common, "memory.checkpoint_activations=full")
    return [first, eventful(recomputed, slow=1.18, seed=1).write()]


def keep(page: Page, name: str, tmp_path: Path) -> None:
    page.screenshot(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 20_000
    if place := os.environ.get("SHARDWISE_SCREENSHOTS"):
        Path(place).mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / name, Path(place) / name)


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
    for width, scheme, name in (
        (1280, "light", "light"),
        (1280, "dark", "dark"),
        (375, "light", "phone"),
    ):
        page.look(width, scheme=scheme)
        assert page.ask(OVERLAPS) == [], name
        assert page.ask(WIDER) == [], name
        assert page.ask(SMALLEST) >= 10, name
        keep(page, f"{name}-{count}.png", tmp_path)
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
