"""shardwise train against Hugging Face Trainer on one GPU, in one run.

    python benchmarks/vs_hf_trainer.py [--layers 16] [--micro-batch 2] [--modes plain,compile]

Both train the same Llama 3.1 8B shape on random tokens with bf16 compute and fp32 masters. Ours is
`shardwise train benchmarks/llama-8b-16-layers.yaml`; each contender runs in a process of its own,
ours first and last, so that a drifting clock shows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SEQ_LEN = 4096


def main() -> None:
    options = parse()
    if options.child:
        run_trainer(options)
        return
    contenders = ["shardwise", *[f"trainer {m}" for m in options.modes.split(",")], "shardwise"]
    rows = [(name, measure(name, options)) for name in contenders]
    ours = max(row["tokens_per_s"] for name, row in rows if name == "shardwise")
    print(f"\n{'contender':<18} {'tok/s':>8} {'ms/step':>8} {'peak GiB':>9} {'ours / it':>9}")
    for name, row in rows:
        ratio = ours / row["tokens_per_s"]
        figures = f"{row['tokens_per_s']:>8.0f} {row['ms']:>8.1f} {row['gib']:>9.1f}"
        print(f"{name:<18} {figures} {ratio:>9.3f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", default="plain,compile")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    print(f"--- {name}", flush=True)
    return measure_ours(options) if name == "shardwise" else measure_trainer(name, options)


def measure_ours(options: argparse.Namespace) -> dict[str, float]:
    run = f"vs-hf-{time.time_ns()}"
    command = [
        *(sys.executable, "-m", "shardwise", "train", str(HERE / "llama-8b-16-layers.yaml")),
        *(f"name={run}", f"runs_dir={options.runs_dir}", f"train.steps={options.steps}"),
        f"model.overrides.num_hidden_layers={options.layers}",
        f"train.micro_batch={options.micro_batch}",
    ]
    subprocess.run(command, check=True)
    lines = (Path(options.runs_dir) / run / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    # The first two windows hold the compilation and the warm-up of the allocator.
    step_s = statistics.median(event["step_s"] for event in steps[2:])
    tokens = options.micro_batch * SEQ_LEN
    gib = steps[-1]["memory"]["allocated"] / 2**30
    return {"tokens_per_s": tokens / step_s, "ms": step_s * 1e3, "gib": gib}


def measure_trainer(name: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name.split()[1]]
    for flag in ("layers", "micro_batch", "steps"):
        command += [f"--{flag.replace('_', '-')}", str(getattr(options, flag))]
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def run_trainer(options: argparse.Namespace) -> None:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from shardwise.facts.presets import PRESETS

    shape = {**PRESETS["llama-3.1-8b"], "num_hidden_layers": options.layers, "use_cache": False}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    class RandomTokens(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return options.steps * options.micro_batch

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(config.vocab_size, (SEQ_LEN,), generator=generator)
            return {"input_ids": tokens, "labels": tokens}

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir="runs/.hf-trainer",
        per_device_train_batch_size=options.micro_batch,
        max_steps=options.steps,
        learning_rate=1e-5,
        bf16=True,
        optim="adamw_torch_fused",
        torch_compile=options.child == "compile",
        dataloader_num_workers=4,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=RandomTokens(), callbacks=[Clock()]).train()
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    step_s = statistics.median(steps[-10:])
    result = {
        "tokens_per_s": options.micro_batch * SEQ_LEN / step_s,
        "ms": step_s * 1e3,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
