"""An Accelerate FSDP2 run beside the run that `shardwise migrate` makes of its file.

    PYTHONPATH=.venv/peft python benchmarks/migrated_losses.py

Two CPU ranks, a tiny Llama, fp32, the same tokens in the same order, ten steps. Both begin with the
same weights on disk. Only the Accelerate file is migrated; model, data and optimizer, which are in
the script there, are given as overrides. It exits with 1 where losses differ by more than 1e-5.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

STEPS, RANKS, MICRO, SEQ = 10, 2, 2, 32
LR, BETAS, EPS, CLIP = 1e-3, (0.9, 0.999), 1e-6, 1.0
TOLERANCE = 1e-5
TIMEOUT_S = 300
CASES: dict[str, dict[str, Any]] = {
    "full_shard": {"fsdp_reshard_after_forward": True},
    "shard_grad_op": {"fsdp_reshard_after_forward": False},
    "full_shard, recomputed": {
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
    },
}


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_model(home / "model")
        (home / "data.txt").write_bytes(bytes(32 + (i * i + i // 7) % 95 for i in range(20_000)))
        for number, (name, section) in enumerate(CASES.items()):
            theirs = run_accelerate(home, number, section)
            ours = run_migrated(home, number)
            differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
            worst = max(worst, *differences)
            print(f"{name:24} {theirs[0]:.6f} -> {theirs[-1]:.6f}   {max(differences):.1e}")
    return int(worst > TOLERANCE)


def make_model(place: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)


def run_accelerate(home: Path, number: int, section: dict[str, Any]) -> list[float]:
    file = home / f"accelerate-{number}.yaml"
    tree = {
        "distributed_type": "FSDP",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": RANKS,
        "use_cpu": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            **section,
        },
    }
    file.write_text(yaml.safe_dump(tree))
    out = home / f"theirs-{number}.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={RANKS}", __file__, str(home), str(file), str(out)]
    run(command, home)
    losses: list[float] = json.loads(out.read_text())
    return losses


def run_migrated(home: Path, number: int) -> list[float]:
    file, config = f"accelerate-{number}.yaml", f"run-{number}.yaml"
    given = [
        f"model={home / 'model'}", f"data={home / 'data.txt'}", "data.tokenizer=byte",
        f"data.seq_len={SEQ}", "data.shuffle=false", f"train.steps={STEPS}",
        f"train.micro_batch={MICRO}", f"optim.lr={LR}", f"optim.betas={list(BETAS)}",
        f"optim.eps={EPS}", f"optim.clip_norm={CLIP}", "optim.weight_decay=0",
        "optim.schedule=constant", "observe.log_every=1", "checkpoint.at_end=false",
    ]  # fmt: skip
    shardwise = [sys.executable, "-m", "shardwise"]
    run([*shardwise, "migrate", file, *given, "--out", config], home)
    run([*shardwise, "train", config], home)
    lines = (home / "runs" / f"run-{number}" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["loss"] for event in events if event["event"] == "step"]


def run(command: list[str], home: Path) -> None:
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {
        **os.environ,
        # The commands run in another directory.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def train_with_accelerate(home: Path, file: Path, out: Path) -> None:
    """One rank of the peer: its own loop, as a script of Accelerate has it."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    section = yaml.safe_load(file.read_text())["fsdp_config"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=section["fsdp_version"],
        reshard_after_forward=section["fsdp_reshard_after_forward"],
        auto_wrap_policy=section["fsdp_auto_wrap_policy"].lower(),
        transformer_cls_names_to_wrap=[section["fsdp_transformer_layer_cls_to_wrap"]],
        activation_checkpointing=section.get("fsdp_activation_checkpointing", False),
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    tokens = torch.tensor(list((home / "data.txt").read_bytes()))
    losses = []
    for step in range(STEPS):
        first = (step * RANKS + accelerator.process_index) * MICRO
        starts = [row * SEQ for row in range(first, first + MICRO)]
        inputs = torch.stack([tokens[at : at + SEQ] for at in starts])
        labels = torch.stack([tokens[at + 1 : at + SEQ + 1] for at in starts])
        logits = model(input_ids=inputs, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    if accelerator.is_main_process:
        out.write_text(json.dumps(losses))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_with_accelerate(*map(Path, sys.argv[1:4]))
    else:
        sys.exit(main())
