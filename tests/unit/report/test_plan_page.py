"""The page of a plan: through the command, figure by figure beside plan.json, and in a Chromium."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from looks import CUT, OVERLAPS, WIDER, look_everywhere
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import ExitCode, UserError

LLAMA_70B = "model: llama-3.1-70b\ndata: {source: synthetic, seq_len: 4096}\ncluster: 8x8xH100\n"
ON_CPUS = "model: tiny-llama\ndata: {source: synthetic, seq_len: 128}\ncluster: 2xCPU\n"
READ = "document.querySelector('#plot-{}').closest('figure').querySelector('.readout').textContent"
CENTRE = """(({{left, top, width, height}}) => [left + width / 2, top + height / 2])
  (document.querySelector('{}').getBoundingClientRect())"""


class Figures(HTMLParser):
    """Every figure that says its place in plan.json, and the JSON that the script reads."""

    def __init__(self) -> None:
        super().__init__()
        self.exact: list[tuple[str, float]] = []
        self.json = ""
        self.ids: list[str] = []
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if path := found.get("data-of"):
            self.exact.append((path, float(found["value"] or "")))
        if name := found.get("id"):
            self.ids.append(name)
        self._in_data = tag == "script" and found.get("id") == "data"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.json += data


def say(folder: Path, *words: str) -> str:
    """What `shardwise plan` prints for the file of the folder."""
    said = CliRunner().invoke(app, ["plan", str(folder / "run.yaml"), *words])
    if said.exception is not None:
        raise said.exception
    return said.stdout


def at(tree: Any, path: str) -> Any:
    for step in path.split("."):
        tree = tree[int(step)] if isinstance(tree, list) else tree[step]
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of 70B on 64 GPUs as a page."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "run.yaml").write_text(LLAMA_70B)
    said = say(folder, "--html", str(folder / "plan.html"), "--tokens", "15e9")
    assert "next: open it in a browser" in said
    return folder


@pytest.fixture(scope="module")
def figures(folder: Path) -> Figures:
    found = Figures()
    found.feed((folder / "plan.html").read_text())
    return found


@pytest.fixture(scope="module")
def data(figures: Figures) -> dict[str, Any]:
    return dict(json.loads(figures.json))


def test_figures_are_those_of_plan_json_to_the_last_digit(folder: Path, figures: Figures) -> None:
    plan = json.loads(say(folder, "--json"))
    assert len(figures.exact) > 100
    for path, value in figures.exact:
        assert value == at(plan, path), path
    said = {path for path, _ in figures.exact}
    terms = {f"forecast.terms.{name}" for name, s in plan["forecast"]["terms"].items() if s}
    assert terms | {"forecast.tokens_per_s", "forecast.mfu", "memory.activations"} <= said
    speeds = [each["tokens_per_s"] for each in plan["alternatives"]]
    assert {f"alternatives.{n}.tokens_per_s" for n, speed in enumerate(speeds) if speed} <= said


def test_the_page_is_one_small_file_that_loads_nothing(folder: Path, figures: Figures) -> None:
    page = (folder / "plan.html").read_text()
    assert len(page) < 1_500_000
    assert "default-src &#x27;none&#x27;" in page
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in page, word
    assert len(figures.ids) == len(set(figures.ids))


def override(data: dict[str, Any], *places: int) -> list[str]:
    words = [knob["overrides"][at] for knob, at in zip(data["knobs"], places, strict=True)]
    return " ".join([*words, data["kept"]]).split()


def spot(data: dict[str, Any], *places: int) -> Any:
    index = 0
    for knob, place in zip(data["knobs"], places, strict=True):
        index = index * len(knob["shown"]) + place
    return data["spots"][index]


def test_the_sliders_begin_at_the_plan(folder: Path, data: dict[str, Any]) -> None:
    plan = json.loads(say(folder, "--json"))
    own = spot(data, *(knob["at"] for knob in data["knobs"]))
    assert own["speed"] == plan["forecast"]["tokens_per_s"]
    assert own["usd"] == plan["forecast"]["usd_per_billion_tokens"]
    assert (
        f"Prices by {plan['forecast']['price_source']}: H100, "
        in (folder / "plan.html").read_text()
    )
    assert own["terms"] == list(plan["forecast"]["terms"].values())
    assert sorted(own["held"]) == sorted(
        value for value in (plan["memory"][name] for name in PARTS)
    )


PARTS = (
    *("params", "grads", "optimizer", "gathered", "buffers", "activations", "recompute", "loss"),
    *("allocator", "context", "outer"),
)


# GPUs, tokens of a sequence, recompute, sequences of a micro-batch
@pytest.mark.parametrize(
    "places",
    [
        (3, 1, 5, 2),
        (1, 3, 5, 0),
        pytest.param((4, 2, 1, 0), marks=pytest.mark.long),
        pytest.param((2, 0, 4, 3), marks=pytest.mark.long),
        pytest.param((3, 4, 5, 1), marks=pytest.mark.long),
    ],
)
def test_a_place_of_the_sliders_is_what_its_command_plans(
    folder: Path, data: dict[str, Any], places: tuple[int, ...]
) -> None:
    found = spot(data, *places)
    plan = json.loads(say(folder, *override(data, *places), "--json"))
    assert found["fits"]
    assert found["speed"] == plan["forecast"]["tokens_per_s"]
    assert found["hours"] == plan["forecast"]["hours_per_billion_tokens"]
    assert sum(found["held"]) == sum(plan["memory"][name] for name in PARTS)


def test_a_place_that_does_not_fit_is_one_that_the_command_refuses(
    folder: Path, data: dict[str, Any]
) -> None:
    places = (0, 2, 0, 4)
    assert spot(data, *places)["fits"] is False
    with pytest.raises(UserError, match="does not fit") as error:
        say(folder, *override(data, *places))
    assert error.value.code == ExitCode.DOES_NOT_FIT


def test_a_plan_without_speed_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(ON_CPUS)
    say(tmp_path, "--html", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert "No rates are known for this CPU" in page
    assert 'id="time"' not in page
    assert 'id="plot-memory"' in page


def test_nothing_but_an_older_page_is_replaced(folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    (tmp_path / "run.yaml").write_text(ON_CPUS)
    with pytest.raises(UserError, match="is not the page of a plan") as error:
        say(tmp_path, "--html", str(notes))
    assert f"--html {tmp_path / 'notes-2.txt'}" in error.value.fix
    assert notes.read_text() == "mine"
    with pytest.raises(UserError, match="there is no directory"):
        say(tmp_path, "--html", str(tmp_path / "none" / "plan.html"))
    with pytest.raises(UserError, match="--html and --json answer apart"):
        say(tmp_path, "--html", str(notes), "--json")


def test_chromium_shows_the_page_by_day_by_night_and_on_a_phone(
    page: Page, folder: Path, tmp_path: Path
) -> None:
    target = folder / "plan.html"
    page.look(1280)
    page.open(target)
    assert page.requests() == [target.resolve().as_uri()]
    look_everywhere(page, "plan", tmp_path, finds_nothing=(OVERLAPS, WIDER, CUT))
    page.print(tmp_path / "plan.pdf")
    assert (tmp_path / "plan.pdf").read_bytes().startswith(b"%PDF")
    assert page.complaints() == []


def press(page: Page, key: str) -> None:
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **KEYS[key])


KEYS = {
    "ArrowRight": {"windowsVirtualKeyCode": 39},
    "ArrowLeft": {"windowsVirtualKeyCode": 37},
    "Home": {"windowsVirtualKeyCode": 36},
    "Tab": {"windowsVirtualKeyCode": 9},
}


def test_the_sliders_answer_keys_and_say_what_is_found(
    page: Page, folder: Path, data: dict[str, Any]
) -> None:
    page.look(1280)
    page.open(folder / "plan.html")
    own = [knob["at"] for knob in data["knobs"]]
    tiles = page.ask("document.querySelector('.hero').innerText")
    assert page.ask("document.getElementById('try-time').textContent") in tiles
    assert page.ask("document.getElementById('try-cost').textContent") in tiles
    page.ask("document.getElementById('knob-gpus').focus()")
    press(page, "ArrowRight")
    found = spot(data, own[0] + 1, *own[1:])
    assert page.ask("document.getElementById('try-speed').textContent") == f"{found['speed']:,.0f}"
    label = data["labels"][found["label"]]
    assert page.ask("document.getElementById('try-label').textContent") == f"fits: {label}"
    gpus = page.ask("document.getElementById('knob-gpus').getAttribute('aria-valuetext')")
    assert gpus == data["knobs"][0]["shown"][own[0] + 1]
    page.ask("document.getElementById('knob-recompute').focus()")
    press(page, "Home")
    assert "does not fit, even with" in page.ask("document.getElementById('try').innerText")
    page.ask("document.getElementById('try-back').click()")
    assert "−" not in page.ask("document.querySelector('.answer').innerText")
    assert page.complaints() == []


def test_a_slider_follows_the_pointer(page: Page, folder: Path, data: dict[str, Any]) -> None:
    page.look(1280, height=2400)
    page.open(folder / "plan.html")
    x, y = page.ask(CENTRE.format("#knob-sequence"))
    speeds = set()
    page.call(
        "Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1
    )
    for far in range(0, 120, 30):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + far, y=y, button="left")
        speeds.add(page.ask("document.getElementById('try-speed').textContent"))
    page.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left")
    assert len(speeds) > 1


def test_points_are_read_by_pointer_keys_and_touch(page: Page, folder: Path) -> None:
    page.look(1280, height=4000)
    page.open(folder / "plan.html")
    frontier = READ.format("frontier")
    assert page.ask(frontier).startswith("chosen, ")
    x, y = page.ask(CENTRE.format("#plot-frontier .series.dashed circle"))
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert "does not fit" in page.ask(frontier)
    assert "leaves too little room" in page.ask(frontier)
    page.ask("document.querySelector('#plot-memory').focus()")
    press(page, "Home")
    assert page.ask(READ.format("memory")).startswith("between steps: ")
    press(page, "ArrowRight")
    assert page.ask(READ.format("memory")).startswith("loss: ")
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    x, y = page.ask(CENTRE.format("#plot-sizes-speed circle"))
    for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
        page.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    page.call("Emulation.setTouchEmulationEnabled", enabled=False)
    assert "H100, 16 GPUs: " in page.ask(READ.format("sizes-speed"))
    assert page.ask("[...document.querySelectorAll('svg .point title')].length") > 100


def test_a_reader_may_write_prices(page: Page, folder: Path) -> None:
    page.look(1280)
    page.open(folder / "plan.html")
    price = "document.querySelectorAll('#prices input')[1]"
    page.ask(f"{price}.value = 2; {price}.dispatchEvent(new Event('input'))")
    hours = float(page.ask(f"{price}.dataset.hours"))
    cost = page.ask(f"{price}.closest('tr').querySelector('output').textContent")
    assert cost == f"{2 * hours:,.0f}"
