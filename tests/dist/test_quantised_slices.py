"""Two ranks read a quantised directory: each only the bytes of what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Ranks
from tiny_runs import Arrays, tiny_plan, whole_params
from transformers import AutoModelForCausalLM

from quantised_models import save_both
from shardwise.model import stored
from shardwise.model.pretrained import load_pretrained
from shardwise.model.weights import local_part
from shardwise.parallel.mesh import build_mesh
from shardwise.training.session import build_model

pytestmark = pytest.mark.dist
Pool = Callable[[int], Ranks]


def read_shards(
    world: int, model_dir: Path, also: tuple[str, ...] = ()
) -> tuple[Arrays, dict[torch.dtype, int], int]:
    """On every rank: the weights, whole; bytes that it read, by dtype; and how
    many elements of quantised tensors it keeps. `also` ends the names of those beside experts."""
    common = {"model.name": str(model_dir), "model.overrides": {}, "shard.strategy": "full_shard"}
    plan = tiny_plan(world, {**common, "train.global_batch": 12})
    model, _ = build_model(plan, build_mesh(plan), lambda text: None)
    num_bytes: dict[torch.dtype, int] = {}
    read = stored._Safetensors.read

    def counted(self: Any, key: str, box: Any) -> torch.Tensor:
        part = read(self, key, box)
        num_bytes[part.dtype] = num_bytes.get(part.dtype, 0) + part.nbytes
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored._Safetensors, "read", counted)
        load_pretrained(model, model_dir)
    stored_small = (
        param
        for name, param in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj", *also))
    )
    return whole_params(model), num_bytes, sum(local_part(param).numel() for param in stored_small)


# Three ranks cannot share four experts out, so each keeps a part of all of them.
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_reads_its_part_of_mxfp4_alone(world: int, ranks: Pool, tmp_path: Path) -> None:
    save_both("gpt_oss", tmp_path / "quantised", tmp_path / "plain")
    expected = whole_params(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    for found, num_bytes, kept in ranks(world).run(read_shards, world, tmp_path / "quantised"):
        # Half a byte a value, and a byte for 32.
        assert num_bytes[torch.uint8] == kept // 2 + kept // 32
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_reads_its_part_of_fp8_alone(world: int, ranks: Pool, tmp_path: Path) -> None:
    save_both("deepseek_v3", tmp_path / "quantised", tmp_path / "plain")
    expected = whole_params(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    also = ("proj.weight", "proj_with_mqa.weight")
    for found, num_bytes, kept in ranks(world).run(
        read_shards, world, tmp_path / "quantised", also
    ):
        assert num_bytes[torch.float8_e4m3fn] == kept
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())
