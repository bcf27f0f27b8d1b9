"""Checkpoints that FSDP1 and FSDP2 wrote through DCP, in Accelerate's layout, as first weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_pool import Ranks
from test_hf_roundtrip import FAMILIES, HSDP
from tiny_runs import Arrays, tiny_plan, whole_params
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.model.pretrained import load_pretrained
from shardwise.parallel.mesh import build_mesh
from shardwise.training.session import build_model

pytestmark = pytest.mark.dist
Pool = Callable[[int], Ranks]
CPU = torch.device("cpu")


def build(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family]))
    with torch.no_grad():
        for param in model.parameters():  # norms and biases too: their place must be right
            param.add_(torch.randn_like(param), alpha=0.05)
    return model


def save_sharded(family: str, version: int, directory: Path) -> Arrays:
    """On every rank: what Accelerate does for SHARDED_STATE_DICT; returns the weights, whole."""
    model = build(family)
    expected = whole_params(model)
    blocks = list(model.transformer.h if family == "gpt2" else model.model.layers)
    if version == 2:
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
        state = model.state_dict()
    else:
        policy = ModuleWrapPolicy({type(blocks[0])})
        warnings.simplefilter("ignore", FutureWarning)  # that FSDP1's tensors are of the past
        model = FSDP1(model, auto_wrap_policy=policy, device_id=CPU, use_orig_params=True)
        with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=directory / "pytorch_model_fsdp_0")
    return expected


def load(world: int, model_dir: Path, settings: dict[str, Any]) -> tuple[Arrays, int]:
    """On every rank: the model in shards, from the place that `settings` name."""
    common = {"model.name": str(model_dir), "model.overrides": {}, "shard.strategy": "full_shard"}
    plan = tiny_plan(world, {**common, **settings})
    model, _ = build_model(plan, build_mesh(plan), lambda text: None)
    loaded = whole_params(model)
    return loaded, load_pretrained(model, Path(str(plan.weights_dir)))


def save_config(family: str, directory: Path) -> Path:
    """A directory with config.json and no weights, such as the Trainer's own does not have."""
    AutoConfig.for_model(**FAMILIES[family]).save_pretrained(directory)
    return directory


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize(
    ("family", "version", "saved_on", "read_on", "settings"),
    [
        ("llama", 2, 2, 2, {}),
        ("llama", 1, 2, 1, {}),
        ("llama-tied", 2, 1, 2, {}),
        ("gpt2", 1, 2, 2, {}),
        ("gpt2", 2, 2, 4, HSDP),
        ("mixtral", 2, 4, 2, {}),
        ("mixtral", 1, 2, 4, {}),
        ("mixtral", 2, 4, 4, {}),
    ],
)
def test_what_fsdp_saved_is_read_bit_by_bit(
    family: str,
    version: int,
    saved_on: int,
    read_on: int,
    settings: dict[str, Any],
    ranks: Pool,
    tmp_path: Path,
) -> None:
    expected = ranks(saved_on).run(save_sharded, family, version, tmp_path)[0]
    model_dir = save_config(family, tmp_path / "config")
    settings = {**settings, "model.weights_from": str(tmp_path)}
    for loaded, _ in ranks(read_on).run(load, read_on, model_dir, settings):
        assert_same(loaded, expected)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_config_and_shards_in_one_directory_need_no_setting(
    family: str, ranks: Pool, tmp_path: Path
) -> None:
    expected = ranks(2).run(save_sharded, family, 2, tmp_path)[0]
    results = ranks(2).run(load, 2, save_config(family, tmp_path), {})
    assert_same(results[0][0], expected)
    # Together the ranks read every weight once.
    assert sum(num_bytes for _, num_bytes in results) == sum(v.nbytes for v in expected.values())
