"""A user's own loop around `parallelize`, as docs/python.md shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise import choose_plan, load_config, parallelize


def main(config: str, out: str) -> None:
    dist.init_process_group("gloo")
    plan = choose_plan(load_config(config))
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(**plan.hf_config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    units = parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(64).reshape(2, 32) + dist.get_rank()
    losses = []
    for _ in range(6):
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        Path(out).write_text(f"{len(units.units)} {losses[0]} {losses[-1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
