"""PEFT under Hugging Face Trainer on one GPU: frozen bf16 weights, or bitsandbytes' four bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from peers.shapes import Setting
from peers.trainer import build, time_steps


def step_times(
    hf_config: Mapping[str, Any],
    setting: Setting,
    seq_len: int,
    steps: int,
    device: str,
    *,
    rank: int,
    in_four_bits: bool,
) -> list[float]:
    """Seconds of each of the last `steps` steps, with adapters on all linear layers and experts."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build(hf_config, setting, device, dtype)
    if in_four_bits:
        quantise(model)
    # Recompute needs an input with a gradient, and embeddings are frozen.
    model.enable_input_require_grads()
    experts = {
        ".".join(name.split(".")[-2:])
        for name, param in model.named_parameters()
        if param.ndim == 3
    }
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        target_parameters=sorted(experts) or None,
        task_type="CAUSAL_LM",
    )
    return time_steps(get_peft_model(model, config), setting, seq_len, steps, device)


def quantise(model: nn.Module) -> None:
    """Put bitsandbytes' NF4 layers in the place of all linear layers but the head, as its loader in
    transformers does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is not nn.Linear or child is head:
                continue
            weight = child.weight.data
            layer = Linear4bit(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                compute_dtype=weight.dtype,
                quant_type="nf4",
                device="meta",
            )
            layer.weight = Params4bit(
                weight.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
            ).to(weight.device)
            layer.bias = child.bias
            setattr(module, name, layer)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
