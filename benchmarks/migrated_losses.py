"""Runs of Accelerate FSDP2 and DeepSpeed ZeRO beside those that `shardwise migrate` makes of
their files.

    PYTHONPATH=.venv/peft python benchmarks/migrated_losses.py
    PYTHONPATH=.venv/peft:DEEPSPEED python benchmarks/migrated_losses.py

Two CPU ranks, a tiny Llama, fp32, the same tokens in the same order, ten steps. Both begin with the
same weights on disk. Only the file is migrated; what is in the script there (model, data, and with
Accelerate the optimizer) is given as overrides. It exits with 1 where losses differ by more than
1e-5. DeepSpeed runs where it can be imported: `DS_BUILD_OPS=0 pip install --no-deps --target
DEEPSPEED deepspeed einops hjson msgpack ninja psutil py-cpuinfo`. The checkpoint that it leaves is
read back then, and compared with what its own script makes of it, bit for bit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, RANKS, MICRO, SEQ = 10, 2, 2, 32
LR, BETAS, EPS, CLIP = 1e-3, (0.9, 0.999), 1e-6, 1.0
TOLERANCE = 1e-5
TIMEOUT_S = 1800
ACCELERATE: dict[str, dict[str, Any]] = {
    "full_shard": {"fsdp_reshard_after_forward": True},
    "shard_grad_op": {"fsdp_reshard_after_forward": False},
    "full_shard, recomputed": {
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
    },
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    f"ZeRO {stage}": {"stage": stage, "stage3_param_persistence_threshold": 0}
    for stage in (0, 1, 2, 3)
}


def main() -> int:
    files = {f"accelerate-{n}": accelerate_file(each) for n, each in enumerate(ACCELERATE.values())}
    if importlib.util.find_spec("deepspeed") is not None:
        files |= {
            f"deepspeed-{n}": deepspeed_file(each) for n, each in enumerate(DEEPSPEED.values())
        }
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_model(home / "model")
        (home / "data.txt").write_bytes(bytes(32 + (i * i + i // 7) % 95 for i in range(20_000)))
        for (name, tree), case in zip(files.items(), (*ACCELERATE, *DEEPSPEED), strict=False):
            (home / f"{name}.json").write_text(json.dumps(tree))
            theirs = run_peer(home, name)
            ours = run_migrated(home, name)
            differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
            worst = max(worst, *differences)
            read = ""
            if (home / name).is_dir():
                count = compare_weights(home / name)
                read, worst = f"   {count} tensors read differ", max(worst, float(count))
            print(f"{case:24} {theirs[0]:.6f} -> {theirs[-1]:.6f}   {max(differences):.1e}{read}")
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


def accelerate_file(section: dict[str, Any]) -> dict[str, Any]:
    return {
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


def deepspeed_file(section: dict[str, Any]) -> dict[str, Any]:
    adam = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": 0.0, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": section,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def run_peer(home: Path, name: str) -> list[float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run([*torchrun, f"--nproc-per-node={RANKS}", __file__, str(home), name], home)
    losses: list[float] = json.loads((home / f"{name}.losses").read_text())
    return losses


def compare_weights(place: Path) -> int:
    """How many tensors of a checkpoint are not read as DeepSpeed's own script reads them."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from shardwise.model.boxes import whole_box
    from shardwise.model.stored import open_weights

    ours = open_weights(place)
    if any(place.glob("*/*optim_states.pt")):
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(place))
    else:
        # Without ZeRO there is one file, and no script.
        (file,) = place.glob("*/*model_states.pt")
        theirs = torch.load(file, weights_only=False)["module"]
    same = {
        key: torch.equal(ours.read(key, whole_box(ours.shape(key))), value)
        for key, value in theirs.items()
    }
    return len(set(ours.keys()) ^ set(theirs)) + list(same.values()).count(False)


def run_migrated(home: Path, name: str) -> list[float]:
    given = [
        f"model={home / 'model'}", f"data={home / 'data.txt'}", "data.tokenizer=byte",
        f"data.seq_len={SEQ}", "data.shuffle=false", f"train.steps={STEPS}",
        f"cluster={RANKS}xCPU", "optim.schedule=constant", "optim.warmup_steps=0",
        "observe.log_every=1", "checkpoint.at_end=false",
    ]  # fmt: skip
    if name.startswith("accelerate"):
        given += [
            f"train.micro_batch={MICRO}", f"optim.lr={LR}", f"optim.betas={list(BETAS)}",
            f"optim.eps={EPS}", f"optim.clip_norm={CLIP}", "optim.weight_decay=0",
        ]  # fmt: skip
    shardwise = [sys.executable, "-m", "shardwise"]
    run([*shardwise, "migrate", f"{name}.json", *given, "--out", f"run-{name}.yaml"], home)
    run([*shardwise, "train", f"run-{name}.yaml"], home)
    lines = (home / "runs" / f"run-{name}" / "events.jsonl").read_text().splitlines()
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
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def train_with_accelerate(home: Path, name: str, tree: dict[str, Any]) -> list[float]:
    """One rank of the peer: its own loop, as a script of Accelerate has it."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    section = tree["fsdp_config"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=section["fsdp_version"],
        reshard_after_forward=section["fsdp_reshard_after_forward"],
        auto_wrap_policy=section["fsdp_auto_wrap_policy"].lower(),
        transformer_cls_names_to_wrap=[section["fsdp_transformer_layer_cls_to_wrap"]],
        activation_checkpointing=section.get("fsdp_activation_checkpointing", False),
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = load_model(home)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, home, step)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    return losses


def train_with_deepspeed(home: Path, name: str, tree: dict[str, Any]) -> list[float]:
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    model = load_model(home)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=tree)
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, home, step)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / RANKS)
    engine.save_checkpoint(str(home / name))
    return losses


def load_model(home: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32).train()


def loss_of(model: Any, home: Path, step: int) -> Any:
    """The loss of this rank's sequences of a step."""
    import torch

    tokens = torch.tensor(list((home / "data.txt").read_bytes()))
    first = (step * RANKS + int(os.environ["RANK"])) * MICRO
    starts = [row * SEQ for row in range(first, first + MICRO)]
    inputs = torch.stack([tokens[at : at + SEQ] for at in starts])
    labels = torch.stack([tokens[at + 1 : at + SEQ + 1] for at in starts])
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def be_a_rank(home: Path, name: str) -> None:
    tree = json.loads((home / f"{name}.json").read_text())
    train = train_with_accelerate if name.startswith("accelerate") else train_with_deepspeed
    losses = train(home, name, tree)
    if os.environ["RANK"] == "0":
        (home / f"{name}.losses").write_text(json.dumps(losses))


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_a_rank(Path(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main())
