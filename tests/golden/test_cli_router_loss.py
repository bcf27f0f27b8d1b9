"""A config.json that asks for a load-balancing loss gets it from `shardwise train`."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from shardwise.data.loader import BatchLoader
from shardwise.data.sequences import SyntheticSequences

Run = Callable[..., subprocess.CompletedProcess[str]]

SEQ_LEN, BATCH, COEFFICIENT = 16, 8, 0.1
SETTINGS = [
    "cluster=2xCPU",
    "data.source=synthetic",
    f"data.seq_len={SEQ_LEN}",
    "precision.param=fp32",
    "train.steps=2",
    f"train.global_batch={BATCH}",
    f"train.micro_batch={BATCH // 2}",
    "optim.clip_norm=null",
    "checkpoint.at_end=false",
    "observe.log_every=1",
]


@pytest.fixture(scope="module")
def model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=301,
        num_local_experts=4,
        router_aux_loss_coef=COEFFICIENT,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config)


@pytest.mark.dist
def test_a_run_trains_with_the_loss_that_its_config_asks_for(
    tmp_path: Path, shardwise: Run, model: MixtralForCausalLM
) -> None:
    model.save_pretrained(tmp_path / "mixtral")
    (tmp_path / "run.yaml").write_text(f"model: {tmp_path / 'mixtral'}\n")
    done = shardwise("train", str(tmp_path / "run.yaml"), f"runs_dir={tmp_path}", *SETTINGS)
    first = steps_of(tmp_path / "run")[0]
    assert f"aux {first['aux_loss']:.4f}" in done.stdout

    loader = BatchLoader(
        SyntheticSequences(301, SEQ_LEN, 0),
        seed=0,
        shuffle=True,
        global_batch=BATCH,
        micro_batch=BATCH,
        accumulation=1,
        rank=0,
        num_ranks=1,
    )
    (batch,) = loader.step_batches(0)
    own = model(input_ids=batch.inputs)
    loss = F.cross_entropy(own.logits.flatten(0, 1), batch.labels.flatten())
    (loss + COEFFICIENT * own.aux_loss).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["aux_loss"] == pytest.approx(own.aux_loss.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    chosen = torch.stack([each.topk(2).indices.flatten() for each in own.router_logits])
    busiest = max(int(each.bincount().max()) for each in chosen)
    # Each of four experts of a block gets a quarter of its tokens on average.
    assert first["experts"]["most"] == pytest.approx(busiest / (chosen.shape[1] / 4))
    assert 0 < first["experts"]["least"] < 1 and 0 < first["experts"]["entropy"] < 1
    assert first["experts"]["dropped"] == 0
    assert f"experts {first['experts']['most']:.2f}x" in done.stdout


@pytest.mark.dist
def test_a_run_trains_with_the_z_loss_that_the_user_asks_for(
    tmp_path: Path, shardwise: Run, model: MixtralForCausalLM
) -> None:
    model.save_pretrained(tmp_path / "mixtral")
    (tmp_path / "run.yaml").write_text(f"model: {tmp_path / 'mixtral'}\n")
    words = (str(tmp_path / "run.yaml"), f"runs_dir={tmp_path}", *SETTINGS)
    off = "train.router_aux_loss=off"
    plain, with_z = (
        shardwise("train", *words, off, f"name=z{z}", f"train.router_z_loss={z}") for z in (0, 0.1)
    )
    (before, _), (first, _) = steps_of(tmp_path / "z0"), steps_of(tmp_path / "z0.1")
    assert before["z_loss"] is None and "  z " not in plain.stdout
    assert first["aux_loss"] is None and f"  z {first['z_loss']:.4f}" in with_z.stdout
    # Four experts whose logits are almost nothing.
    assert first["z_loss"] == pytest.approx(math.log(4) ** 2, rel=0.05)
    assert first["loss"] == before["loss"] and first["grad_norm"] != before["grad_norm"]


def steps_of(run: Path) -> list[dict[str, Any]]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "step"]


def test_a_model_without_routers_is_refused(tmp_path: Path, shardwise: Run) -> None:
    (tmp_path / "run.yaml").write_text("model: tiny-llama\ncluster: 2xCPU\n")
    words = (str(tmp_path / "run.yaml"), f"runs_dir={tmp_path}", "train.router_aux_loss=0.01")
    refused = shardwise("train", *words, expect=2)
    assert "cannot be computed for tiny-llama" in refused.stderr + refused.stdout
    assert not (tmp_path / "run").exists()
    shardwise("plan", *words[:2], "train.router_aux_loss=off")
