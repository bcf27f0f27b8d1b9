"""Each bad input is refused with advice, and whoever follows the advice gets past the error.

The ways out of a `fix:` are read by tests/unit/advice.py and typed for the same input. Afterwards
the command must end well, or with another error: one that the next advice is about.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import advice
import pytest
import typer
import yaml
from bad_configs import BAD_CONFIGS
from bad_inputs import BAD_INPUTS, TINY, BadInput
from checkpoints import SHARD, make_checkpoint

from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.cli.main import main
from shardwise.config.load import load_config
from shardwise.config.schema_text import default_setting, describe_fields
from shardwise.config.trees import YamlDumper, read_yaml
from shardwise.data.splits import build_sequences
from shardwise.errors import UserError
from shardwise.launch.prepare import choose_plan

ROWS = (
    *BAD_INPUTS,
    *(BadInput(f"config: {b.id}", ("plan", "run.yaml", *b.overrides), b.text) for b in BAD_CONFIGS),
)
# What placeholders may stand for in the world that these tests are in; others stay the user's.
SAMPLES = {"FILES": "texts"}
EXECUTED = ("shardwise", "mkdir", "rm", "mv", "cp", "ls")


class Outcome(NamedTuple):
    code: int
    said: str

    @property
    def faults(self) -> list[tuple[str, str]]:
        """(what is wrong, its fix) of every fault of the one error."""
        what = r"^(?:error: | {2})(?!why: |fix: )(.*(?:\n {4}(?!fix: ).*)*)"
        found = re.findall(rf"{what}(?:\n  why: .*)*\n {{2,4}}fix: (.*)", self.said, re.M)
        return [(what.strip(), fix.strip()) for what, fix in found]


Run = Callable[[tuple[str, ...], str], Outcome]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, checkpoints, models and texts, some of them bad."""
    home = tmp_path_factory.mktemp("home")
    for name in ("empty", "broken", "nameless", "configs", "texts"):
        (home / name).mkdir()
    (home / "broken/config.json").write_text("{")
    (home / "nameless/config.json").write_text("{}")
    (home / "configs/a.yaml").write_text(TINY)
    (home / "run.conf").write_text(TINY)
    for number in range(20):
        (home / f"texts/{number}.txt").write_text(f"document {number} " * 200)
    (home / "one.txt").write_text("one document " * 20)
    lines = [json.dumps({"content": f"record {number} " * 20}) for number in range(40)]
    (home / "records.jsonl").write_text("\n".join(lines))
    (home / "broken.jsonl").write_text("\n".join(["{"] * 40 + ['{"text": "whole"}'] * 40))
    config = load_config(None, ["model=tiny-llama", "cluster=2xCPU", "name=demo"])
    plan = choose_plan(config, {})
    for run in ("demo", "other", "bad", "lost"):
        folder = home / "runs" / run
        folder.mkdir(parents=True)
        plan.save(folder / "plan.json")
        (folder / "events.jsonl").write_text("")
        for step in (20, 40, 60):
            made = make_checkpoint(folder / "checkpoints", step, plan=plan.to_dict())
            if run == "lost":
                (made.path / SHARD).write_bytes(b"cut")
    shard = home / "runs/bad/checkpoints/step-00000060" / SHARD
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    return home


@pytest.fixture
def run(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., Run]]:
    """Runs words against a fresh copy of the home, short of starting ranks."""

    def done(*_: Any, **__: Any) -> None:
        raise typer.Exit(0)

    for start in (
        "shardwise.launch.this_machine.run_supervised",
        "shardwise.launch.measuring.ask_ranks",
        "shardwise.calibrate.machine.ask_ranks",
    ):
        monkeypatch.setattr(start, done)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "here"

    def fresh() -> None:
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(home, place)
        monkeypatch.chdir(place)

    def on_command_line(words: tuple[str, ...], text: str) -> Outcome:
        if words[:1] == ("tunnel",):
            for name in ("run_fake", "run_timed"):
                monkeypatch.setattr(f"shardwise.tunnel.tunnel_run.{name}", done)
        Path("run.yaml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["shardwise", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return Outcome(int(caught.value.code or 0), said)

    runners: dict[str, Run] = {
        "cli": on_command_line,
        "data": lambda words, _: raised_by(lambda: _read_data(words)),
        "export": lambda words, _: raised_by(lambda: _find_export(words)),
    }

    def runner(name: str, *, anew: bool = False) -> Run:
        if anew or not place.exists():
            fresh()
        return runners[name]

    yield runner


def raised_by(work: Callable[[], object]) -> Outcome:
    try:
        work()
    except UserError as error:
        return Outcome(int(error.code), f"error: {error}\n")
    return Outcome(0, "")


def _read_data(words: tuple[str, ...]) -> None:
    config = load_config(None, ["model=tiny-llama", *words])
    build_sequences(
        config.data, vocab_size=512, model_name="tiny-llama", seed=0, cache_root=Path("cache")
    )


def _find_export(words: tuple[str, ...]) -> None:
    from shardwise.checkpoint.export_target import validate_target

    given = dict(zip(words[1::2], words[2::2], strict=True))
    step = given.get("--step")
    path = find_checkpoint(Path(words[0]), None if step is None else int(step))
    validate_target(Path(given.get("--to", "exported")))
    try:
        verify_checkpoint(path)
    except KeyError:
        return  # its bytes are good, and the plan of a made checkpoint is empty


# ---- following advice ------------------------------------------------------------------------


def followed(way: advice.Way, row: BadInput, what: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The words and the file of whoever follows one way; several where it can be read so."""
    words, text = row.words, row.text
    match way:
        case advice.Settings(values=values):
            yield _with_settings(words, what, [f"{path}={value}" for path, value in values]), text
        case advice.LeftOut(name=name) if name.startswith("--"):
            yield _without_option(words, name), text
        case advice.LeftOut(name=name):
            yield _with_settings(words, what, [default_setting(name)]), text
        case advice.Option(name=name, value=value):
            added = (name,) if value is None else (name, value.strip('"'))
            yield (*_without_option(words, name), *added), text
        case advice.Line(text=line):
            yield words, _with_line(text, line)
        case advice.Place(path=path):
            yield from _moved(words, text, what, path)
        case advice.Meant(name=name):
            yield from _renamed(words, text, what, name)


def _with_settings(words: tuple[str, ...], what: str, settings: list[str]) -> tuple[str, ...]:
    """Instead of the word that the error is about, and of others for the same fields."""
    wrong = re.match(r"override '(.*?)':", what)
    if wrong:
        joined = " ".join(words).replace(f" {wrong[1]}", "", 1)
        words = tuple(joined.split(" ")) if joined != " ".join(words) else words
    paths = {setting.partition("=")[0] for setting in settings}
    if "cluster.name" in paths:
        words = _without_option(words, "--cluster")
    wrong_field = re.match(r"model\.overrides\.\w+", what)
    paths |= {wrong_field[0]} if wrong_field else set()
    return (*(word for word in words if word.partition("=")[0] not in paths), *settings)


def _without_option(words: tuple[str, ...], name: str) -> tuple[str, ...]:
    if name not in words:
        return words
    at = words.index(name)
    return (*words[:at], *words[at + 2 :])


def _with_line(text: str, line: str) -> str:
    """The line of that key, wherever in the file it stands, now says this."""
    key, value = line.split(": ", 1)
    tree = read_yaml(text, str).tree
    if not isinstance(tree, dict):
        return f"{line}\n"
    new = read_yaml(value, str).tree
    for place in (tree, *(each for each in tree.values() if isinstance(each, dict))):
        if key in place:
            place[key] = new
    return yaml.dump(tree, Dumper=YamlDumper)


def _moved(
    words: tuple[str, ...], text: str, what: str, path: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    key = _wrong_key(what)
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name.endswith(key):
            yield (*words[:at], f"{path}={value}", *words[at + 1 :]), text
    tree = read_yaml(text, str).tree
    if isinstance(tree, dict):
        for place in (tree, *(each for each in tree.values() if isinstance(each, dict))):
            if key in place:
                value = place.pop(key)
                rest = yaml.dump(tree, Dumper=YamlDumper)
                yield (*words, f"{path}={json.dumps(value)}"), rest


def _renamed(
    words: tuple[str, ...], text: str, what: str, name: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    if name in {field.path for field in describe_fields()} and "." in name:
        yield from _moved(words, text, what, name)
    key = _wrong_key(what)
    if key:
        renamed = (re.sub(rf"^(.*\.)?{re.escape(key)}(?=[.=])", rf"\g<1>{name}", w) for w in words)
        yield tuple(renamed), re.sub(rf"(?<![\w.]){re.escape(key)}:", f"{name}:", text)
    for at in range(1, len(words)):
        yield (*words[:at], name, *words[at + 1 :]), text
        if "." in words[at]:  # the last part of a setting's name
            yield (*words[:at], re.sub(r"\w+$", name, words[at]), *words[at + 1 :]), text


def _wrong_key(what: str) -> str:
    found = re.search(r"unknown (?:section or )?key `([\w.]+)`", what)
    return found[1] if found else ""


def follow_command(way: advice.Command, runner: Run, row: BadInput, what: str) -> bool:
    """Type it; one that changes something must get past the error, one that shows must show."""
    if way.words[0] == "shardwise":
        if len(way.words) == 2:
            return True  # `shardwise plan` names a verb, and does not say of what
        shown = runner(way.words[1:], row.text)
        return shown.code == 0 or (shown.code == 5 and "verify" in way.words)
    done = subprocess.run(way.words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return False
    if way.words[0] in ("ls", "cp"):
        return True
    words = row.words
    if way.words[0] == "mv":
        words = tuple(way.words[2] if word == way.words[1] else word for word in words)
    after = runner(words, row.text)
    return after.code == 0 or what not in after.said


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_advice_gets_past_the_error(row: BadInput, run: Callable[..., Run]) -> None:
    first = run(row.runner)(row.words, row.text)
    assert first.code not in (0, 1), f"{row.id} is not refused"
    assert first.faults, f"no fix is read from: {first.said}"
    for what, fix in first.faults:
        ways = advice.ways_of(fix)
        typed = 0
        for way in ways:
            spelled = str(way)
            for name, value in SAMPLES.items():
                spelled = spelled.replace(name, value)
            if advice.has_placeholder(spelled):
                continue
            if isinstance(way, advice.Command):
                if way.words[0] in EXECUTED:
                    assert follow_command(way, run(row.runner, anew=True), row, what), (
                        f"{fix}: {way.words}"
                    )
                typed += 1
                continue
            outcomes = []
            for words, text in followed(_sampled(way), row, what):
                outcomes.append(run(row.runner)(words, text))
                if _is_past(outcomes[-1], what):
                    break
            else:
                tried = "\n".join(outcome.said for outcome in outcomes)
                pytest.fail(f"{what}\n  fix: {fix}\n  {way} does not help:\n{tried}")
            typed += 1
        known = typed or advice.is_spoken(fix) or advice.has_placeholder(fix)
        assert known, f"{what}\n  fix: {fix}\nnothing in it can be typed: see tests/unit/advice.py"


def _sampled(way: advice.Way) -> advice.Way:
    if not isinstance(way, advice.Settings):
        return way
    return advice.Settings(tuple((path, SAMPLES.get(value, value)) for path, value in way.values))


def _is_past(outcome: Outcome, what: str) -> bool:
    """No error, or another one; of a place only the fault counts."""
    said = re.sub(r"^(?:override '.*?'|[\w./-]+:\d+): ", "", what)
    return outcome.code == 0 or said not in outcome.said


def test_there_are_inputs_of_every_kind() -> None:
    assert len(ROWS) > 250
    assert len({row.id for row in ROWS}) == len(ROWS)
