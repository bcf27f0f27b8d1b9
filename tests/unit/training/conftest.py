from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan

CONFIG = """\
model: tiny-llama
data: {source: synthetic, seq_len: 32}
cluster: 1xCPU
train: {steps: 8, micro_batch: 2, global_batch: 2}
"""


@pytest.fixture
def lone_plan(tmp_path: Path) -> Iterator[Callable[..., Plan]]:
    """Makes plans of one rank, whose process group is this process."""

    def make(*overrides: str) -> Plan:
        file = tmp_path / "run.yaml"
        file.write_text(CONFIG)
        plan = choose_plan(load_config(file, [f"runs_dir={tmp_path}", *overrides]), {})
        plan.run_dir.mkdir(exist_ok=True)
        return plan

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make
    dist.destroy_process_group()
