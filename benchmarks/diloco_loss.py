"""DiLoCo's loss beside that of synchronous training: the same tokens, the same total batch.

    python benchmarks/diloco_loss.py [--seeds 0 1 2] [--every 10] [--outer-steps 50]

For every seed a run of two ranks begins synchronously. From its checkpoint it goes on in several
ways, each over the same batches: synchronously, with two sites in fp32, with two sites in int8, and
with two sites whose model is exchanged in two fragments beside inner steps. The loss on held-out
text at the end stands beside the synchronous one. The text is the source of Python's own library.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMMAND = [sys.executable, "-m", "shardwise"]
CONFIG = """
model:
  name: tiny-llama
  overrides: {{hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2}}
data:
  source: stdlib
  seq_len: 64
  eval_fraction: 0.02
  eval_sequences: 256
cluster: {{name: 2xCPU}}
precision: {{param: fp32}}
optim: {{lr: 2.0e-3, warmup_steps: 20}}
train: {{steps: {steps}, global_batch: 16, check_loss: false}}
checkpoint: {{every: 0}}
observe: {{log_every: 50, collectives: false}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warm-up", type=int, default=200, help="synchronous steps at first")
    parser.add_argument("--every", type=int, default=10, help="steps between outer steps")
    parser.add_argument("--outer-steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the losses there, too")
    options = parser.parse_args()
    every, steps = options.every, options.warm_up + options.every * options.outer_steps
    sites = ["mesh.site=2", f"diloco.steps={every}"]
    ways = {
        "synchronous": [],
        "fp32": sites,
        "int8": [*sites, "diloco.exchange=int8"],
        "streaming": [*sites, "diloco.fragments=2", f"diloco.overlap_steps={every // 5}"],
    }
    losses: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_config(folder, steps)
        for seed in options.seeds:
            begun = [f"runs_dir={folder}", f"train.seed={seed}"]
            train(file, [*begun, "name=begun", f"train.stop_after={options.warm_up}"])
            for way, words in ways.items():
                shutil.copytree(folder / "begun", folder / way)
                train(file, [*begun, f"name={way}", *words])
                losses[way].append(held_out_loss(folder / way, steps))
                print(f"seed {seed} {way}: {losses[way][-1]:.4f}", flush=True)
                shutil.rmtree(folder / way)
            shutil.rmtree(folder / "begun")
    show(losses)
    if options.json:
        options.json.write_text(json.dumps(losses, indent=1))


def write_config(folder: Path, steps: int) -> Path:
    """The run's YAML."""
    file = folder / "run.yaml"
    file.write_text(CONFIG.format(steps=steps))
    return file


def train(file: Path, words: Sequence[str]) -> None:
    """One run through the command, from the checkpoint in its directory."""
    done = subprocess.run([*COMMAND, "train", str(file), *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")


def held_out_loss(run: Path, step: int) -> float:
    """What the run's last evaluation says."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    [loss] = [e["loss"] for e in events if e["event"] == "eval" and e["step"] == step]
    return float(loss)


def show(losses: dict[str, list[float]]) -> None:
    """The table: each way's loss over the seeds, and how far it is from the synchronous one."""
    print("\n| way | held-out loss, mean | spread over seeds | against synchronous, by seed |")
    print("|---|---|---|---|")
    for way, found in losses.items():
        pairs = zip(found, losses["synchronous"], strict=True)
        apart = " ".join(f"{loss / synchronous - 1:+.2%}" for loss, synchronous in pairs)
        spread = max(found) - min(found)
        print(f"| {way} | {statistics.mean(found):.4f} | {spread:.4f} | {apart} |")


if __name__ == "__main__":
    main()
