"""How long ranks of a pipeline wait, measured on four CPU ranks beside the plan's order of work.

Every block sleeps in forward and in backward, so that ranks that share cores disturb each
other less: `python benchmarks/pipeline_bubble.py`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from shardwise.config.plain import config_from_dict
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.stages import stages_of
from shardwise.plan.schedule import Pipeline, seconds_of_step
from shardwise.plan.stages import stage_ranges
from shardwise.training.pipeline import StagePasses
from shardwise.training.session import attach_training_loss, build_loader, build_session

RANKS, PASSES, STEPS = 4, 8, 2
FORWARD_S = 0.05
BACKWARD_S = 2 * FORWARD_S
WAYS = {
    "1f1b": {"pipeline_blocks": "2+2+2+2"},
    "1f1b, uneven": {"pipeline_blocks": "1+3+2+2"},
    "interleaved_1f1b": {"pipeline_blocks": "1+1+1+1+1+1+1+1"},
}


class SlowBackward(torch.autograd.Function):
    """Hands on, and sleeps on the way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        """The value itself."""
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient itself."""
        time.sleep(ctx.seconds)
        return grads[0], None


def slow_down(block: Any) -> None:
    """Sleep in a block's forward and in its backward."""
    own = block.mlp.forward

    def forward(hidden: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        done: Tensor = own(SlowBackward.apply(hidden, BACKWARD_S))
        return done

    block.mlp.forward = forward


def measure(rank: int, home: str, name: str, blocks: str) -> None:
    """One rank: a step to warm up, then those that count."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{home}/meet", rank=rank, world_size=RANKS)
    mesh = {"pipeline": RANKS, "pipeline_schedule": name.partition(",")[0]}
    mesh |= {"pipeline_blocks": blocks, "pipeline_chunks": len(stage_ranges(blocks)) // RANKS}
    sizes = {"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 64}
    config = {
        "model": {"name": "tiny-llama", "overrides": {**sizes, "tie_word_embeddings": False}},
        "data": {"source": "synthetic", "seq_len": 16},
        "cluster": {"name": f"{RANKS}xCPU"},
        "precision": {"param": "fp32"},
        "train": {"micro_batch": 1, "accumulation": PASSES, "steps": STEPS + 1},
        "memory": {"checkpoint_activations": "none"},
        "mesh": mesh,
        "runs_dir": home,
    }
    plan = choose_plan(config_from_dict(config), environ={})
    session = build_session(plan, build_mesh(plan), lambda text: None)
    attach_training_loss(session, lambda text: None)
    for module in list(session.model.base_model.layers):
        slow_down(module)
    stages = stages_of(plan, session.mesh)
    assert stages is not None
    passes = StagePasses(session.model, plan, stages, lambda phase: None)
    loader, one = build_loader(session), torch.ones(())
    passes.forward_backward(loader.step_batches(0), one, 1.0)
    passes.bubble()
    for step in range(STEPS):
        passes.forward_backward(loader.step_batches(step + 1), one, 1.0)
    found = passes.bubble()
    if rank == 0:
        counts = [len(stage) for stage in stage_ranges(blocks)]
        forward, backward = (tuple(n * s for n in counts) for s in (FORWARD_S, BACKWARD_S))
        pipeline = Pipeline(mesh["pipeline_schedule"], RANKS, PASSES, forward, backward)
        busy = sum(map(pipeline.busy, range(RANKS))) / RANKS
        planned = 1 - busy / seconds_of_step(pipeline)
        print(
            f"{name:18} planned {planned:6.1%}  measured {found:6.1%}  {found / planned - 1:+.1%}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    for way, more in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).mkdir(exist_ok=True)
            mp.spawn(measure, (folder, way, more["pipeline_blocks"]), nprocs=RANKS)
