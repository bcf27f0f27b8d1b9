"""Documents that share a sequence: with a mask they train as if each were alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_pool import Ranks
from tiny_families import save_model, tiny_config
from tiny_runs import Settings, Tally, Trained, assert_close, train, train_documents_apart

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
WAYS: list[Settings] = [
    {"model.attention": "sdpa"},
    {"model.attention": "flash_attention_4", "memory.checkpoint_activations": "selective"},
    {"model.attention": "eager", "memory.loss": "full"},
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("documents")
    texts = [f"{n} of {n * n}"[: 1 + n % 8] for n in range(400)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (home / "records.jsonl").write_text(lines)
    return {
        "runs_dir": str(home),
        "model.name": "tiny-llama",
        "data.source": "jsonl",
        "data.path": str(home / "records.jsonl"),
        "data.document_mask": True,
    }


@pytest.fixture(scope="module")
def apart(ranks: Pools, settings: Settings) -> Trained:
    found: Trained = ranks(1).run(train_documents_apart, settings)[0]
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["model.attention"])
def test_documents_train_as_if_each_were_alone(
    ranks: Pools, settings: Settings, apart: Trained, tally: Tally, way: Settings
) -> None:
    run = ranks(2).run(train, 2, {**settings, **way, "shard.strategy": "full_shard"})[0]
    assert_close(run, apart, tally)


def test_without_the_mask_they_do_not(ranks: Pools, settings: Settings, apart: Trained) -> None:
    run = ranks(1).run(train, 1, {**settings, "data.document_mask": False})[0]
    assert abs(run.losses[0] - apart.losses[0]) > 1e-4 * apart.losses[0]


def test_gpt_oss_keeps_them_apart(
    ranks: Pools, settings: Settings, tally: Tally, tmp_path: Path
) -> None:
    """Its code makes masks without positions, so it gets ours, in forward and in recomputation."""
    save_model(tiny_config("gpt_oss", {"vocab_size": 257}), tmp_path)
    place: Settings = {"model.name": str(tmp_path), "model.overrides": {}}
    wanted = ranks(1).run(train_documents_apart, {**settings, **place})[0]
    spread = {"shard.strategy": "full_shard", "memory.checkpoint_activations": "full"}
    run = ranks(2).run(train, 2, {**settings, **place, **spread})[0]
    assert_close(run, wanted, tally)
