"""The page over runs in a real Chromium: followed to the end, compared, on a phone, by keyboard.

Screenshots are kept where SHARDWISE_SCREENSHOTS says.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from browser import Page
from looks import OVERLAPS, WIDER, look_everywhere
from sample_runs import SampleRun, eventful, keep_checkpoints, plan_of
from served import served

from commands import SHARDWISE, rank_environment
from shardwise.ui.server import RunsServer
from shardwise.units import MIB

ROWS = """[...document.querySelectorAll("#runs-table tbody tr")].map(
  (row) => [...row.querySelectorAll("td")].slice(1, 4).map((cell) => cell.textContent))"""
READOUT = "document.querySelector('figure:has(#plot-loss) .readout')?.textContent"
TWO_LIVE = ["left", "right"]


def state_of_rows(page: Page) -> dict[str, list[str]]:
    return {name: rest for name, *rest in page.ask(ROWS)}


def has_row(name: str, *rest: str) -> str:
    words = " && ".join(f"row.textContent.includes({word!r})" for word in (name, *rest))
    return f"[...document.querySelectorAll('#runs-table tbody tr')].some((row) => {words})"


def compare(page: Page, *names: str) -> None:
    """As a user does: the boxes of the list."""
    for name in names:
        page.ask(f"document.getElementById('compare-{name}').click()")
    page.wait_until(f"document.querySelectorAll('#part-names h2 span').length === {len(names)}")


def visit(
    page: Page, server: RunsServer, start: str = "document.querySelector('#runs-table')"
) -> None:
    page.look(1280)
    page.visit(server.url)
    page.wait_until(start)


def test_two_live_runs_are_followed_to_their_end(page: Page, tmp_path: Path) -> None:
    runs = [SampleRun(plan_of(tmp_path, f"name={name}", "train.steps=60")) for name in TWO_LIVE]
    for run in runs:
        run.start(0)
        run.write()
    with served(tmp_path) as server:
        visit(page, server)
        compare(page, *TWO_LIVE)
        for last in (10, 20, 40, 60):
            for run in runs:
                run.train(last - 9, last)
                _append(run)
            # Both lines have got as far.
            told = f"({READOUT}?.match(/step {last}: /g) ?? []).length"
            page.wait_until(f"{told} === 2")
        for run in runs:
            run.say("end", step=60, finished=True, loss=2.1)
            _append(run)
        for name in TWO_LIVE:
            page.wait_until(has_row(name, "finished", "60 of 60"))
        page.wait_until(
            "document.querySelector('#summary').innerText.match(/finished/g).length == 2"
        )
        points = page.ask("document.querySelectorAll('#plot-speed circle').length")
        assert points == sum(event["event"] == "step" for run in runs for event in run.events)
        assert page.ask("document.querySelectorAll('#plot-speed .band').length") >= 1
        asked = page.requests()
        assert len(asked) > 5
        assert all(url.startswith(f"http://127.0.0.1:{server.server_port}/") for url in asked)
        assert page.complaints() == []


def _append(run: SampleRun) -> None:
    """What was said since the last time, in two pieces, the first of which ends within a line."""
    path = run.plan.run_dir / "events.jsonl"
    whole = "".join(json.dumps(event) + "\n" for event in run.events).encode()
    news = whole[path.stat().st_size :]
    for piece in (news[: len(news) // 2], news[len(news) // 2 :]):
        with path.open("ab") as file:
            file.write(piece)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    demo = eventful(plan_of(home, "name=demo", "train.steps=300")).write()
    keep_checkpoints(demo, 250, 300)
    log = demo / "logs" / "attempt-1"
    log.mkdir(parents=True)
    for rank in (0, 1):
        lines = "".join(f"line {line} of rank {rank}\n" for line in range(150))
        (log / f"rank-{rank}.log").write_text(lines)
    eventful(plan_of(home, "name=other", "train.steps=300"), slow=1.2, seed=1).write()
    return home


def test_runs_are_chosen_and_compared(page: Page, home: Path, tmp_path: Path) -> None:
    with served(home) as server:
        visit(page, server)
        assert state_of_rows(page).keys() == {"demo", "other"}
        page.ask("[...document.querySelectorAll('#runs-table a')].find("
                 "(link) => link.textContent === 'demo').click()")  # fmt: skip
        page.wait_until("document.querySelector('#gates')")
        log = "document.querySelector('.log')"
        page.wait_until(f"{log}.textContent.includes('line 149 of rank 0')")
        assert page.ask(f"{log}.scrollTop + {log}.clientHeight >= {log}.scrollHeight - 4")
        page.ask("(({options}) => {const select = document.querySelector('#rank');"
                 "select.value = '1'; select.dispatchEvent(new Event('change', {bubbles: true}));"
                 "})({})")  # fmt: skip
        page.wait_until(f"{log}.textContent.includes('line 149 of rank 1')")
        assert "50" in page.ask("document.querySelector('#checkpoints').innerText")
        page.ask("document.getElementById('compare-other').click()")
        page.wait_until("document.querySelector('#differences')")
        assert page.ask("location.hash") == "#run=demo&run=other&rank=1"
        assert page.ask("document.querySelectorAll('#summary-table th').length") == 3
        look_everywhere(page, "ui", tmp_path, finds_nothing=(OVERLAPS, WIDER))
        page.ask("history.back()")
        page.wait_until("!document.querySelector('#differences')")
        assert page.ask("document.getElementById('compare-other').checked") is False
        assert page.complaints() == []


def test_a_point_that_is_read_is_not_taken_away(page: Page, tmp_path: Path) -> None:
    run = SampleRun(plan_of(tmp_path, "name=live", "train.steps=60"))
    run.start(0)
    run.train(1, 20)
    run.write()
    with served(tmp_path) as server:
        visit(page, server)
        page.ask("document.querySelector('#runs-table a').click()")
        page.wait_until("document.querySelector('#plot-loss circle')")
        page.ask("document.querySelector('#plot-loss').focus()")
        for key in ("Home", "ArrowRight"):
            page.ask("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
                     f"{{key: '{key}', bubbles: true}}))")  # fmt: skip
        assert "step 10: " in page.ask(READOUT)
        run.train(21, 40)
        _append(run)
        page.wait_until(has_row("live", "40 of 60"))
        assert "step 10: " in page.ask(READOUT)
        page.ask("document.querySelector('#plot-loss').blur()")
        page.wait_until(f"{READOUT}.includes('step 40: ')")


def test_what_is_refused_and_a_server_that_ends(page: Page, home: Path, tmp_path: Path) -> None:
    with served(home) as server, served(tmp_path) as foreign:
        page.visit(f"http://127.0.0.1:{server.server_port}/")
        assert "token is missing or wrong" in page.ask("document.body.innerText")
        page.visit(foreign.url)
        page.wait_until("document.querySelector('#part-runs')")
        # The page's own policy would stop it first; another site's page has no such policy.
        page.call("Page.setBypassCSP", enabled=True)
        page.visit(foreign.url)
        page.ask("window.answer = ''; fetch('" + server.url + "').then("
                 "(found) => { answer = 'read ' + found.status },"
                 "() => { answer = 'refused' })")  # fmt: skip
        page.wait_until("answer")
        assert page.ask("answer") == "refused"
        page.call("Page.setBypassCSP", enabled=False)
        visit(page, server)
    page.wait_until("document.querySelector('#word').innerText.includes('does not answer')")
    assert page.ask("document.querySelectorAll('#runs-table tbody tr').length") == 2


@pytest.mark.long
def test_two_trainings_are_followed_to_their_end(page: Page, tmp_path: Path) -> None:
    words = ["data.seq_len=64", "cluster=1xCPU", "train.steps=120", "observe.log_every=5",
             "train.global_batch=8", f"runs_dir={tmp_path}"]  # fmt: skip
    environ = rank_environment()
    trainings = [
        subprocess.Popen([SHARDWISE, "train", "examples/demo.yaml", f"name={name}", *words],
                         env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in TWO_LIVE
    ]  # fmt: skip
    try:
        with served(tmp_path, every_s=0.5) as server:
            visit(page, server, "document.querySelector('#part-runs')")
            for name in TWO_LIVE:
                page.wait_until(has_row(name, "running"), 240)
            compare(page, *TWO_LIVE)
            page.wait_until("document.querySelectorAll('#plot-loss circle').length > 4", 240)
            for name in TWO_LIVE:
                page.wait_until(has_row(name, "finished", "120 of 120"), 480)
            assert [training.wait(120) for training in trainings] == [0, 0]
            page.wait_until("document.querySelectorAll('#gates .verdict').length > 4")
            assert "step 120/120" in page.ask("document.querySelector('.log').textContent")
            assert page.complaints() == []
            resident = Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]
            assert int(resident) * os.sysconf("SC_PAGE_SIZE") < 2000 * MIB
    finally:
        for training in trainings:
            training.kill()
