"""What `shardwise train` refuses before a rank starts and before a weight is read."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import shardwise.launch.this_machine as local
from shardwise.cli.main import main

RUN = "model: tiny-llama\ndata: {source: stdlib, seq_len: 64}\ncluster: 2xCPU\n"
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
Train = Callable[..., tuple[int, str]]


class RanksStart(Exception):
    """The preflight let the run pass."""


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    Path("run.yaml").write_text(RUN)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """`shardwise train run.yaml WORDS` up to the start of ranks: its exit code (0 where they would
    start), and all that it said."""

    def start(*_: object) -> None:
        raise RanksStart

    monkeypatch.setattr(local, "start_ranks", start)

    def run(*words: str, verb: str = "train") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shardwise", verb, "run.yaml", *words])
        code = 0
        try:
            main()
        except RanksStart:
            pass
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def make_model(directory: Path, *, weights: bool = True, **changed: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE | changed))
    if weights:
        save_file({"x": torch.zeros(4)}, directory / "model.safetensors")
    return directory


def make_tokenizer(directory: Path, num_words: int) -> Path:
    vocab = {name: i for i, name in enumerate(["<unk>", "</s>", *map(str, range(num_words - 2))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(directory)
    return directory


# ---- bytes instead of a tokenizer --------------------------------------------------------------


def test_a_large_vocabulary_is_not_trained_on_bytes_unasked(train: Train) -> None:
    small = ("model.overrides.num_hidden_layers=2", "model.overrides.hidden_size=64")
    code, said = train("model.name=llama-3.2-1b", *small)
    assert code == 2
    assert "llama-3.2-1b comes without a tokenizer" in said
    assert "257 of its 128256 tokens" in said
    assert "data.tokenizer=byte trains on bytes all the same" in said
    assert not Path("runs").exists()
    code, said = train("model.name=llama-3.2-1b", *small, "data.tokenizer=byte")
    assert code == 0
    assert "first weights: random (the preset llama-3.2-1b is a shape without weights)" in said
    assert "tokenizer: byte (given)" in said
    assert "warning: the tokenizer has 257 tokens, llama-3.2-1b has 128256" in said


def test_the_plan_says_what_train_will_refuse(train: Train) -> None:
    code, said = train("model.name=llama-3.2-1b", "cluster.name=8xH100", verb="plan")
    assert code == 0
    assert "`shardwise train` refuses this: llama-3.2-1b comes without a tokenizer" in said
    assert "the preset llama-3.2-1b is a shape without weights" in said


@pytest.mark.parametrize("vocab_size", [400, 1000])
def test_pretrained_weights_without_a_tokenizer_are_refused(
    train: Train, tmp_path: Path, vocab_size: int
) -> None:
    place = make_model(tmp_path / "model", vocab_size=vocab_size)
    code, said = train(f"model.name={place}")
    assert code == 2
    assert f"{place} comes without a tokenizer for its weights" in said
    code, said = train(f"model.name={place}", "data.tokenizer=byte")
    assert code == 0
    assert f"weights: {place} (the model's directory has them)" in " ".join(said.split())


def test_weights_that_were_trained_on_bytes_need_no_word(train: Train, tmp_path: Path) -> None:
    """As in an export of the demo: about as many tokens, and the same end of a document."""
    place = make_model(tmp_path / "model", vocab_size=320, eos_token_id=256)
    assert train(f"model.name={place}")[0] == 0


def test_a_far_smaller_tokenizer_is_said(train: Train, tmp_path: Path) -> None:
    place = make_model(tmp_path / "model")
    small = make_tokenizer(tmp_path / "small", 300)
    code, said = train(f"model.name={place}", f"data.tokenizer={small}")
    assert code == 0
    assert "warning: the tokenizer has 300 tokens" in said
    assert "its tokens mean other text to them" in said
    padded = make_tokenizer(tmp_path / "padded", 980)
    assert "warning" not in train(f"model.name={place}", f"data.tokenizer={padded}")[1]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    train: Train, tmp_path: Path
) -> None:
    large = make_tokenizer(tmp_path / "large", 500)
    code, said = train(f"data.tokenizer={large}")
    assert code == 2
    assert "has 500 tokens, the model only 320" in said


# ---- positions ---------------------------------------------------------------------------------


def test_a_table_of_positions_ends(train: Train) -> None:
    code, said = train("model.name=tiny-gpt2", "data.seq_len=4096")
    assert code == 2
    assert "data.seq_len is 4096, and tiny-gpt2 has 2048 positions" in said
    assert train("model.name=tiny-gpt2", "data.seq_len=2048")[0] == 0
    longer = "model.overrides.n_positions=4096"
    assert train("model.name=tiny-gpt2", "data.seq_len=4096", longer)[0] == 0


@pytest.mark.parametrize(
    ("family", "fields", "limit"),
    [
        ("opt", {"max_position_embeddings": 100, "word_embed_proj_dim": 16, "ffn_dim": 32}, 100),
        ("gptj", {"max_position_embeddings": 100, "n_embd": 16, "n_head": 2, "rotary_dim": 4}, 100),
        ("roberta", {"max_position_embeddings": 102, "is_decoder": True, "pad_token_id": 1}, 100),
    ],
)
def test_tables_are_found_in_the_model_itself(
    train: Train, tmp_path: Path, family: str, fields: dict[str, Any], limit: int
) -> None:
    changed = {"model_type": family, "vocab_size": 320, "n_layer": 2, **fields}
    place = make_model(tmp_path / "model", weights=False, **changed)
    code, said = train(f"model.name={place}", f"data.seq_len={limit + 1}")
    assert code == 2
    assert f"has {limit} positions" in said
    assert train(f"model.name={place}", f"data.seq_len={limit}", verb="plan")[0] == 0


def test_rotary_positions_are_warned_of_and_refused_for_pretrained_weights(
    train: Train, tmp_path: Path
) -> None:
    code, said = train("data.seq_len=4096")
    assert code == 0
    assert "warning: data.seq_len is 4096, and the config.json of tiny-llama names 2048" in said
    place = make_model(tmp_path / "model")
    words = (f"model.name={place}", "data.tokenizer=byte", "data.seq_len=256")
    code, said = train(*words)
    assert code == 2
    assert "are made for 128 positions" in said
    code, said = train(*words, "model.overrides.max_position_embeddings=256")
    assert code == 0
    assert "data.seq_len is" not in said


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
    ],
)
def test_rope_scaling_stretches_positions(
    train: Train, tmp_path: Path, scaling: dict[str, Any], limit: int
) -> None:
    place = make_model(tmp_path / "model", rope_scaling=scaling)
    words = (f"model.name={place}", "data.tokenizer=byte")
    assert train(*words, f"data.seq_len={limit}", verb="plan")[0] == 0
    assert f"made for {limit} positions" in train(*words, f"data.seq_len={limit + 1}")[1]


# ---- data, weights, directories, ports ---------------------------------------------------------


def test_the_keys_that_are_there_are_named(train: Train) -> None:
    Path("data.jsonl").write_text('{"id": "7", "body": "some text to train on"}\n' * 3)
    code, said = train("data=data.jsonl")
    assert code == 2
    assert "data.jsonl:1: no key 'text'; its keys are 'id', 'body'" in said
    assert "data.field=body" in said
    assert train("data=data.jsonl", "data.field=body")[0] == 0


def test_data_that_is_not_there_is_found_before_ranks_start(train: Train) -> None:
    code, said = train("data=data.jsonl")
    assert code == 2
    assert "matches no file" in said
    os.mkfifo("pipe.jsonl")
    code, said = train("data=pipe.jsonl")
    assert code == 2
    assert "pipe.jsonl, which is no plain file" in said


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    if how == "cut":
        file.write_bytes(content[:-3])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "length":
        file.write_bytes(struct.pack("<Q", 2**60) + content[8:])
    else:
        header["x"]["dtype"] = "F99"
        spelled = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(spelled)) + spelled + bytes(16))


@pytest.mark.parametrize("how", ["cut", "empty", "length", "dtype"])
def test_a_damaged_file_of_weights_is_named(train: Train, tmp_path: Path, how: str) -> None:
    place = make_model(tmp_path / "model")
    damage(place / "model.safetensors", how)
    code, said = train(f"model.name={place}", "data.tokenizer=byte")
    assert code == 2
    assert f"{place / 'model.safetensors'} is not a whole file of weights" in said


def test_an_index_is_held_against_its_files(train: Train, tmp_path: Path) -> None:
    place = make_model(tmp_path / "model")
    (place / "model.safetensors").rename(place / "a.safetensors")
    weight_map = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    code, said = train(f"model.name={place}", "data.tokenizer=byte")
    assert code == 2
    assert "lists 'y' in it, but it has no such tensor" in said
    assert "b.safetensors" in said and "it does not exist" in said
    assert "2 things would stop this run" in said


def test_an_index_names_files_beside_it(train: Train, tmp_path: Path) -> None:
    place = make_model(tmp_path / "model")
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": ""}}))
    code, said = train(f"model.name={place}", "data.tokenizer=byte")
    assert code == 2
    assert "it lists 'x' in '', which is not a file beside it" in said


@pytest.mark.parametrize("runs_dir", ["/proc", "/sys/x", "/dev/full", "a-file", "a-file/below"])
def test_a_run_directory_that_cannot_be_written_is_an_error(train: Train, runs_dir: str) -> None:
    Path("a-file").touch()
    code, said = train(f"runs_dir={runs_dir}")
    assert code == 4
    assert f"nothing can be written to the run directory {runs_dir}" in said
    assert "fix:" in said


def test_a_port_that_is_taken_is_an_error(train: Train) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, said = train(f"observe.prometheus_port={port}")
    assert code == 4
    assert f"127.0.0.1:{port}" in said
    assert train(f"observe.prometheus_port={port}")[0] == 0


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_cannot_train_here_is_an_error(train: Train, attention: str) -> None:
    code, said = train(f"model.attention={attention}")
    assert code == 4
    assert f"model.attention={attention} does not train on a CPU" in said


def test_all_problems_are_shown_at_once(train: Train) -> None:
    code, said = train("data=data.jsonl", "runs_dir=/proc", "model.attention=flash_attention_2")
    assert code == 2
    assert "3 things would stop this run" in said
    assert said.count("fix:") == 3


# ---- names that no file can have ---------------------------------------------------------------


@pytest.mark.parametrize("field", ["model.name", "model.weights_from", "data.path", "runs_dir"])
@pytest.mark.parametrize("value", ["x" * 300, "x/" * 3000, '"a\\0b"'], ids=["name", "path", "nul"])
def test_paths_that_no_file_can_have_are_errors(train: Train, field: str, value: str) -> None:
    source = ("data.source=text",) if field == "data.path" else ()
    code, said = train(*source, f"{field}={value}")
    assert code == 2
    assert "fix:" in said and "Traceback" not in said
    assert len(said) < 2000


@pytest.mark.parametrize("value", ["x" * 300, '"a\\0b"', '"\\uD800"'], ids=["long", "nul", "half"])
def test_a_name_that_no_directory_can_have_is_an_error(train: Train, value: str) -> None:
    code, said = train(f"name={value}")
    assert code == 2
    assert "fix:" in said


def test_sites_that_would_meet_at_no_host_are_refused(train: Train) -> None:
    words = ("mesh.site=2", "diloco.steps=10", "train.steps=10", "checkpoint.every=10")
    code, said = train(*words, "diloco.meet=nowhere.invalid:29700")
    assert code == 4 and "this machine knows no host nowhere.invalid" in said
    code, said = train(*words, "diloco.meet=127.0.0.1:29700")
    assert code == 0, said


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden_act": "swoosh"}, "KeyError: 'swoosh'"),
        ({"rope_scaling": {"rope_type": "zigzag", "factor": 2.0}}, "KeyError: 'zigzag'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor"),
        ({"rope_parameters": "linear"}, "rope_parameters"),
        ({"layer_types": ["zigzag", "zigzag"], "model_type": "qwen3"}, "layer_types"),
    ],
)
def test_what_transformers_does_not_build(train: Train, fields: dict[str, Any], why: str) -> None:
    """Plans of these families compute sizes, and read nothing else of the file."""
    Path("odd").mkdir()
    Path("odd/config.json").write_text(json.dumps({**SHAPE, **fields}))
    code, said = train("model.name=odd", "model.weights=random", "data.tokenizer=byte")
    assert code == 2
    assert "from this config.json" in said and why in " ".join(said.split())
    assert "mend config.json or model.overrides" in " ".join(said.split())


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["auto", "bfloat16", "float7", None])
def test_the_dtype_of_stored_weights_is_not_that_of_a_run(
    train: Train, field: str, value: str | None
) -> None:
    Path("odd").mkdir()
    Path("odd/config.json").write_text(json.dumps({**SHAPE, field: value}))
    assert train("model.name=odd", "model.weights=random", "data.tokenizer=byte")[0] == 0


def test_a_model_that_was_built_is_not_built_again(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("odd").mkdir()
    Path("odd/config.json").write_text(json.dumps({**SHAPE, "a_key_of_this_test": 1}))
    built: list[Any] = []
    monkeypatch.setattr("shardwise.model.build.build_on_meta", lambda *a, **k: built.append(a))
    words = ("model.name=odd", "model.weights=random", "data.tokenizer=byte")
    assert [train(*words)[0] for _ in range(2)] == [0, 0]
    assert len(built) == 1
