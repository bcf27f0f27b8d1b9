"""What the framework costs: tokens/s of `shardwise train` over a bare FSDP2 loop, 2 gloo ranks.

    python benchmarks/overhead.py [--rounds 3] [--steps 12]

The bare loop is what a careful person would write by hand: the same model, units, batch, optimizer
and clipping, and nothing else. Both run in turn, several rounds in one go; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEQ_LEN, MICRO_BATCH, RANKS = 128, 2, 2
CONFIG = f"""
model: small-llama
data:
  source: synthetic
  seq_len: {SEQ_LEN}
cluster: {RANKS}xCPU
shard:
  strategy: full_shard
train:
  micro_batch: {MICRO_BATCH}
checkpoint:
  every: 0
  at_end: false
observe:
  log_every: 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        run_bare(options.steps, Path(options.bare))
        return
    bare, ours = [], []
    for index in range(options.rounds):
        bare.append(measure_bare(options.steps))
        ours.append(measure_ours(options.steps))
        print(f"round {index + 1}: bare {bare[-1]:.4f} s/step, shardwise {ours[-1]:.4f} s/step")
    tokens = SEQ_LEN * MICRO_BATCH
    ratio = statistics.median(bare) / statistics.median(ours)
    print(f"bare FSDP2 loop   {tokens / statistics.median(bare):8.0f} tok/s/rank")
    print(f"shardwise train   {tokens / statistics.median(ours):8.0f} tok/s/rank")
    print(f"shardwise / bare  {ratio:8.3f}")


def measure_ours(steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.yaml")
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "shardwise", "train", str(config)]
        changes = [f"train.steps={steps}", f"runs_dir={folder}"]
        subprocess.run(
            [*command, *changes], check=True, stdout=subprocess.DEVNULL, env=one_thread()
        )
        lines = Path(folder, "run", "events.jsonl").read_text().splitlines()
        steps_s = [row["step_s"] for row in map(json.loads, lines) if row["event"] == "step"]
    return statistics.median(steps_s[2:])


def measure_bare(steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command = [sys.executable, *launcher, __file__, "--steps", str(steps), "--bare", str(out)]
        subprocess.run(command, check=True, env=one_thread())
        return statistics.median(json.loads(out.read_text())[2:])


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_bare(steps: int, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardwise.facts.presets import PRESETS

    dist.init_process_group("gloo")
    shape = {**PRESETS["small-llama"], "use_cache": False}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fully_shard(model.model.embed_tokens)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape_of_batch = (MICRO_BATCH, SEQ_LEN)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        tokens = torch.randint(config.vocab_size, shape_of_batch, generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
