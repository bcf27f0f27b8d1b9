"""Gathers straight into parameters, on a GPU's streams: the numbers of gathers that are copied."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.comm import Carrier
from shardwise.tunnel.emulate import Emulator
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.link_clock import CudaClock
from shardwise.tunnel.rank_zero import fill_rank, plan_on, shard_rank
from shardwise.tunnel.world import rank_zero_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device: nothing here was tested"
)

CONFIG = """\
model: {name: llama-3.2-1b, attention: sdpa, overrides: {num_hidden_layers: 6}}
data: {source: synthetic, seq_len: 1024}
train: {micro_batch: 4}
shard: {strategy: full_shard}
cluster: {name: 8xH100}
"""


def norms(folder: Path, link_speed: float, *settings: str) -> list[float]:
    """The gradients' norm in steps that change the weights, as rank 0 of 8."""
    (folder / "run.yaml").write_text(CONFIG)
    plan = choose_plan(load_config(str(folder / "run.yaml"), list(settings)))
    emulator = Emulator(Links.of(plan.cluster.fabric, link_speed), CudaClock())
    with rank_zero_of(8):
        shell = shard_rank(plan_on(plan, "cuda", compiled=False), emulator)
        torch.manual_seed(0)
        rank = fill_rank(shell, lambda text: None, has_values=True)
        batches = [rank.loader.step_batches(step) for step in range(4)]
        # Torch's other kernels add up in any order.
        with sdpa_kernel(SDPBackend.MATH):
            return [rank.stepper.run(each, 1e-3).grad_norm for each in batches]


@pytest.mark.parametrize("link_speed", [math.inf, 0.05])
@pytest.mark.parametrize("reshard", ["true", "false"])
def test_the_norms_are_those_of_copies(tmp_path: Path, link_speed: float, reshard: str) -> None:
    after = f"shard.reshard_after_forward={reshard}"
    copied = norms(tmp_path, link_speed, after, "shard.gather_in_place=false")
    assert norms(tmp_path, link_speed, after) == copied
    assert len(set(copied)) == len(copied)


def test_nccl_gathers_many_tensors_in_one_call(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        inputs = [torch.randn(size, device="cuda") for size in (5, 70_000)]
        outputs = [torch.zeros_like(each) for each in inputs]
        group = dist.group.WORLD
        assert group is not None
        assert Carrier().all_gather("block", outputs, inputs, group) is None
        assert all(map(torch.equal, outputs, inputs))
    finally:
        dist.destroy_process_group()
