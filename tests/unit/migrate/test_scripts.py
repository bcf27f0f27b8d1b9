from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.migrate.script import read_script

SCRIPT = """
import deepspeed
from functools import partial
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from accelerate import Accelerator
from transformers import TrainingArguments
open("ran", "w").write("the script was run")
args = TrainingArguments(learning_rate=2e-5, max_steps=steps, bogus=1)
model = FSDP(
    model,
    sharding_strategy=ShardingStrategy.NO_SHARD,
    auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
)
model.clip_grad_norm_(1.0)
accelerator = Accelerator()
accelerator.backward(loss)
engine, _, _, _ = deepspeed.initialize(model=model)
engine.step()
"""


def test_calls_have_their_lines_and_what_they_become(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    calls = read_script(file)
    found = {(call.line, call.what.strip().partition("=")[0]): call.becomes for call in calls}
    assert "shard.strategy" in found[10, "FSDP(...)"]
    assert "shard.strategy=no_shard" in found[12, "sharding_strategy"]
    assert "units are found" in found[13, "transformer_auto_wrap_policy(...)"]
    assert found[15, "model.clip_grad_norm_(...)"] == "optim.clip_norm"
    assert "optim.lr=2e-05" in found[9, "learning_rate"]
    assert "computes it" in found[9, "max_steps"]
    assert "unknown" in found[9, "bogus"]
    assert (17, "accelerator.backward(...)") in found
    assert "migrate" in found[18, "deepspeed.initialize(...)"]
    assert (19, "engine.step(...)") in found


def test_a_script_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    shown = CliRunner().invoke(app, ["migrate", "train.py"], catch_exceptions=False).output
    assert "line 10" in shown and not Path("ran").exists()


@pytest.mark.parametrize(
    "text", ["def f(:\n", "\0", "(" * 500, "-" * 50_000 + "1", "x = " + "[" * 150 + "]" * 150 + "("]
)
def test_what_is_no_python_is_an_error_with_a_fix(tmp_path: Path, text: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    with pytest.raises(UserError, match="not valid Python") as caught:
        read_script(file)
    assert caught.value.fix
