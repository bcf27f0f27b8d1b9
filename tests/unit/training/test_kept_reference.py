"""Kept references: which weights, data and settings share one, and damaged files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.facts.presets import PRESETS
from shardwise.launch.prepare import choose_plan
from shardwise.training.reference import Reference, _directory_of, _read, keep_reference

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 300}
CONFIG = """\
model: base
preference: dpo
data: {source: jsonl, path: pairs.jsonl, format: pairs, tokenizer: byte}
cluster: 1xCPU
"""


@pytest.fixture
def place_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Where the reference of a run with these words is kept."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**PRESETS["tiny-llama"], **SHAPE})
    AutoModelForCausalLM.from_config(config).save_pretrained("base")
    Path("run.yaml").write_text(CONFIG)

    def place(*words: str, documents: str = "a") -> Path:
        return _directory_of(choose_plan(load_config("run.yaml", words), {}), documents)

    return place


def test_other_weights_and_documents_get_another_reference(place_of: Callable[..., Path]) -> None:
    first = place_of()
    # One number in the middle of a tensor differs.
    file = Path(shutil.copytree("base", "other")) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    others = {
        place_of("model.name=other"),
        place_of(documents="b"),
        place_of("model.weights=random"),
        place_of("model.weights=random", "train.seed=1"),
        place_of("precision.param=bf16"),
        place_of("adapter=lora", "adapter.base=nf4"),
    }
    assert len(others | {first}) == 7


def test_what_does_not_change_the_reference_shares_it(place_of: Callable[..., Path]) -> None:
    shutil.copytree("base", "copy")
    for words in (
        ("model.name=copy",),
        ("preference.beta=0.5", "optim.lr=1e-5", "train.seed=3", "data.packing=one"),
        ("adapter=lora", "adapter.rank=4"),
        ("cluster=2xCPU", "preference.objective=kto", "memory.loss=full"),
    ):
        assert place_of(*words) == place_of(), words


def test_a_kept_reference_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    place = tmp_path / "reference-a"
    table = torch.tensor([-1.5, -2.25, -1e3])
    keep_reference(Reference(table, 3, place, is_known=False))
    assert torch.equal(_read(place, 3), table)
    with pytest.raises(UserError, match="is damaged") as failure:
        _read(place, 4)
    assert "rm -r" in failure.value.fix
    (place / "logps.bin").write_bytes(b"\0" * 12)
    with pytest.raises(UserError, match="is damaged"):
        _read(place, 3)
