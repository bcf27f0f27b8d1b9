"""Checkpoints in the layout of DeepSpeed's ZeRO, made without it."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Trap:
    """An object beside the tensors, as DeepSpeed's loss scaler is; to load it makes a directory."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def save_zero(
    place: Path,
    groups: Sequence[Mapping[str, Tensor]],
    *,
    stage: int,
    num_ranks: int,
    buffers: Mapping[str, Tensor] | None = None,
    frozen: Mapping[str, Tensor] | None = None,
    tied: Mapping[str, str] | None = None,
) -> None:
    """What engine.save_checkpoint leaves: `latest`, and a directory with the files of all ranks."""
    tag, buffers, frozen = place / "global_step7", buffers or {}, frozen or {}
    tag.mkdir(parents=True)
    (place / "latest").write_text("global_step7")
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in each.items()) for each in groups]
    weights = {name: tensor for group in groups for name, tensor in group.items()}
    whole = OrderedDict({**weights, **frozen, **buffers})
    if stage < 3:
        module = OrderedDict((name, tensor.bfloat16()) for name, tensor in whole.items())
    else:
        module = OrderedDict((name, buffers.get(name, torch.empty(0))) for name in whole)
    for rank in range(num_ranks):
        shard = {
            "loss_scaler": Trap(place / "canary"),
            "zero_stage": stage,
            "partition_count": [num_ranks] * len(groups) if stage < 3 else num_ranks,
        }
        if stage == 3:
            own = [_part(t, rank, num_ranks) for t in weights.values()]
            shard["fp32_flat_groups"] = [torch.cat(own)]
        else:
            shard["single_partition_of_fp32_groups"] = [
                _part(torch.cat([t.flatten() for t in group.values()]), rank, num_ranks)
                for group in groups
            ]
        torch.save({"optimizer_state_dict": shard}, tag / _name(rank, "optim"))
        if stage == 3 or rank == 0:
            state = {
                "module": module, "buffer_names": list(buffers), "param_shapes": shapes,
                "shared_params": dict(tied or {}), "args": Trap(place / "canary"),
                "frozen_param_shapes": {name: t.shape for name, t in frozen.items()},
                "frozen_param_fragments": {
                    name: _part(t, rank, num_ranks) for name, t in frozen.items()
                },
            }  # fmt: skip
            name = _name(rank, "model") if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(state, tag / name)


def _name(rank: int, kind: str) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def _part(tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    """This rank's equal part of all elements; the last part is padded."""
    each = math.ceil(tensor.numel() / num_ranks)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, each * num_ranks - tensor.numel()))
    return padded[rank * each : (rank + 1) * each].clone()
