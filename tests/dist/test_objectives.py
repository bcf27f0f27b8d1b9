"""Each preference objective: losses, gradients and parameters are those of whole logits, one
document at a time, on one rank and on two with accumulation."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preference_runs import train_compared, train_compared_plainly
from rank_pool import Ranks
from tiny_runs import SHAPE, Settings, Tally, assert_close

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/data"))
from chat_templates import CHATML, make_backend

pytestmark = pytest.mark.dist
SPREAD: Settings = {"train.micro_batch": 1, "shard.strategy": "full_shard"}


def write_rows(folder: Path) -> None:
    draw = random.Random(3)

    def words() -> str:
        return " ".join(draw.choice(("hello", "world", "a", "bc")) for _ in range(4))

    pairs = [{"prompt": words(), "chosen": words(), "rejected": f"no {words()}"} for _ in range(24)]
    labelled = [
        {"prompt": words(), "completion": words(), "label": draw.random() < 0.5} for _ in range(24)
    ]
    for name, rows in (("pairs", pairs), ("labelled", labelled)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("preferences")
    make_backend(CHATML).save_pretrained(folder / "tokenizer")
    write_rows(folder)
    return {
        "model.overrides": {**SHAPE, "vocab_size": 321},
        "runs_dir": str(folder),
        "data.source": "jsonl",
        "data.path": str(folder / "pairs.jsonl"),
        "data.format": "pairs",
        "data.tokenizer": str(folder / "tokenizer"),
        "data.seq_len": 160,
        "train.global_batch": 4,
        "train.steps": 2,
    }


OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"preference.beta": 0.5, "preference.label_smoothing": 0.1},
    "kto": {"data.format": "labelled", "preference.undesirable_weight": 1.5},
    "kto without its KL term": {"data.format": "labelled", "preference.kl_term": False},
    "orpo": {"preference.beta": 0.7},
    "simpo": {"preference.gamma": 0.8},
}
# Two of them learn through a command in tests/golden too.
SAMPLE = ("dpo", "kto")


@pytest.mark.parametrize(
    "objective",
    [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long) for name in OBJECTIVES],
)
def test_objectives_equal_whole_logits_of_one_document_at_a_time(
    ranks: Callable[[int], Ranks], tally: Tally, data: Settings, objective: str
) -> None:
    settings = {**data, "preference.objective": objective.split()[0], **OBJECTIVES[objective]}
    settings["data.path"] = data["data.path"].replace("pairs", settings["data.format"])
    wanted, scores = ranks(1).run(train_compared_plainly, settings)[0]
    for world, more in ((1, {}), (2, SPREAD)):
        found, told = ranks(world).run(train_compared, world, {**settings, **more})[0]
        assert_close(found, wanted, tally)
        assert told.accuracy == scores["accuracy"]
        assert told.margin == pytest.approx(scores["margin"], rel=1e-4)
