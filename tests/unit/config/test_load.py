from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_configs import BAD_CONFIGS, BadConfig

from shardwise.config.load import load_config
from shardwise.config.plain import config_from_dict, config_to_dict, dump_yaml
from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, UserError


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str, file: str = "run.yaml") -> RunConfig:
    Path(file).write_text(text)
    return load_config(file, overrides)


def refusal(text: str, *overrides: str, file: str = "run.yaml") -> str:
    with pytest.raises(UserError) as caught:
        load(text, *overrides, file=file)
    assert caught.value.code == ExitCode.CONFIG
    return str(caught.value)


@pytest.mark.parametrize("bad", BAD_CONFIGS, ids=lambda bad: bad.id)
def test_bad_config_is_refused_with_its_reason(bad: BadConfig) -> None:
    message = refusal(bad.text, *bad.overrides)
    assert "fix:" in message
    for words in bad.says:
        assert words in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "optim:\ntrain:\n"])
def test_what_is_not_said_has_a_default(text: str) -> None:
    assert load(text) == RunConfig()


def test_three_lines_are_a_run() -> None:
    config = load("model: tiny-llama\ndata: stdlib\ncluster: 8xH100\n")
    assert (config.model.name, config.data.source, config.cluster.name) == (
        "tiny-llama",
        "stdlib",
        "8xH100",
    )


def test_the_file_names_the_run() -> None:
    assert load("", file="first-try.yaml").name == "first-try"
    assert load("name: second", file="first-try.yaml").name == "second"


@pytest.mark.parametrize("spelling", ["3e-4", "3.0e-4", "0.0003", "3E-4", "+3e-04", ".3e-3"])
def test_every_spelling_of_a_float_is_a_float(spelling: str) -> None:
    assert load(f"optim: {{lr: {spelling}}}").optim.lr == pytest.approx(3e-4)
    assert load("", f"optim.lr={spelling}").optim.lr == pytest.approx(3e-4)


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
    clip = load("optim: {clip_norm: 1}").optim.clip_norm
    assert clip == 1.0
    assert isinstance(clip, float)


def test_words_of_yaml_1_1_stay_text() -> None:
    config = load("name: on\ndata: {field: 12:30:00, split: 2024-01-01}")
    assert (config.name, config.data.field, config.data.split) == ("on", "12:30:00", "2024-01-01")


@pytest.mark.parametrize(
    ("text", "source", "path"),
    [
        ("synthetic", "synthetic", None),
        ("notes.jsonl", "jsonl", "notes.jsonl"),
        ("a/b.json", "jsonl", "a/b.json"),
        ("corpus/", "text", "corpus/"),
        ("notes.txt", "text", "notes.txt"),
        ("here", "text", "here"),
    ],
)
def test_data_as_a_bare_string(text: str, source: str, path: str | None) -> None:
    Path("here").mkdir()
    for config in (load(f"data: {text}"), load("data: old.txt", f"data={text}")):
        assert (config.data.source, config.data.path) == (source, path)


def test_overrides_win_and_keep_the_rest() -> None:
    config = load(
        "model: {name: a, overrides: {x: 1}}\noptim: {lr: 1, eps: 1}\n",
        "model=tiny-llama",
        "model.overrides.num_hidden_layers=16",
        "model.overrides.rope.factor=2",
        "optim.lr=2",
        "optim.clip_norm=null",
        "mesh={shard: 4, replicate: 2}",
        "train.micro_batch=auto",
    )
    assert config.model.name == "tiny-llama"
    assert config.model.overrides == {"x": 1, "num_hidden_layers": 16, "rope": {"factor": 2}}
    assert (config.optim.lr, config.optim.eps, config.optim.clip_norm) == (2.0, 1.0, None)
    assert (config.mesh.shard, config.mesh.replicate) == (4, 2)
    assert config.train.micro_batch == "auto"


def test_later_overrides_win() -> None:
    assert load("", "train.steps=5", "train.steps=6").train.steps == 6


def test_an_override_does_not_hide_a_broken_section() -> None:
    assert "section `optim` is 5" in refusal("optim: 5", "optim.lr=1")


def test_toml_and_json_say_the_same() -> None:
    yaml = load("name: a\nmodel: tiny-llama\noptim:\n  betas: [0.9, 0.99]\n")
    toml = load("name = 'a'\nmodel = 'tiny-llama'\n[optim]\nbetas = [0.9, 0.99]\n", file="a.toml")
    tree = {"name": "a", "model": "tiny-llama", "optim": {"betas": [0.9, 0.99]}}
    assert yaml == toml == load(json.dumps(tree, indent="\t"), file="a.json")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("a.toml", "[train]\n\nstep = 3\n", ("a.toml:3", "`steps`")),
        ("a.toml", "train.steps = 'x'\n", ("a.toml:1", "train.steps")),
        ("a.toml", "train = {steps = 'x'}\n", ("a.toml:1", "train.steps")),
        ("a.toml", "[train\n", ("a.toml:1", "not valid TOML")),
        ("a.toml", "[train]\nsteps = 1\nsteps = 2\n", ("a.toml:3", "not valid TOML")),
        ("a.json", '{\n"train": {\n"steps": "x"}}', ("a.json:3", "train.steps")),
        ("a.json", '{"train":\n }, }', ("a.json:2", "not valid JSON")),
        ("a.json", '{"name": "a",\n"name": "b"}', ("a.json:2", "given twice")),
        ("a.json", "{'name': 1}", ("a.json:1", "not valid JSON")),
        ("a.ini", "x", ("a.ini", "suffix", "a.yaml")),
    ],
)
def test_faults_in_other_formats_have_places(file: str, text: str, says: tuple[str, ...]) -> None:
    message = refusal(text, file=file)
    for words in says:
        assert words in message


def test_a_missing_file_names_its_neighbours() -> None:
    Path("llama.yaml").touch()
    for wrong, says in [
        ("lama.yaml", "did you mean llama.yaml?"),
        ("zzz.yaml", "llama.yaml"),
        ("nowhere/run.yaml", "no directory nowhere"),
        (".", "is a directory"),
    ]:
        with pytest.raises(UserError, match="fix:") as caught:
            load_config(wrong)
        assert says in str(caught.value)


def test_bytes_that_are_no_text_are_refused() -> None:
    Path("run.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        load_config("run.yaml")


ODD_TEXT = ("3e-4", "on", "null", "", "~", "true", "0x1f", "1_000", "a: b", "# c", "- d", "ü\n e")


def test_round_trips_are_exact() -> None:
    config = load(
        "shard: {unit_classes: [A, B], reshard_after_forward: 8}\noptim: {betas: [0.5, 0.75]}\n",
        "memory.checkpoint_activations=0.5",
        "train.stop_after=3",
        f"model.overrides={json.dumps({text: text for text in ODD_TEXT})}",
        f"data.split={json.dumps('3e-4')}",
    )
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert load(dump_yaml(config), file="again.yaml") == config
    assert config_from_dict({}) == RunConfig()


def test_a_plan_of_another_version_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim\.lrr"):
        config_from_dict({"optim": {"lrr": 1}})


def test_reading_a_saved_config_imports_neither_pydantic_nor_torch() -> None:
    code = (
        "import sys; from shardwise.config.plain import config_from_dict; config_from_dict({});"
        "print([m for m in ('pydantic', 'torch') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert run.stdout.strip() == "[]"
