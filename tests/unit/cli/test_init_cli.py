"""`shardwise init` writes a file that plans, whatever is answered."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import SHARDWISE, rank_environment, run_installed
from shardwise.cli.main import app
from shardwise.config.load import load_config
from shardwise.config.schema import ClusterConfig
from shardwise.data.has_text import validate_text
from shardwise.errors import UserError
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.presets import PRESETS
from shardwise.launch.prepare import choose_plan

_SAMPLE = ("llama-3.1-8b", "gpt2", "qwen3-30b-a3b", "tiny-llama")
_CLUSTERS = ("1xH100", "8xH100", "4x8xH200", "8xA100")
_long = pytest.mark.long


def init(folder: Path, *words: str) -> Path:
    file = folder / "run.yaml"
    app(["init", str(file), *words], standalone_mode=False)
    return file


def test_five_answers_make_a_file_and_a_wrong_one_is_asked_again(tmp_path: Path) -> None:
    answers = "nope\nllama-3.2-1b\n1xH100\nfull\nstdlib\n2B\n"
    done = subprocess.run(
        [SHARDWISE, "init"], input=answers, capture_output=True, text=True, check=True,
        cwd=tmp_path, env=rank_environment(),
    )  # fmt: skip
    assert "unknown model 'nope'" in done.stdout
    assert "name one in data.tokenizer to train" in done.stdout
    config = load_config(tmp_path / "run.yaml")
    assert (config.model.name, config.cluster.name) == ("llama-3.2-1b", "1xH100")
    plan = choose_plan(config, {})
    assert config.train.steps * plan.tokens_per_step == pytest.approx(2e9, rel=0.01)
    text = (tmp_path / "run.yaml").read_text()
    assert "# NODESxGPUSxKIND" in text and "# By its plan: " in text
    # The figures in the comments are the plan's.
    assert f"{plan.decided.strategy}, " in text


def test_unanswered_questions_write_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [SHARDWISE, "init"], input="llama-3.2-1b\n", capture_output=True, text=True, check=False,
        cwd=tmp_path, env=rank_environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing was written" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "model",
    [name if name in _SAMPLE else pytest.param(name, marks=_long) for name in PRESETS],
)
def test_every_preset_gets_a_file_that_plans(model: str, tmp_path: Path) -> None:
    file = init(tmp_path, "--model", model, "--cluster", "1xH100", "--yes")
    choose_plan(load_config(file), {})


@pytest.mark.long
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_can_be_adapted(model: str, method: str, tmp_path: Path) -> None:
    words = ("--model", model, "--cluster", "1xH100", "--method", method, "--yes")
    file = init(tmp_path, *words)
    choose_plan(load_config(file), {})
    assert ("takes no adapters" in file.read_text()) == model.endswith("gpt2")


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize(
    "cluster", ["1xRTX-4090", *(pytest.param(name, marks=_long) for name in _CLUSTERS)]
)
@pytest.mark.parametrize(
    "model",
    [
        "tiny-llama",
        *(pytest.param(n, marks=_long) for n in ("llama-3.1-8b", "gpt2", "mixtral-8x7b")),
    ],
)
def test_every_way_to_train_gets_a_file_on_every_cluster(
    model: str, cluster: str, method: str, tmp_path: Path
) -> None:
    """Where the devices are too few, the file names more of their kind."""
    words = ("--model", model, "--cluster", cluster, "--method", method, "--yes")
    plan = choose_plan(load_config(init(tmp_path, *words)), {})
    assert plan.memory.total <= plan.cluster.memory_bytes
    assert plan.cluster.device_name == resolve_cluster(ClusterConfig(name=cluster)).device_name
    assert (plan.model.adapter is not None) == (method != "full" and model != "gpt2")


@pytest.mark.parametrize("tokens", ["1M", "15B"])
@pytest.mark.parametrize(
    "data", ["stdlib", "synthetic", "notes.txt", "notes", "*.txt", "rows.jsonl", "table.parquet"]
)
def test_every_kind_of_data_gets_a_file(
    data: str, tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "notes/one.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("a line of text\n" * 100)
    Path("rows.jsonl").write_text('{"text": "a document"}\n' * 100)
    pq.write_table(pa.table({"text": ["a document"] * 100}), "table.parquet")
    words = ("--model", "tiny-llama", "--cluster", "2xCPU", "--data", data, "--tokens", tokens)
    config = load_config(init(tmp_path, *words, "--yes"))
    plan = choose_plan(config, {})
    wanted = {"1M": 1e6, "15B": 15e9}[tokens]
    assert config.train.steps * plan.tokens_per_step == pytest.approx(wanted, rel=0.1)
    validate_text(config.data)


def test_files_of_text_and_of_two_cpus_are_answers_too(tmp_path: Path) -> None:
    text = tmp_path / "my notes.txt"
    text.write_text("a line of text\n" * 100)
    words = ("--model", "tiny-llama", "--cluster", "2xCPU", "--data", str(text), "--yes")
    config = load_config(init(tmp_path, *words, "--tokens", "1M"))
    assert config.data.path == str(text)
    assert config.train.steps * choose_plan(config, {}).tokens_per_step >= 0.9e6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "nope"), "unknown model"),
        (("--cluster", "8xTPUv5p"), "no GPU that shardwise trains on"),
        (("--method", "dora"), "no way to train"),
        (("--data", "absent.txt"), "matches no file"),
        (("--tokens", "many"), "no number of tokens"),
    ],
)
def test_a_wrong_option_is_an_error_and_nothing_is_written(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        init(tmp_path, *words, "--yes")
    assert not list(tmp_path.iterdir())


def test_conversations_need_a_model_with_a_template(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(UserError, match="has no chat template"):
        init(tmp_path, "--model", "tiny-llama", "--data", str(chats), "--yes")


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mine")
    text = run_installed("init", str(file), "--model", "tiny-llama", "--yes", expect=2).stderr
    assert "exists already" in text
    assert file.read_text() == "mine"
    # It is said before anything is asked, and so is a name that no command would read.
    assert "exists already" in run_installed("init", str(file), expect=2).stderr
    with pytest.raises(UserError, match=r"name it .*new\.yaml"):
        app(["init", str(tmp_path / "new.txt")], standalone_mode=False)
