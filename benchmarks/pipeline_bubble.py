"""How long ranks of a pipeline wait: what a run on four CPU ranks measures, beside its plan.

    python benchmarks/pipeline_bubble.py [--flops-per-s 4e7] [--steps 4]

One thing is emulated, the speed of a rank: what a stage does for a micro-batch takes as long as its
FLOPs would at so many a second. The stage computes as ever, PyTorch counts what it multiplied, and
then it sleeps for what is left of that time. So four ranks overlap on fewer than four cores. The
schedule, what is sent over gloo, FSDP2, the optimizer and the measurement are those of a run, and
the planned share is the one in its record.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.utils.flop_counter import FlopCounterMode

import shardwise

RANKS, PASSES = 4, 8
RUN = f"""\
model:
  name: tiny-llama
  overrides: {{num_hidden_layers: 8, hidden_size: 128, intermediate_size: 256, vocab_size: 512,
              num_attention_heads: 4, num_key_value_heads: 4, tie_word_embeddings: false}}
data: {{source: synthetic, seq_len: 16}}
cluster: {RANKS}xCPU
precision: {{param: fp32}}
train: {{micro_batch: 1, accumulation: {PASSES}}}
memory: {{checkpoint_activations: none}}
observe: {{log_every: 1}}
"""
WAYS = {
    "1f1b": (),
    "1f1b, uneven": ("mesh.pipeline_blocks=1+3+2+2",),
    "interleaved_1f1b": (),
    "zero_bubble": (),
    "zero_bubble, 2 stages": ("mesh.pipeline_chunks=2",),
}
Done = Callable[[str, PipelineStage, int, float], None]
# What a stage does for one micro-batch.
PIECES = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flops-per-s", type=float, default=4e7)
    parser.add_argument("--steps", type=int, default=4, help="the first one does not count")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        slow_down(given.flops_per_s)
        shardwise.train(*given.rank)
        return
    print(f"{RANKS} ranks, {PASSES} micro-batches, {given.flops_per_s:.3g} emulated FLOP/s each")
    for way, more in WAYS.items():
        print(row(way, *measure(way, more, given.flops_per_s, given.steps)), flush=True)


def slow_down(flops_per_s: float) -> None:
    """Let each piece of a stage's work take as long as its FLOPs say."""

    def rest(name: str, stage: PipelineStage, flops: int, started: float) -> None:
        time.sleep(max(0.0, started + flops / flops_per_s - time.perf_counter()))

    for name in PIECES:
        setattr(PipelineStage, name, counted(name, rest))


def counted(name: str, done: Done) -> Callable[..., Any]:
    """A piece of a stage's work that tells `done` its FLOPs and when it started."""
    piece: Callable[..., Any] = getattr(PipelineStage, name)

    @wraps(piece)
    def counting(stage: PipelineStage, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        with FlopCounterMode(display=False) as counter:
            found = piece(stage, *args, **kwargs)
        done(name, stage, counter.get_total_flops(), started)
        return found

    return counting


def measure(
    way: str, more: tuple[str, ...], flops_per_s: float, steps: int
) -> tuple[float, list[float]]:
    """The planned share of a step in which ranks wait, and the measured ones of all steps but the
    first."""
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "run.yaml")
        file.write_text(RUN)
        words = [f"runs_dir={home}", "name=run", f"train.steps={steps}", f"mesh.pipeline={RANKS}"]
        words += [f"mesh.pipeline_schedule={way.partition(',')[0]}", *more]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), __file__]
        command += [f"--flops-per-s={flops_per_s}", "--rank", str(file), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        record = Path(home, "run", "events.jsonl").read_text().splitlines()
        told = [event for event in map(json.loads, record) if event["event"] == "pipeline"]
    return told[0]["planned"], [event["bubble"] for event in told[1:]]


def row(way: str, planned: float, measured: list[float]) -> str:
    """Both beside each other."""
    middle = statistics.median(measured)
    return (
        f"{way:22} planned {planned:6.1%}  measured {middle:6.1%} "
        f"({min(measured):.1%} to {max(measured):.1%})  {middle / planned - 1:+.1%}"
    )


if __name__ == "__main__":
    main()
