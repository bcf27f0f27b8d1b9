"""Text that would take for ever, fill the memory or break Python's stack: through the command."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import alias_bomb, put_holes, put_pipe, within
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import shardwise.launch.this_machine as local
from shardwise.cli.main import main
from shardwise.config.schema import DataConfig
from shardwise.data.bad_records import FaultBudget
from shardwise.data.sources import read_documents
from shardwise.errors import UserError
from shardwise.plan.planned import Plan

RUN: dict[str, Any] = {
    "model": "tiny-llama",
    "data": {"source": "stdlib", "seq_len": 64},
    "cluster": "1xCPU",
}
SHAPE: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2},
    **{"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1},
}
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """`shardwise WORDS` in an empty directory: its exit code, and all that it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(local, "start_ranks", lambda *_: sys.exit(0))

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shardwise", *words])
        code = 0
        try:
            with within(120):
                main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    yield run


def refused(command: Command, *words: str, code: int = 2) -> str:
    """What it said; an error, with a fix and not with a page of the file."""
    found, said = command(*words)
    assert found == code, said
    assert "fix: " in said and "Traceback" not in said and len(said) < 3000
    return said


def write_run(**changes: Any) -> None:
    Path("run.json").write_text(json.dumps(RUN | changes))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "a: " + "[" * 100_000),
        ("run.yaml", "- " * 50_000),
        ("run.yaml", "".join(" " * n + "a:\n" for n in range(400))),
        ("run.json", "[" * 100_000),
        ("run.json", '{"a":' * 60 + "1" + "}" * 60),
        ("run.toml", "a = " + "[" * 100_000),
        ("run.toml", "a." * 100_000 + "a = 1"),
        ("run.toml", "[" + "'a' . " * 30_000 + "a]"),
        ("run.toml", "x = {" + "a." * 60 + "a = 1}"),
    ],
)
def test_a_deep_configuration_is_refused(command: Command, name: str, text: str) -> None:
    Path(name).write_text(text)
    assert "nested too deeply" in refused(command, "plan", name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", alias_bomb()),
        ("run.yaml", "- a\n" * 60_000),
        ("run.yaml", "a: [" + "a," * 120_000 + "]"),
        ("run.json", "[" + "1," * 120_000 + "1]"),
        ("run.toml", "a = [" + "1," * 120_000 + "]"),
    ],
)
def test_a_configuration_of_endless_values_is_refused(
    command: Command, name: str, text: str
) -> None:
    Path(name).write_text(text)
    assert "more than 10000 values" in refused(command, "plan", name)


@pytest.mark.parametrize("name", ["run.yaml", "run.json", "run.toml"])
def test_a_number_of_thousands_of_digits_is_refused(command: Command, name: str) -> None:
    spelt = {"run.toml": "[train]\nsteps = %s", "run.json": '{"train": {"steps": %s}}'}
    Path(name).write_text(spelt.get(name, "train: {steps: %s}") % ("9" * 5000))
    said = refused(command, "plan", name)
    assert "64 bits" in said and "set_int_max_str_digits" not in said
    write_run()
    assert "64 bits" in refused(command, "plan", "run.json", "train.steps=" + "9" * 5000)


def test_an_override_thousands_of_levels_deep_is_refused(command: Command) -> None:
    write_run()
    for word in ("model.overrides" + ".a" * 5000 + "=1", "model.overrides=" + "{a: " * 3000):
        assert "deep" in refused(command, "plan", "run.json", word)


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\x1b[2J", "a/b", "..", "x" * 300, "", "\u202e"])
def test_a_name_that_is_no_directory_name_is_refused(command: Command, name: str) -> None:
    write_run(name=name)
    for verb in ("plan", "train"):
        assert "name is " in refused(command, verb, "run.json")


def test_what_is_no_plain_file_is_no_configuration(command: Command) -> None:
    put_pipe(Path("run.yaml"))
    assert "run.yaml is no plain file" in refused(command, "plan", "run.yaml")
    put_holes(Path("large.yaml"), 2**40)
    assert "too many for a configuration" in refused(command, "plan", "large.yaml")


@pytest.mark.parametrize("text", ["[" * 20_000, alias_bomb(), "gpu_hour: {h100: %s}" % ("9" * 400)])
def test_prices_are_read_with_the_same_limits(command: Command, text: str) -> None:
    write_run(cluster={"name": "8xH100", "prices": "prices.yaml"})
    Path("prices.yaml").write_text(text)
    assert "prices.yaml:" in refused(command, "plan", "run.json")
    put_pipe(Path("prices.yaml"))
    assert "it is a pipe" in refused(command, "plan", "run.json")


# ---- data and models ---------------------------------------------------------------------------


def test_pipes_among_tokenizers_weights_and_datasets_are_refused(command: Command) -> None:
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    put_pipe(model / "pytorch_model.bin")
    write_run(model="model")
    assert "pytorch_model.bin is not a whole file" in refused(command, "train", "run.json")
    (model / "pytorch_model.bin").unlink()
    put_holes(model / "tokenizer.json", 2**40)
    assert "tokenizer.json" in refused(command, "train", "run.json")
    Path("rows").mkdir()
    Path("rows", "state.json").write_text("{}")
    put_pipe(Path("rows", "data-00000-of-00001.arrow"))
    write_run(data={"source": "datasets", "path": "rows"})
    assert "arrow, which is no plain file" in refused(command, "train", "run.json")


def test_a_record_or_a_document_that_fills_the_memory_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.data.sources._MAX_RECORD_BYTES", 2**16)
    monkeypatch.setattr("shardwise.data.sources.MAX_TEXT_BYTES", 2**16)
    put_holes(Path("data.jsonl"), 2**20)
    write_run(data="data.jsonl")
    assert "data.jsonl:1: it is longer than 64.0 KiB" in refused(command, "train", "run.json")
    Path("text.txt.gz").write_bytes(gzip.compress(b"word " * 2**16))
    with pytest.raises(UserError, match="more than 64"):
        list(read_documents(DataConfig(source="text", path="text.txt.gz"), FaultBudget(0)))


def test_the_text_beside_a_number_of_thousands_of_digits_is_a_corrupt_record(
    command: Command,
) -> None:
    deep = '{"text": "so be it", "id": ' + "[" * 50_000 + "\n"
    long = '{"text": "so be it", "id": ' + "9" * 5000 + "}\n"
    write_run(data={"source": "jsonl", "path": "data.jsonl", "max_corrupt": 0})
    Path("data.jsonl").write_text(deep)
    assert "nested too deeply" in refused(command, "train", "run.json")
    Path("data.jsonl").write_text(long)
    assert "a number of thousands of digits" in refused(command, "train", "run.json")


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("run.json", ("plan", "run.json"), 2),
        ("data.jsonl", ("train", "run.json"), 4),
        ("plan.json", ("verify", "run"), 4),
        ("events.jsonl", ("verify", "run"), 4),
        ("events.jsonl", ("report", "run"), 0),
    ],
)
def test_a_file_that_vanishes_while_it_is_read_is_named(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    name: str,
    words: tuple[str, ...],
    code: int,
) -> None:
    Path("data.jsonl").write_text('{"text": "so be it"}\n' * 9)
    write_run(data="data.jsonl")
    Path("run").mkdir()
    plan.save(Path("run", "plan.json"))
    Path("run", "events.jsonl").touch()
    real = os.open

    def after_it_is_gone(path: Any, *arguments: Any, **named: Any) -> int:
        if Path(path).name == name:
            Path(path).unlink(missing_ok=True)
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", after_it_is_gone)
    found, said = command(*words)
    assert found == code and "Traceback" not in said
    assert code == 0 or (name in said and "No such file" in said and "fix: " in said)


# ---- what a long run of mutated inputs has found ------------------------------------------------


def make_model(**tokens: int) -> Path:
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, **tokens}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(model)
    return model


def test_an_id_beyond_any_vocabulary_is_refused(command: Command) -> None:
    make_model(one=2)
    file = Path("model", "tokenizer.json")
    file.write_text(file.read_text().replace('"one": 2', '"one": 2147483648'))
    write_run(model="model", data={"source": "stdlib", "seq_len": 64})
    assert "a token with the id 2147483648" in refused(command, "train", "run.json")


def test_an_index_that_names_no_file_is_refused(command: Command) -> None:
    model = make_model(one=2)
    (model / "model.safetensors").touch()
    index = {"weight_map": {"lm_head.weight": ""}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    write_run(model="model")
    assert "which is not a file beside it" in refused(command, "train", "run.json")


def test_a_device_of_thousands_of_digits_is_none(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9" * 5000)
    write_run()
    assert command("plan", "run.json", "cluster=local")[0] == 0


def test_an_error_is_shown_in_no_columns(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "missing.yaml" in refused(command, "plan", "missing.yaml")
