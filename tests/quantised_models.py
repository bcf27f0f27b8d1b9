"""Tiny models in directories as gpt-oss and DeepSeek-V3 are published, and the same ones plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCK = 128

SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "model_type": "gpt_oss",
        "vocab_size": 301,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # Neither 192 nor 144 nor 200 is a multiple of 128.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 301,
        "hidden_size": 192,
        "intermediate_size": 200,
        "moe_intermediate_size": 144,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def pack_mxfp4(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(experts, columns, rows) as blocks (experts, rows, columns / 32, 16) and scales."""
    groups = tensor.transpose(1, 2).unflatten(-1, (-1, 32)).double()
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(largest)) - 2
    distance = (groups.abs() / exponents.exp2()).unsqueeze(-1) - torch.tensor(E2M1).double()
    bits = distance.abs().argmin(-1) + 8 * (groups < 0)
    blocks = bits[..., 0::2] + 16 * bits[..., 1::2]
    return blocks.to(torch.uint8), (exponents.squeeze(-1) + 127).to(torch.uint8)


def unpack_by_hand(blocks: Tensor, scales: Tensor) -> Tensor:
    """The way back, one bit at a time."""
    bits = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).long()
    values = torch.tensor(E2M1)[bits % 8] * (1 - 2 * (bits // 8))
    scaled = values * (scales.double() - 127).exp2().unsqueeze(-1)
    return scaled.flatten(-2).transpose(1, 2).float().contiguous()


def pack_fp8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Values in fp8, and a scale for each block; those at the edges are smaller."""
    rows = -(-tensor.shape[0] // BLOCK)
    columns = -(-tensor.shape[1] // BLOCK)
    scales = torch.empty(rows, columns)
    values = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            part = tensor[block_at(row, column)]
            scales[row, column] = part.abs().max() / 448
            values[block_at(row, column)] = (part / scales[row, column]).to(values.dtype)
    return values, scales


def unpack_fp8(values: Tensor, scales: Tensor) -> Tensor:
    whole = values.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            whole[block_at(row, column)] *= scales[row, column]
    return whole


def block_at(row: int, column: int) -> tuple[slice, slice]:
    def at(place: int) -> slice:
        return slice(place * BLOCK, (place + 1) * BLOCK)

    return at(row), at(column)


def save_both(family: str, quantised: Path, plain: Path) -> None:
    """Several files with an index, quantised as published; and the values that they stand for."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[family])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    model.save_pretrained(plain, max_shard_size="100KB")
    whole = read_all(plain)
    packed, unpacked = _pack(family, whole)
    for directory, tensors in ((quantised, packed), (plain, unpacked)):
        directory.mkdir(exist_ok=True)
        for old in directory.glob("*.safetensors*"):
            old.unlink()
        save_torch_state_dict(tensors, directory, max_shard_size="100KB")
    settings = json.loads((plain / "config.json").read_text())
    how = MXFP4 if family == "gpt_oss" else {**FP8, "weight_block_size": [BLOCK, BLOCK]}
    (quantised / "config.json").write_text(json.dumps({**settings, "quantization_config": how}))


def read_all(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _pack(family: str, whole: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    packed: dict[str, Tensor] = {}
    unpacked: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        if family == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = pack_mxfp4(tensor)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            unpacked[name] = unpack_by_hand(blocks, scales)
        elif family == "deepseek_v3" and "proj" in name and name.endswith(".weight"):
            values, scales = pack_fp8(tensor)
            packed |= {name: values, f"{name}_scale_inv": scales}
            unpacked[name] = unpack_fp8(values, scales)
        else:
            packed[name] = unpacked[name] = tensor
    return packed, unpacked
