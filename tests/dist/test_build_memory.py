"""No rank ever holds the whole model: resident memory while it is built and read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from memory_worker import SHAPE, build
from rank_pool import Ranks
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.dist


def build_on_four_ranks(weights: str) -> list[dict[str, float]]:
    """On new processes: what others have freed would hide what is taken."""
    ranks = Ranks(4)
    try:
        return ranks.run(build, weights)
    finally:
        ranks.stop()


def assert_within_bound(ranks: list[dict[str, float]]) -> None:
    for rank, row in enumerate(ranks):
        bound = 1.3 * (row["shard"] + row["largest_unit"])
        mib = {key: row[key] / 2**20 for key in ("growth", "shard", "largest_unit")}
        print(f"rank {rank}: {mib}, share of the bound {row['growth'] / bound:.2f}")
        assert row["params"] >= 70e6
        assert row["growth"] <= bound


@pytest.mark.long
def test_random_weights_are_built_unit_by_unit() -> None:
    assert_within_bound(build_on_four_ranks("random"))


def test_pretrained_weights_are_read_slice_by_slice(tmp_path: Path) -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", **SHAPE)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-1, 1)
    model.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    expected = sum(float(p.double().abs().sum()) for p in model.parameters())
    ranks = build_on_four_ranks(str(tmp_path / "model"))
    assert_within_bound(ranks)
    assert sum(row["checksum"] for row in ranks) == pytest.approx(expected, rel=1e-9)
