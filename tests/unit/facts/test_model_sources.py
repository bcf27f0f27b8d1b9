import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from shardwise.config.schema import ModelConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.config_source import apply_overrides, read_model_config
from shardwise.facts.families import spec_from_config
from shardwise.facts.presets import PRESETS


def test_presets_are_copied() -> None:
    source = read_model_config(ModelConfig(name="llama-3.1-8b"))
    assert (source.kind, source.directory, source.weights) == ("preset", None, None)
    assert source.hf_config == PRESETS["llama-3.1-8b"]
    source.hf_config["rope_scaling"]["factor"] = 1.0
    assert PRESETS["llama-3.1-8b"]["rope_scaling"]["factor"] == 8.0


def test_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny-llama"]))
    source = read_model_config(ModelConfig(name=str(tmp_path)))
    assert (source.kind, source.directory) == ("directory", tmp_path)
    assert source.hf_config == PRESETS["tiny-llama"]
    assert source.weights is None
    (tmp_path / "model.safetensors").touch()
    assert source.weights == tmp_path


@pytest.mark.parametrize(
    "file",
    [
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "pytorch_model_fsdp.bin",
        "pytorch_model_fsdp_0/.metadata",
        ".metadata",
        "__0_0.distcp",
    ],
)
def test_whatever_looks_like_weights_is_seen(file: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny-llama"]))
    source = read_model_config(ModelConfig(name=str(tmp_path)))
    assert source.weights is None
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert source.weights == tmp_path


def test_weights_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "final.safetensors").touch()
    for place in (tmp_path, tmp_path / "final.safetensors"):
        source = read_model_config(ModelConfig(name="tiny-llama", weights_from=str(place)))
        assert (source.directory, source.weights) == (None, place)


def test_a_place_without_weights_is_named(tmp_path: Path) -> None:
    for place, why in ((tmp_path, "looks like"), (tmp_path / "absent", "no such file")):
        with pytest.raises(UserError, match=r"no weights in model\.weights_from=") as caught:
            read_model_config(ModelConfig(weights_from=str(place)))
        assert why in caught.value.why


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "there is no"), ("{", "cannot read"), ("[]", "model_type"), ("{}", "model_type")],
)
def test_a_bad_directory_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_model_config(ModelConfig(name=str(tmp_path)))
    assert "config.json" in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "advice"), [("llama-3.1-8", "llama-3.1-8b"), ("./absent", "one of the presets: ")]
)
def test_unknown_names_get_advice(name: str, advice: str) -> None:
    with pytest.raises(UserError, match="unknown model") as caught:
        read_model_config(ModelConfig(name=name))
    assert advice in caught.value.fix


def test_the_hub_is_asked_for_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(repo: str, file: str, revision: str | None) -> str:
        asked.append((repo, file, revision))
        (tmp_path / file).write_text(json.dumps(PRESETS["tiny-qwen"]))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    source = read_model_config(ModelConfig(name="org/model", revision="abc"))
    assert asked == [("org/model", "config.json", "abc")]
    assert (source.kind, source.directory) == ("hub", tmp_path)


def test_a_hub_that_fails_suggests_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UserError) as caught:
        read_model_config(ModelConfig(name="meta-llama/Llama-3.1-8B"))
    assert "llama-3.1-8b" in caught.value.fix
    assert caught.value.why == "no connection"
    assert caught.value.code is ExitCode.ENVIRONMENT


def test_overrides_change_a_copy() -> None:
    config = ModelConfig(name="tiny-llama", overrides={"num_hidden_layers": 2, "head_dim": 64})
    hf_config = read_model_config(config).hf_config
    assert (hf_config["num_hidden_layers"], hf_config["head_dim"]) == (2, 64)
    assert PRESETS["tiny-llama"]["num_hidden_layers"] == 4


def test_an_override_that_nobody_reads_is_refused() -> None:
    with pytest.raises(UserError, match="num_hiden_layers") as caught:
        apply_overrides(PRESETS["tiny-llama"], {"num_hiden_layers": 2})
    assert "num_hidden_layers" in caught.value.fix
    with pytest.raises(UserError, match="rope_theta"):
        apply_overrides(PRESETS["tiny-gpt2"], {"rope_theta": 1e6})


def test_gpt2_keeps_one_name_for_each_number() -> None:
    changed = apply_overrides(PRESETS["tiny-gpt2"], {"num_hidden_layers": 2, "hidden_size": 64})
    spec = spec_from_config("x", changed)
    assert (spec.num_layers, spec.hidden_size) == (2, 64)
    assert "num_hidden_layers" not in changed


def test_rope_theta_goes_where_transformers_5_keeps_it() -> None:
    saved = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    changed = apply_overrides(saved, {"rope_theta": 1e6})
    assert changed["rope_parameters"]["rope_theta"] == 1e6
    assert "rope_theta" not in changed
    assert saved["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
