"""Every example of docs/data.md is read as the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chat_templates import CHATML, make_backend

from shardwise.config.load import load_config
from shardwise.config.schema import DataConfig
from shardwise.data.bad_records import FaultBudget
from shardwise.data.examples import read_examples
from shardwise.data.sources import read_documents
from shardwise.data.template import ChatTemplate
from shardwise.data.tokenizer import HubTokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TOKENIZER = HubTokenizer("made", make_backend())


def examples() -> Iterator[tuple[str, str, str]]:
    """What writes the files of an example, in which language, and its configuration."""
    made = ("", "")
    for language, body in _BLOCK.findall(PAGE):
        if language == "yaml":
            yield *made, body
        else:
            made = (language, body)


EXAMPLES = list(examples())


def configs_of(body: str, folder: Path) -> Iterator[DataConfig]:
    """The data of a block; where it shows alternatives, of each."""
    lines = body.splitlines(keepends=True)
    several = sum(line.startswith("data:") for line in lines) > 1
    for number, text in enumerate(lines if several else [body]):
        file = folder / f"run{number}.yaml"
        file.write_text(f"model: tiny-llama\ncluster: 1xCPU\ntrain: {{eval_every: 10}}\n{text}")
        yield load_config(file).data


def write_files(language: str, body: str, path: str) -> None:
    match language:
        case "jsonl":
            Path(path).write_text(body)
        case "text":
            for name, text in re.findall(r"^(\S+): (.+)$", body, re.MULTILINE):
                Path(name).parent.mkdir(exist_ok=True)
                Path(name).write_text(text)
        case "python":
            exec(body, {})


@pytest.mark.parametrize(
    ("language", "body", "text"),
    EXAMPLES,
    ids=[f"{n}-{' '.join(text.split())[:40]}" for n, (*_, text) in enumerate(EXAMPLES)],
)
def test_an_example_is_read(
    language: str, body: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for config in configs_of(text, tmp_path):
        # What lies on the hub is not fetched by a test.
        if isinstance(config.path, str) and config.source != "datasets":
            write_files(language, body, config.path)
            assert rows_of(config) == (body.count("\n") if language == "jsonl" else 2)


def rows_of(config: DataConfig) -> int:
    """How many rows have something to train on; none may be left out."""
    if config.format == "text":
        return sum(bool(document.text) for document in read_documents(config, FaultBudget(0)))
    found = read_examples(config, ChatTemplate(TOKENIZER, CHATML), FaultBudget(0).skip_record)
    return sum(any(any(each.mask) for each in made) for made in found)


def test_the_page_has_every_source_and_every_format(tmp_path: Path) -> None:
    shown = [each for *_, text in EXAMPLES for each in configs_of(text, tmp_path)]
    assert {each.source for each in shown} >= {"text", "jsonl", "parquet", "datasets"}
    assert {each.format for each in shown} == {
        *("text", "chat", "prompt", "instruction", "pairs", "labelled")
    }


def test_a_table_and_tokens_of_another_tool_become_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    from_csv, from_tokens = [body for name, body in _BLOCK.findall(PAGE) if name == "python"][-2:]
    Path("my.csv").write_text("id,text\n1,one document\n2,another one\n")
    exec(from_csv, {})
    table = DataConfig(source="parquet", path="my.parquet")
    texts = [document.text for document in read_documents(table, FaultBudget(0))]
    assert texts == ["one document", "another one"]
    tokenizer = make_backend().backend_tokenizer
    tokenizer.save("tokenizer.json")
    ends = [0]
    ids = [*tokenizer.encode("first").ids, *ends, *tokenizer.encode("second").ids, *ends]
    np.array(ids, dtype=np.uint16).tofile("my.bin")
    exec(from_tokens, {})
    text = DataConfig(source="jsonl", path="my.jsonl")
    texts = [document.text for document in read_documents(text, FaultBudget(0))]
    assert texts == ["first", "second"]
