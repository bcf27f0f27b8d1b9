"""model.trust_remote_code with a directory of this machine, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError

CODE = {
    "own_config.py": "from transformers import LlamaConfig\n"
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
    "own_model.py": "from transformers import LlamaForCausalLM\n"
    "from .own_config import OwnConfig\n"
    "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n",
}


def make_model(name: str, **changed: str) -> None:
    names = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    shape = {"model_type": "own", "auto_map": names, "vocab_size": 300, "hidden_size": 16}
    shape |= {"num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 2}
    Path(name).mkdir()
    Path(name, "config.json").write_text(json.dumps(shape))
    for file, code in CODE.items():
        Path(name, file).write_text(changed.get(file.removesuffix(".py"), code))


def plan(**model: Any) -> str:
    Path("run.json").write_text(json.dumps({"model": model, "cluster": "1xCPU"}))
    words = ["plan", "run.json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)
    return done.stdout


def test_code_of_a_local_directory_is_run_where_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(str(tmp_path / "hf"))
    make_model("own")
    assert "total" in plan(name="own", trust_remote_code=True)
    with pytest.raises(UserError, match="'own' is not a family"):
        plan(name="own")
    make_model("broken", own_model="import nothing_of_this_name\n")
    with pytest.raises(UserError) as caught:
        plan(name="broken", trust_remote_code=True)
    assert "nothing_of_this_name" in caught.value.why
