"""The adapters of a checkpoint as a directory that PEFT loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.checkpoint.beside import copy_tokenizer
from shardwise.checkpoint.export_model import Exported
from shardwise.checkpoint.export_target import written_aside
from shardwise.checkpoint.exporter import build_checked
from shardwise.checkpoint.read import VerifiedCheckpoint, read_tensor
from shardwise.files import user_path
from shardwise.model.lora import adapter_params, whole_params
from shardwise.model.peft_format import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    peft_config,
    peft_names,
    to_peft,
)


def read_adapters(
    checkpoint: VerifiedCheckpoint, code_dir: Path | None
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model on meta, and all that is trained by name, in fp32."""
    model = build_checked(checkpoint, code_dir)
    stored = checkpoint.index
    return model, {
        name: read_tensor(checkpoint.path, stored[f"model.{name}"], torch.float32)
        for name in (*adapter_params(model), *whole_params(model))
    }


def _resize_note(overrides: Mapping[str, Any]) -> list[str]:
    if "vocab_size" not in overrides:
        return []
    size = overrides["vocab_size"]
    return [f"model.resize_token_embeddings({size}) comes before it: the base has other tables"]


def export_adapters(
    checkpoint: VerifiedCheckpoint, target: Path, dtype: torch.dtype | None, code_dir: Path | None
) -> Exported:
    """Write adapter_config.json and adapter_model.safetensors to `target`."""
    plan = checkpoint.plan
    model, adapters = read_adapters(checkpoint, code_dir)
    settings = plan.settings
    base = plan.weights_dir or settings.model.name
    config = peft_config(settings.adapter, model, base, settings.model.revision)
    names = peft_names(model)
    # Of tied names each gets its own tensor: a safetensors file shares none.
    tensors = {
        theirs: to_peft(name, tensor).to(dtype or tensor.dtype, copy=len(names[name]) > 1)
        for name, tensor in adapters.items()
        for theirs in names[name]
    }
    with written_aside(user_path(str(target)).resolve()) as aside:
        (aside / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, aside / WEIGHTS_NAME, {"format": "pt"})
        notes = [
            f"adapters over {base}, for PeftModel.from_pretrained; --merge writes a whole model",
            *_resize_note(settings.model.overrides),
            *copy_tokenizer(plan, aside),
        ]
        num_files = len(list(aside.iterdir()))
    return Exported(sum(tensor.nbytes for tensor in tensors.values()), num_files, notes)
