"""`shardwise report` as users meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hostile import put_pipe, within
from sample_runs import SampleRun, eventful, plan_of
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.report.html import REPORT
from shardwise.report.page_file import validate_target
from shardwise.report.write import watch_runs, write_report
from shardwise.units import GIB, format_bytes


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with runs/demo in it, which is the current one."""
    (tmp_path / "runs").mkdir()
    eventful(plan_of(tmp_path / "runs", "name=demo", "train.steps=300")).write()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(*words: str) -> str:
    done = CliRunner().invoke(app, ["report", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["report", *words], catch_exceptions=False, standalone_mode=False)
    return str(caught.value)


def copy_run(home: Path, name: str) -> Path:
    return eventful(plan_of(home / "runs", f"name={name}", "train.steps=300")).write()


@pytest.mark.parametrize("given", ["runs/demo", "demo", "runs/demo/"])
def test_one_run_is_reported_in_its_directory(home: Path, given: str) -> None:
    assert "wrote runs/demo/report.html" in report(given)
    assert (home / "runs" / "demo" / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_are_reported_beside_them(home: Path) -> None:
    copy_run(home, "other")
    assert "wrote runs/report.html" in report("demo", "other")
    page = (home / "runs" / "report.html").read_text()
    assert "<title>demo and other: shardwise report</title>" in page


def test_a_file_or_a_directory_may_be_named(home: Path) -> None:
    report("demo", "--to", "page.html")
    assert (home / "page.html").exists()
    (home / "out").mkdir()
    assert f"wrote out{os.sep}report.html" in report("demo", "--to", "out")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("demmo",), "there is no run demmo\n  fix: did you mean runs/demo?"),
        (("quite-another",), "there are runs/demo"),
        (("runs",), "runs is not a run directory"),
        (("runs",), "it holds neither plan.json nor events.jsonl"),
        (("demo", "--to", "nowhere/page.html"), "there is no directory nowhere"),
        (("demo", "--to", "notes.txt"), "notes.txt exists and is not a report"),
    ],
)
def test_mistakes_are_answered(home: Path, words: tuple[str, ...], says: str) -> None:
    (home / "notes.txt").write_text("mine")
    assert says in refused(*words)
    assert (home / "notes.txt").read_text() == "mine"


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(home: Path) -> None:
    put_pipe(home / "runs" / "demo" / "config.yaml")
    with within(60):
        report("demo", "--to", "page.html")
        assert "config.yaml cannot be read: it is a pipe" in (home / "page.html").read_text()
        put_pipe(home / "page.html")
        assert "why: it is a pipe and no plain file" in refused("demo", "--to", "page.html")


def test_a_report_is_replaced_whole_or_not_at_all(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "runs" / "demo"
    target = folder / "report.html"
    write_report([folder], target)
    before = target.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_report([folder], target)
    assert target.read_bytes() == before
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_watching_ends_with_the_run(home: Path) -> None:
    run = SampleRun(plan_of(home / "runs", "name=live", "train.steps=300"))
    run.start(0)
    folder, pages = run.write(), []
    target = folder / "report.html"

    def go_on(seconds: float) -> None:
        assert seconds == 2.0
        pages.append(target.read_text())
        if len(pages) == 3:
            run.say("end", step=300, finished=True, loss=2.0)
        else:
            run.train(10 * len(pages) - 9, 10 * len(pages))
        run.write()

    assert watch_runs([folder], target, 2.0, sleep=go_on)
    assert len(pages) == 3
    assert all('data-reload="2.0"' in page for page in pages)
    assert "data-reload" not in target.read_text()


def test_ctrl_c_leaves_a_page_that_no_longer_loads_itself(home: Path) -> None:
    run = SampleRun(plan_of(home / "runs", "name=live", "train.steps=300"))
    run.start(0)
    target = run.write() / "report.html"

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    assert not watch_runs([run.plan.run_dir], target, 2.0, sleep=interrupt)
    assert "data-reload" not in target.read_text()


def test_the_watching_command_follows_a_run_that_is_being_written(home: Path) -> None:
    run = SampleRun(plan_of(home / "runs", "name=live", "train.steps=300"))
    run.start(0)
    folder = run.write()

    def train() -> None:
        time.sleep(0.7)
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "end", "time": run.now, "step": 300}) + "\n")

    writer = threading.Thread(target=train)
    writer.start()
    said = report("live", "--watch", "--every", "0.5")
    writer.join()
    assert "writing runs/live/report.html every 0.5 s" in said
    assert "the run has ended" in said


def test_it_needs_no_torch(home: Path) -> None:
    words = ["report", "demo"]
    code = (
        f"from shardwise.cli.main import app; app({words!r}, standalone_mode=False)\n"
        "import sys; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_no_report_is_known_by_its_head(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<!doctype html><title>mine</title>")
    with pytest.raises(UserError):
        validate_target(REPORT, tmp_path / "page.html")


def on_cpu(home: Path, name: str) -> SampleRun:
    text = "model: tiny-llama\ndata: stdlib\ncluster: 2xCPU\n"
    return SampleRun(plan_of(home / "runs", f"name={name}", "train.steps=120", text=text))


def test_a_cpu_has_the_memory_plan_of_the_console(home: Path) -> None:
    run = on_cpu(home, "cpu")
    run.start(0)
    run.train(1, 120)
    planned = run.plan.memory.total  # the console's figure, as a step event has it
    held = {"allocated": planned, "reserved": planned}
    run.events = [
        {**event, "memory": held, "memory_planned": planned} if event["event"] == "step" else event
        for event in run.events
    ]
    run.write()
    report("cpu")
    page = (home / "runs" / "cpu" / "report.html").read_text()
    row = page[page.index("<td>resident memory</td>") :].split("</tr>")[0]
    assert row.count(format_bytes(planned)) == 2 and "+0.0%" in row
    begin = page.index('id="plot-memory"')
    assert f"{planned / GIB:.2f} GiB" in page[begin : page.index("</figure>", begin)]


@pytest.mark.parametrize("ended", ["end", "stopped"])
def test_a_pause_between_two_commands_costs_no_goodput(home: Path, ended: str) -> None:
    def goodput_of(name: str, pause_s: float) -> str:
        run = on_cpu(home, name)
        run.start(0)
        run.train(1, 60)
        run.say(ended, step=60)
        run.now += pause_s
        run.start(60)
        run.train(61, 120)
        run.say("end", step=120, finished=True)
        run.write()
        report(name)
        page = (home / "runs" / name / "report.html").read_text()
        return page[page.index("<dt>goodput</dt>") :].split("</dd>")[0]

    assert goodput_of("paused", 3600.0) == goodput_of("at-once", 0.0)
