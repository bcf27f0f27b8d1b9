"""The page as text: what is on it, and what cannot get onto it."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample_runs import BEGAN, SampleRun, circles, eventful, keep_checkpoints, plan_of

from shardwise.plan.stage_rows import planned_bubble, planned_ranks
from shardwise.report.collect import collect_run, collect_runs
from shardwise.report.html import render_report
from shardwise.report.judged_gates import gates_of
from shardwise.units import GIB, format_bytes

CURVES = ("loss", "speed", "mfu", "memory", "step-time", "gradient", "data", "lr")
HOSTILE = "<img src=x onerror=alert(1)></script></style><script>alert(2)</script>\"'&\x00\ud800"
VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Elements and text; complains where an element is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.elements


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = eventful(plan_of(tmp_path, "name=first", "train.steps=300", "train.global_batch=256"))
    keep_checkpoints(run.write(), 200, 250, 300)
    return run.plan.run_dir


def page_of(*folders: Path, **how: Any) -> str:
    return render_report(collect_runs(folders), BEGAN + 9000, **how)


def test_every_plot_has_one_point_a_logged_step(folder: Path) -> None:
    page, run = page_of(folder), collect_run(folder)
    evals = len(run.history("eval"))
    # 1, 10, ..., 150, 151, 160, ..., 260, 261, 270, ..., 300; evaluations at 0, 50, ..., 300
    assert len(run.steps) == 33
    assert evals == 7
    for name in CURVES:
        expected = 33 + (evals if name == "loss" else 0)
        assert len(circles(page, name)) == expected
        assert re.search(rf'id="plot-{name}"[^>]* data-points="{expected}"', page)


def test_plan_bands_are_drawn_where_a_plan_says_something(folder: Path) -> None:
    page = page_of(folder)
    bands = {name for name in CURVES if 'class="band' in plot(page, name)}
    assert bands == {"speed", "mfu", "memory", "step-time"}
    assert "± 10%" in plot(page, "speed")
    assert "± 5%" in plot(page, "memory")


def plot(page: str, name: str) -> str:
    begin = page.index(f'id="plot-{name}"')
    return page[begin : page.index("</svg>", begin)]


def test_what_happened_is_on_the_page(folder: Path) -> None:
    page = page_of(folder)
    for text in (
        "rank 5 failed: killed by signal SIGKILL",
        "does not fit on one device; all ranks share one fast domain",
        "considered besides",
        "reduce_scatter backward",
        "rank 3 was up to 12.0 ms per step behind the others",
        "raise data.workers, or move the data to a local disk",
        "productive",
        "recompute",
        "2.11.0",
        "first: at work for",
        "nonfinite at step 261",
        "30.0 ms of it exposed",
        "2, 1 of them after a failure",
    ):
        assert text in page, text
    assert page.count('class="mark restart') == len(CURVES)


def test_sections_of_events_that_are_not_there_are_not_there(tmp_path: Path) -> None:
    run = SampleRun(plan_of(tmp_path, "train.steps=300"))
    run.start(0)
    run.train(1, 20)
    page = page_of(run.write())
    assert '<section id="collectives"' not in page
    assert '<section id="profile"' not in page
    assert '<section id="where"' in page


def test_the_ranks_of_a_pipeline_stand_beside_their_plan(tmp_path: Path) -> None:
    words = "mesh: {pipeline: 2}\ntrain: {accumulation: 4}\n"
    text = f"model: tiny-llama\ndata: synthetic\ncluster: 2xCPU\n{words}"
    run = SampleRun(plan_of(tmp_path, text=text))
    run.start(0)
    page = html.unescape(page_of(run.write()))
    assert '<section id="stages"' in page and "not measured yet" in page
    ranks = [
        {"rank": rank, "busy_s": 2.0 - rank, "allocated": 2**30, "reserved": 2**30}
        for rank in (0, 1)
    ]
    run.train(1, 20)
    run.say("pipeline", step=20, bubble=0.412, planned=0.3, stages=ranks)
    page = html.unescape(page_of(run.write()))
    planned = planned_ranks(run.plan)
    for words in (planned[1].blocks, format_bytes(planned[1].memory.total), "1.00 s a step"):
        assert words in page
    assert f"41.2% measured, {planned_bubble(run.plan):.1%} planned" in page
    assert "50.0%" in page and "1.0 GiB" in page


def test_a_verdict_on_an_earlier_end_is_not_shown(tmp_path: Path) -> None:
    run = SampleRun(plan_of(tmp_path, "train.steps=300"))
    run.start(0)
    run.train(1, 20)
    recorded = {"name": "of step 20", "figure": "", "bound": "", "verdict": "pass", "advice": ""}
    run.say("gates", gates=[recorded])
    assert [gate["name"] for gate in gates_of(collect_run(run.write()))] == ["of step 20"]
    run.start(20)
    run.train(21, 40)
    assert "of step 20" not in {gate["name"] for gate in gates_of(collect_run(run.write()))}


def test_gates_are_judged_where_the_record_holds_none(tmp_path: Path) -> None:
    run = SampleRun(plan_of(tmp_path, "train.steps=300"), slow=3.0)
    run.start(0)
    assert '<section id="gates"' not in page_of(run.write())
    run.train(1, 60)
    run.collectives(60)
    run.profile(50)
    found = {gate["name"]: gate for gate in gates_of(collect_run(run.write()))}
    assert found["mfu"]["verdict"] == "fail"
    assert found["gradient norm"]["verdict"] == "pass"
    assert found["ranks"]["figure"] == "rank 3 12 ms late"
    assert found["overlap"]["figure"] == "5.0%"
    assert found["plan"]["advice"] in html.unescape(page_of(run.plan.run_dir))


def test_a_cpu_gets_no_mfu_and_is_told_why(tmp_path: Path) -> None:
    text = "model: tiny-llama\ndata: synthetic\ncluster: 2xCPU\n"
    run = SampleRun(plan_of(tmp_path, text=text))
    run.start(0)
    run.train(1, 20)
    page = page_of(run.write())
    assert "no MFU: the peak of this device is not known" in page
    assert len(circles(page, "speed")) == 3
    planned = run.plan.memory.total / GIB
    assert f"plan {planned:.2f} GiB ± 5%" in plot(page, "memory")
    assert ">memory allocated<" not in page


@pytest.mark.parametrize("pieces", [(), ("plan.json",), ("events.jsonl",), ("config.yaml",)])
def test_any_piece_may_be_missing(folder: Path, pieces: tuple[str, ...]) -> None:
    for name in {"plan.json", "events.jsonl", "config.yaml"} - set(pieces):
        (folder / name).unlink()
    outline(page_of(folder))


def test_broken_events_do_not_break_the_page(tmp_path: Path) -> None:
    whole = eventful(plan_of(tmp_path, "train.steps=300"))
    odd: list[Any] = [None, "x", -1, 0, 1e99, 10**400, float("nan"), float("inf"), [], {}, True]
    for event in list(whole.events):
        for at, key in enumerate(event):
            if key != "event":
                whole.events.append({**event, key: odd[at % len(odd)]})
                whole.events.append({name: kept for name, kept in event.items() if name != key})
    outline(page_of(whole.write()))
    whole.events.reverse()
    outline(page_of(whole.write()))


def test_nothing_from_files_becomes_markup(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.steps=300")
    run = eventful(plan)
    for event in run.events:
        for key in event:
            if key in ("reason", "why", "tokenizer") or event["event"] == "gates":
                event[key] = HOSTILE if key not in ("event", "time", "gates") else event[key]
    run.say(HOSTILE, step=3, text=HOSTILE, **{HOSTILE: HOSTILE})
    hostile_row = {"kind": HOSTILE, "phase": HOSTILE, "count": HOSTILE, "p50_s": 0.1}
    run.say("collectives", step=300, rows=[hostile_row], straggler=HOSTILE)
    run.say(
        "gates", gates=[dict.fromkeys(("name", "figure", "bound", "verdict", "advice"), HOSTILE)]
    )
    run.say("start", step=300, world_size=HOSTILE, versions={HOSTILE: HOSTILE})
    folder = run.write()
    data = json.loads((folder / "plan.json").read_text())
    for choice in data["choices"].values():
        choice["why"] = HOSTILE
    data["model"]["name"] = data["cluster"]["name"] = HOSTILE
    data["warnings"] = [HOSTILE]
    (folder / "plan.json").write_text(json.dumps(data))
    (folder / "config.yaml").write_text("name: </pre><script>alert(3)</script>")
    hostile = folder.rename(folder.with_name("<b onclick=alert(4)>run"))
    page = page_of(hostile)
    found = outline(page)
    assert [tag for tag, _ in found].count("script") == 1
    assert not {"img", "b onclick"} & {tag for tag, _ in found}
    assert not [name for _, attrs in found for name in attrs if name.startswith("on")]
    assert "onerror=alert" in page  # shown as text
    page.encode("utf-8", "replace")


def test_the_page_asks_nobody_for_anything(folder: Path) -> None:
    page = page_of(folder)
    for _, attrs in outline(page):
        assert not {"src", "href", "srcset", "action", "style"} & set(attrs)
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src &#x27;none&#x27;" in page


def test_several_runs_share_the_plots(folder: Path, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "name=second", "train.steps=300", "memory.checkpoint_activations=full")
    other = eventful(plan, slow=1.2, seed=1).write()
    page = page_of(folder, other)
    assert len(circles(page, "speed")) == 66
    assert {"first", "second"} <= set(re.findall(r"<li><i[^>]*></i>(\w+)</li>", page))
    assert page.count('class="band') == 8
    assert 'id="differences"' in page
    assert re.search(r"<td>checkpoint_activations</td><td>\w+</td><td>full</td>", page)
    ids = [attrs["id"] for _, attrs in outline(page) if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_a_live_page_loads_itself_again(folder: Path) -> None:
    assert 'data-reload="5.0"' in page_of(folder, reload_s=5.0)
    assert "data-reload" not in page_of(folder).replace("dataset.reload", "")


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    run = SampleRun(plan_of(tmp_path, "train.steps=100000"))
    run.start(0)
    run.train(1, 50_000, save=1000)
    page = page_of(run.write())
    assert len(page) < 2_000_000
    assert "points are drawn, the extremes among them" in page
