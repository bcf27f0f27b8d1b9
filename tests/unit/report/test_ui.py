"""`shardwise ui`: who is served, what is read, and what damage does to the page."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hostile import put_holes, put_pipe, within
from sample_runs import SampleRun, eventful, keep_checkpoints, plan_of, step_event
from served import ask, parts_of, served
from typer.testing import CliRunner

from commands import SHARDWISE
from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.metrics import read_events
from shardwise.metrics.read_events import GrowingRecord, Record
from shardwise.ui.follow import RunsFolder
from shardwise.ui.view import MAX_POINTS, MOST_RUNS, View, Wanted


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `demo` and `other`; tests only read it."""
    home = tmp_path_factory.mktemp("runs")
    demo = eventful(plan_of(home, "name=demo", "train.steps=300")).write()
    keep_checkpoints(demo, 250, 300)
    for rank in (0, 1):
        log = demo / "logs" / "attempt-1" / f"rank-{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"2026-11-18 10:00:0{rank},000 first of {rank}\n\x1b[31mred\x1b[0m <b>\n")
    eventful(plan_of(home, "name=other", "train.steps=300"), seed=1).write()
    return home


def test_only_who_has_the_token_is_served(runs: Path) -> None:
    with served(runs) as server:
        port, token = server.server_port, server.token
        good = f"/?token={token}"
        status, headers, page = ask(port, good)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "demo" not in page, "the page asks for runs when it is there"
        assert (
            ask(port, good, Host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == 200
        )
        for path in ("/", "/view", "/?token=", f"/?token={token[:-1]}", f"/view?token={token}x"):
            assert ask(port, path)[0] == 403, path
        for path in (good, f"/view?token={token}&run=demo"):
            for foreign in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", ""):
                assert ask(port, path, Origin=foreign)[0] == 403, foreign
            for host in (f"evil.example:{port}", "evil.example", f"10.0.0.1:{port}", "[::2]", ""):
                assert ask(port, path, Host=host)[0] == 403, host
        assert ask(port, f"/events.jsonl?token={token}")[0] == 404
        assert ask(port, good, method="POST")[0] == 501


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_no_other_interface_can_be_named(runs: Path, host: str) -> None:
    with pytest.raises(UserError, match="is not an address of this machine alone"):
        CliRunner().invoke(
            app, ["ui", str(runs), "--host", host], catch_exceptions=False, standalone_mode=False
        )


def test_it_listens_on_loopback_alone(runs: Path) -> None:
    with served(runs) as server:
        port = f"{server.server_port:04X}"
        lines = Path("/proc/net/tcp").read_text().splitlines()
        lines += Path("/proc/net/tcp6").read_text().splitlines()
        listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        assert [each for each in listening if each.endswith(f":{port}")] == [f"0100007F:{port}"]


def test_only_parts_that_have_changed_are_sent(runs: Path) -> None:
    with served(runs) as server:
        first = parts_of(server, "demo", "other")
        assert list(first)[:6] == ["runs", "names", "summary", "plots", "rank-of-log", "log"]
        assert {"gates", "differences", "checkpoints", "plan"} <= first.keys()
        assert "± 10%" in first["plots"]["html"], "the plan stands beside the measurement"
        have = [part["digest"] for part in first.values()]
        again = parts_of(server, "demo", "other", have=have)
        assert list(again) == list(first)
        # These say how long ago something was.
        assert {name for name, part in again.items() if "html" in part} <= {"runs", "names"}


def test_logs_are_shown_by_rank(runs: Path) -> None:
    with served(runs) as server:
        assert "first of 0\nred &lt;b&gt;" in parts_of(server, "demo")["log"]["html"]
        assert "first of 1\nred" in parts_of(server, "demo", rank="1")["log"]["html"]
        both = parts_of(server, "demo", rank="all")["log"]["html"]
        shown = re.findall(r" \[(\d)\] (?:.* )?(first|red)", both)
        assert shown == [("0", "first"), ("0", "red"), ("1", "first"), ("1", "red")]
        assert "no log of rank 7" in parts_of(server, "demo", rank="7")["log"]["html"]
        assert "no rank has written" in parts_of(server, "other")["log"]["html"]
        choice = parts_of(server, "demo", rank="1")["rank-of-log"]["html"]
        assert re.findall(r'<option value="(\w+)"(?: selected="")?>', choice) == ["0", "1", "all"]
        for rank in ("-1", "one", "9" * 5000):
            query = f"/view?token={server.token}&run=demo&rank={rank}"
            assert ask(server.server_port, query)[0] == 400


def test_no_name_leads_out_of_the_folder(runs: Path) -> None:
    with served(runs / "demo") as server:
        assert "no run other" in parts_of(server, "other")["gone-other"]["html"]
        for name in ("../other", str(runs / "other"), ".", "checkpoints", "\0", "x" * 9000):
            assert set(parts_of(server, name)) == {"runs", f"gone-{name}"}
        assert "summary" in parts_of(server, "demo"), "one run can be named instead of a folder"
        many = "".join(f"&run={number}" for number in range(MOST_RUNS + 1))
        assert ask(server.server_port, f"/view?token={server.token}{many}")[0] == 400


def test_ten_thousand_steps_are_read_once_and_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SampleRun(plan_of(tmp_path, "name=long", "train.steps=10000"))
    run.start(0)
    usual = step_event(run.plan, 1, 0.0)
    for step in range(1, 10_001):
        swing = 1 + 0.1 * math.sin(step)
        told = {name: swing * usual[name] for name in ("loss", "step_s", "tokens_per_s")}
        run.events.append({**usual, **told, "step": step, "time": run.now + step})
    folder = run.write()
    parsed = _count(monkeypatch)
    view = View(RunsFolder(tmp_path))
    first = {part["name"]: part for part in view.answer(Wanted(runs=("long",)))}
    assert parsed[folder] == len(run.events)
    drawn = dict(re.findall(r'id="plot-([\w-]+)"[^>]* data-points="(\d+)"', first["plots"]["html"]))
    assert {"loss", "speed", "memory"} <= drawn.keys()
    # A figure that stays the same has one point in a stretch, and not two.
    assert all(MAX_POINTS // 2 <= int(count) <= MAX_POINTS for count in drawn.values()), drawn
    assert first["plots"]["html"].count("<circle") == sum(map(int, drawn.values()))
    assert "step 10000: " in first["plots"]["html"]
    view.answer(Wanted(runs=("long",)))
    assert parsed[folder] == len(run.events), "nothing is new"
    count = len(run.events)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(f'{{"event": "note", "step": {step}}}\n' for step in range(3))
    again = {part["name"]: part for part in view.answer(Wanted(runs=("long",)))}
    assert parsed[folder] == count + 3
    assert again["plots"]["digest"] == first["plots"]["digest"]


def _count(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """How many lines of each run were read as a whole record."""
    found: dict[Path, int] = {}
    plainly = read_events._Lines.take

    def read_on(self: GrowingRecord) -> Record:
        lines: list[bytes] = []

        def take(own: object, line: bytes) -> None:
            lines.append(line)
            plainly(own, line)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(read_events._Lines, "take", take)
            made = plain_read(self)
        folder = self._path.parent
        found[folder] = found.get(folder, 0) + sum(bool(line) for line in lines)
        return made

    plain_read = GrowingRecord.read_on
    monkeypatch.setattr(GrowingRecord, "read_on", read_on)
    return found


# ---- damage ----------------------------------------------------------------------------------


def _cut_events(run: Path) -> None:
    data = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(data[: len(data) // 2] + b'\xff\x00{"event"')


def _empty_events(run: Path) -> None:
    (run / "events.jsonl").write_bytes(b"")


def _events_of_nonsense(run: Path) -> None:
    wrong = '"text"', "[[]]", "NaN", "1e999", "-1", "null", '{"a": {}}', "9" * 30, "true"
    kinds = "start", "step", "eval", "checkpoint", "gates", "collectives", "profile", "end", "data"
    kinds += ("pipeline",)
    names = "step", "time", "loss", "step_s", "tokens_per_s", "memory", "gates", "rows", "straggler"
    names += ("stages", "bubble")
    with (run / "events.jsonl").open("a") as file:
        for value in wrong:
            fields = "".join(f', "{name}": {value}' for name in names)
            file.writelines(f'{{"event": "{kind}"{fields}}}\n' for kind in kinds)
            file.writelines(f'{{"event": "{kind}", "step": 7{fields}}}\n' for kind in kinds)


def _pipes(run: Path) -> None:
    for name in ("events.jsonl", "plan.json", "config.yaml", "logs/attempt-1/rank-0.log"):
        put_pipe(run / name)


def _directories(run: Path) -> None:
    for name in ("events.jsonl", "plan.json", "config.yaml", "logs/attempt-1/rank-0.log"):
        (run / name).unlink()
        (run / name).mkdir()


def _files_for_directories(run: Path) -> None:
    for name in ("checkpoints", "logs"):
        shutil.rmtree(run / name)
        (run / name).write_text("no directory")


def _loops(run: Path) -> None:
    for name in ("events.jsonl", "plan.json"):
        (run / name).unlink()
        (run / name).symlink_to(run / name)


def _huge_files(run: Path) -> None:
    for name in ("events.jsonl", "plan.json", "config.yaml", "logs/attempt-1/rank-0.log"):
        put_holes(run / name, 2**40)


def _half_a_plan(run: Path) -> None:
    (run / "plan.json").write_text((run / "plan.json").read_text()[:5000])


def _only_a_configuration(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    shutil.rmtree(run)
    run.mkdir()
    (run / "config.yaml").write_text(text)


def _damaged_lease(run: Path) -> None:
    (run / "lease").mkdir()
    (run / "lease" / "epoch-7").write_text("{")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(lines[:9]))


def _damaged_checkpoints(run: Path) -> None:
    for entry in (run / "checkpoints").iterdir():
        (entry / "manifest.json").write_text("{")
    (run / "checkpoints" / "step-x").mkdir()


def _markup(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "note", "time": 1, "text": "</div><script>alert(1)</script>"}\n')


DAMAGES = [
    _cut_events, _empty_events, _events_of_nonsense, _pipes, _directories, _files_for_directories,
    _loops, _huge_files, _half_a_plan, _only_a_configuration, _damaged_lease, _damaged_checkpoints,
    _markup,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_damage_is_named_and_breaks_nothing(
    runs: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    home = tmp_path / "runs"
    shutil.copytree(runs, home)
    with served(home) as server, within(60):
        parts_of(server, "demo", "other")  # so that what is kept is older than the damage
        damage(home / "demo")
        for rank in ("", "1", "all"):
            parts = parts_of(server, "demo", "other", rank=rank)
        assert {"summary", "plots", "log", "plan", "checkpoints"} <= parts.keys()
        assert ">demo</a>" in parts["runs"]["html"]
        assert "finished" in parts["runs"]["html"], "the other run is shown as ever"
        if damage in (_half_a_plan, _pipes, _directories, _huge_files):
            assert "plan.json cannot be read" in parts["names"]["html"]
        if damage in (_pipes, _directories, _huge_files, _loops):
            assert "events.jsonl cannot be read" in parts["names"]["html"]
        if damage in (_cut_events, _events_of_nonsense):
            assert "events.jsonl are malformed" in parts["names"]["html"]
        assert not any("<script" in part["html"] for part in parts.values())
        shutil.rmtree(home / "demo")
        assert "gone-demo" in parts_of(server, "demo", "other")
        shutil.rmtree(home)
        assert "there is no run in" in parts_of(server)["runs"]["html"]


# ---- the command -----------------------------------------------------------------------------


def test_the_command_serves_until_ctrl_c(runs: Path, tmp_path: Path) -> None:
    said = tmp_path / "out"
    # A shell that starts the tests in the background lets all that they start ignore Ctrl-C.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with said.open("wb") as stream:
        command = subprocess.Popen(
            [SHARDWISE, "ui", runs], stdout=stream, stderr=stream, preexec_fn=heard
        )
    try:
        found = _printed(said, command)
        assert ask(int(found["port"]), f"/?token={found['token']}")[0] == 200
        assert ask(int(found["port"]), "/")[0] == 403
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 0
    finally:
        command.kill()
    assert said.read_text().endswith("the page is no longer served\n")
    assert "Traceback" not in said.read_text()


def _printed(said: Path, command: subprocess.Popen[bytes]) -> dict[str, str]:
    until = time.monotonic() + 60
    while True:
        text = said.read_text() if said.exists() else ""
        found = re.search(r"http://127\.0\.0\.1:(?P<port>\d+)/\?token=(?P<token>\S+)\n", text)
        if found is not None:
            return found.groupdict()
        assert command.poll() is None and time.monotonic() < until, text
        time.sleep(0.05)


def test_a_run_can_be_named_and_a_port_can_be_taken(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").symlink_to(runs)
    monkeypatch.chdir(tmp_path)
    with served(runs) as server:
        # The name is found, or else the port would not be asked for.
        for words in (["ui"], ["ui", "demo"], ["ui", f"runs{os.sep}"]):
            with pytest.raises(UserError, match="cannot be listened on: Address already in use"):
                CliRunner().invoke(
                    app, [*words, "--port", str(server.server_port)],
                    catch_exceptions=False, standalone_mode=False,
                )  # fmt: skip
    with pytest.raises(UserError, match="there is no directory nowhere"):
        CliRunner().invoke(app, ["ui", "nowhere"], catch_exceptions=False, standalone_mode=False)
