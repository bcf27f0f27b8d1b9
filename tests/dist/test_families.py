"""Families of transformers: trained as plain PyTorch trains them, or refused before a rank starts.

Seven diverse families run always; all others with `make chaos`, which prints the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from family_runs import HEADER, Compared, compare
from rank_pool import Ranks
from refused_families import NOT_BUILT, NOT_TRAINED
from tiny_families import ENCODERS, FAMILIES, save_model, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedConfig

from commands import run_forked
from shardwise.cli.main import main

pytestmark = pytest.mark.dist
Pool = Callable[[int], Ranks]

# A router's buffer, a chunked loss that is not possible, attention without sdpa, a state space
# model, layers of several kinds with shared keys, one bias in two modules, and a parameter that the
# family freezes.
SAMPLE = ("deepseek_v3", "opt", "gpt_oss", "mamba2", "gemma3n_text", "bert", "ernie4_5_moe")
TRAINED = tuple(f for f in FAMILIES if f not in NOT_BUILT and f not in NOT_TRAINED)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text("cluster: 2xCPU\ndata: {source: synthetic, seq_len: 16}\n")
    return tmp_path


def written(config: PreTrainedConfig, home: Path) -> Path:
    """A directory with config.json alone."""
    config.save_pretrained(home / "model")
    return home / "model"


def shardwise(home: Path, verb: str, *words: str) -> int:
    """The command in this process: none of these calls gets so far as to start ranks."""
    common = (f"model.name={home / 'model'}", f"runs_dir={home / 'runs'}", "name=run")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", ["shardwise", verb, str(home / "run.yaml"), *common, *words])
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_trains_as_plain_pytorch_trains_it(
    family: str, ranks: Pool, tmp_path: Path
) -> None:
    found = compare(ranks(2), family, tmp_path)
    assert found.is_equal, f"\n{HEADER}\n{found.row()}"


@pytest.mark.long
def test_every_family_trains_as_plain_pytorch_trains_it(
    ranks: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows: list[Compared] = []
    failed: dict[str, str] = {}
    print(f"\n{HEADER}")
    for family in TRAINED:
        try:
            rows.append(compare(ranks(2), family, tmp_path_factory.mktemp(family)))
            print(rows[-1].row(), flush=True)
        except Exception as error:  # noqa: BLE001 - one table for all of them
            failed[family] = str(error)
            print(f"{family:26} {error}", flush=True)
    wrong = [row.family for row in rows if not row.is_equal]
    print(f"{len(rows) - len(wrong)} families equal, {wrong} differ, {list(failed)} failed")
    assert not wrong and not failed
    assert len(rows) >= 60


def test_gpt_oss_recomputes_what_its_experts_changed(ranks: Pool, tmp_path: Path) -> None:
    settings = {"memory.checkpoint_activations": "selective"}
    found = compare(ranks(2), "gpt_oss", tmp_path, settings)
    assert found.is_equal, f"\n{HEADER}\n{found.row()}"


# ---- what is planned ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom", "mamba", "gptj", "vaultgemma"])
def test_a_class_without_sdpa_is_planned_with_what_it_has(
    family: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tiny_config(family), home)
    assert shardwise(home, "plan") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f" attention eager rule transformers' {family} class has no sdpa" in said


def test_sdpa_by_name_is_refused_where_the_class_has_none(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tiny_config("bloom"), home)
    assert shardwise(home, "train", "model.attention=sdpa") == 2
    said = capsys.readouterr().err
    assert "bloom models do not have model.attention=sdpa" in said
    assert "set model.attention=eager" in said
    assert shardwise(home, "plan", "model.attention=eager") == 0


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "bamba", "granitemoehybrid"])
def test_an_infinite_number_of_config_json_is_a_number(family: str, home: Path) -> None:
    place = written(tiny_config(family), home)
    assert '"__float__": "Infinity"' in (place / "config.json").read_text()
    assert shardwise(home, "plan") == 0


@pytest.mark.parametrize(
    ("family", "field"), [("gemma3n_text", "intermediate_size"), ("gemma4_text", "layer_types")]
)
def test_sizes_for_each_layer_are_planned(family: str, field: str, home: Path) -> None:
    place = written(tiny_config(family), home)
    assert isinstance(json.loads((place / "config.json").read_text())[field], list)
    assert shardwise(home, "plan") == 0


# ---- what is refused ---------------------------------------------------------------------------


def refusal(home: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What `shardwise train` says to a config.json; no rank has started."""
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(config))
    assert shardwise(home, "train") == 2
    assert not (home / "runs" / "run" / "logs").exists()
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("family", NOT_BUILT)
def test_what_transformers_does_not_build_is_refused(
    family: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(home, {"model_type": family}, capsys)
    assert f"transformers cannot build a {family} from this config.json" in said
    assert "why: " in said


@pytest.mark.parametrize("family", NOT_TRAINED)
def test_what_does_not_learn_from_text_alone_is_refused(
    family: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(family)
    said = refusal(home, {**config.to_diff_dict(), "model_type": family}, capsys)
    assert "models cannot be trained here" in said
    assert NOT_TRAINED[family] in said


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_refused_until_it_is_a_decoder(
    family: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(family, {"is_decoder": False}).to_diff_dict()
    said = refusal(home, config, capsys)
    assert "its attention is not causal: a token sees those that follow it" in said
    assert "set model.overrides.is_decoder=true" in said
    assert shardwise(home, "plan", "model.overrides.is_decoder=true") == 0


# ---- through the command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "word"),
    [
        ("gpt_oss", "memory.checkpoint_activations=selective"),
        pytest.param("falcon_h1", "memory.checkpoint_activations=none", marks=pytest.mark.long),
        pytest.param("opt", "shard.strategy=full_shard", marks=pytest.mark.long),
    ],
)
def test_the_command_trains_and_exports_a_family(
    family: str, word: str, home: Path, tmp_path: Path
) -> None:
    save_model(tiny_config(family), home / "model")
    words = (f"model.name={home / 'model'}", f"runs_dir={home}", "name=run", "train.steps=2")
    batch = ("train.global_batch=4", "precision.param=fp32", "data.tokenizer=byte", word)
    run_forked(tmp_path, "train", home / "run.yaml", *words, *batch)
    run_forked(tmp_path, "export", home / "run", "--to", home / "out")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(home / d) for d in ("out", "model"))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
