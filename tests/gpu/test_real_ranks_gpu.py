"""Two and four real ranks on one GPU: what we do beside FSDP2 gives FSDP2's own losses.

The reference is FSDP2's plain path: torch's kernels, its own copies around collectives, gathers
into one buffer. Every other way must give the same losses, also after a resume.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device: nothing here was tested"
)

CONFIG = """\
model: {name: llama-3.2-1b, attention: sdpa, overrides: {num_hidden_layers: 4, vocab_size: 4096,
  hidden_size: 512, num_attention_heads: 8, num_key_value_heads: 2, intermediate_size: 2048}}
data: {source: stdlib, seq_len: 512, tokenizer: byte}
train: {micro_batch: 2, accumulation: 2, steps: 8, deterministic: true}
optim: {lr: 1e-3, warmup_steps: 0, schedule: constant}
memory: {checkpoint_activations: none}
checkpoint: {every: 4}
observe: {log_every: 1}
"""
PLAIN = ("train.kernels=torch", "shard.gather_in_place=false")
OWN = ("train.kernels=own", "shard.gather_in_place=false")
IN_PLACE = ("train.kernels=own", "shard.gather_in_place=true")
WAYS = {
    "copied by our kernels": OWN,
    "gathered in place": IN_PLACE,
    "gathered in place and kept": (*IN_PLACE, "shard.reshard_after_forward=false"),
    "activations in the host": (*IN_PLACE, "memory.offload_activations=0.5"),
    "all blocks recomputed": (*IN_PLACE, "memory.checkpoint_activations=full"),
}
FP32 = ("precision.param=fp32", "memory.compile=false")
BF16 = ("precision.param=bf16", "memory.compile=true", "train.deterministic=false")


def losses_of_runs(
    folder: Path, world: int, runs: dict[str, tuple[str, ...]]
) -> dict[str, list[float]]:
    """The losses of all steps, by run, as the run directories have them."""
    (folder / "run.yaml").write_text(CONFIG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("rank_on_one_gpu.py"))
    command = [sys.executable, script, str(folder), json.dumps(runs)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    place |= {"LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "2"}
    place |= {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    started = []
    for rank in range(world):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = (folder / f"rank-{rank}.txt").open("w")
        started.append(
            subprocess.Popen(command, env=os.environ | place | mine, stdout=output, stderr=output)
        )
    codes = [process.wait(timeout=400) for process in started]
    said = "\n".join((folder / f"rank-{rank}.txt").read_text()[-6000:] for rank in range(world))
    assert codes == [0] * world, said
    names = {name.partition("/")[0] for name in runs}
    return {name: _losses(folder / name / "events.jsonl") for name in sorted(names)}


def _losses(path: Path) -> list[float]:
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.parametrize("world", [2, 4])
def test_every_way_gives_the_losses_of_fsdp2s_plain_path(tmp_path: Path, world: int) -> None:
    common = (f"cluster.name={world}xH200", *FP32)
    # FSDP2's own path comes first: from the first other run on, our operators are in its place.
    runs = {"plain": (*common, *PLAIN)}
    runs |= {name: (*common, *way) for name, way in WAYS.items()}
    runs["resumed/first"] = (*common, *WAYS["activations in the host"], "train.stop_after=4")
    runs["resumed/again"] = (*common, *WAYS["activations in the host"])
    if world == 4:
        runs["replicas"] = (*common, *IN_PLACE, "mesh.replicate=2", "shard.strategy=hybrid_shard")
    found = losses_of_runs(tmp_path, world, runs)
    plain = found.pop("plain")
    assert len(plain) == 8 and plain[-1] < plain[0]
    off = {
        name: max(abs(a / b - 1) for a, b in zip(losses, plain, strict=True))
        for name, losses in found.items()
    }
    print(f"{world} ranks, fp32, largest relative difference to FSDP2's plain path:", off)
    assert max(off.values()) <= 1e-6, off
    assert found["resumed"] == found["activations in the host"]


@pytest.mark.parametrize("world", [2, 4])
def test_compiled_bf16_gives_the_same_losses_to_its_rounding(tmp_path: Path, world: int) -> None:
    common = (f"cluster.name={world}xH200", *BF16)
    runs = {"plain": (*common, *PLAIN)}
    names = ("gathered in place", "activations in the host")
    runs |= {name: (*common, *WAYS[name]) for name in names}
    found = losses_of_runs(tmp_path, world, runs)
    plain = found.pop("plain")
    off = {
        name: max(abs(a / b - 1) for a, b in zip(losses, plain, strict=True))
        for name, losses in found.items()
    }
    print(f"{world} ranks, compiled bf16, largest relative difference to FSDP2's plain path:", off)
    assert max(off.values()) <= 1e-2, off
