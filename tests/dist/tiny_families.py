"""Tiny made models of every family that transformers has for causal language modelling.

Sizes are set by the names that families give them, so that a new family needs no line here. Where
a family's own rules want other numbers, `OWN` has them as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 131
_BY_SIZE: dict[int, str] = {
    32: "hidden_size n_embd d_model dim embed_dim embedding_size word_embed_proj_dim emb_dim "
    "input_embedding_size output_embedding_size lru_width attention_hidden_size embedding_dim "
    "router_hidden_size hidden_size_global",
    48: "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "moe_intermediate_size d_inner dim_ff dff shared_expert_intermediate_size "
    "intermediate_size_mlp dense_intermediate_size shared_intermediate_size "
    "expert_ffn_hidden_size feed_forward_size moe_shared_expert_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
    "encoder_attention_heads num_local_experts num_experts n_routed_experts moe_num_experts "
    "num_encoder_attention_heads num_decoder_attention_heads num_routed_experts mamba_n_heads "
    "mamba_num_heads linear_num_heads time_step_rank mamba_dt_rank swa_num_attention_heads "
    "index_topk laurel_rank gated_norm_rank adapter_rank",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_top_k "
    "moe_topk moe_k top_k_experts linear_num_key_heads linear_num_value_heads index_n_heads "
    "n_mamba_heads zero_expert_num swa_num_key_value_heads num_query_groups o_groups "
    "index_topk_blocks",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group n_groups "
    "first_k_dense_replace mamba_n_groups mamba_ngroups num_dense_layers num_expert_group",
    8: "head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim state_size "
    "mamba_d_state ssm_state_size sliding_window window_size linear_key_head_dim "
    "linear_value_head_dim linear_head_dim chunk_size mamba_chunk_size rotary_dim kv_channels "
    "index_head_dim hidden_size_per_layer_input sliding_window_size swa_head_dim d_head dim_head "
    "attention_chunk_size index_block_size local_attention attention_window_size block_size",
    16: "q_lora_rank kv_lora_rank o_lora_rank qk_head_dim mamba_head_dim mamba_d_head "
    "attention_head_dim",
    64: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
    "mamba_d_ssm max_target_positions max_source_positions",
    VOCAB: "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab",
}
SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
# How many layers there are; at least two, and one of each kind.
DEPTHS = tuple(
    [
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "decoder_layers",
        "encoder_layers",
        "num_blocks",
        "num_decoder_layers",
        "num_encoder_layers",
    ]
)
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

# Encoders that are causal only where their configuration says so.
ENCODERS = tuple(
    [
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
    ]
)
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 2,
}
_FOUR_HYBRIDS = ["linear_attention", "hybrid"] * 2
# Where the names above are not enough: a family's own rules.
OWN: dict[str, dict[str, Any]] = {
    **{family: {"is_decoder": True} for family in ENCODERS},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    # Two layers have no experts by default, and two are all that there are.
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    # So that its table of positions, which it does not call as a module, is left to the root.
    "prophetnet": {"max_position_embeddings": 20},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    # So that the layer whose result it changes in place is left to the root, as at its real size.
    "roc_bert": {
        "is_decoder": True,
        "num_hidden_layers": 6,
        "pronunciation_vocab_size": VOCAB,
        "shape_vocab_size": VOCAB,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": _FOUR_HYBRIDS,
        "attention_hidden_size": 64,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": _FOUR_HYBRIDS,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "num_key_value_heads": 4,
        "num_query_groups": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "kv_channels": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(family: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The family's configuration at toy size, without dropout."""
    cls = CONFIG_MAPPING[family]
    own = {**OWN.get(family, {}), **(changes or {})}
    return cls(**_shrunk(cls().to_dict(), own))


def _shrunk(default: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of a configuration that are made small."""
    given = {
        **{name: SIZES[name] for name, value in default.items() if _is_size(name, value)},
        **{name: index for index, name in enumerate(TOKENS) if name in default},
        **{name: 0.0 for name, value in default.items() if _is_dropout(name, value)},
        **_shrunk_layers(default),
    }
    if "kv_lora_rank" in default:
        # Latent attention has keys and values for every head.
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    inner = {
        name: _shrunk(value, own.get(name, {}))
        for name, value in default.items()
        if isinstance(value, dict) and "model_type" in value
    }
    return {**given, **own, **inner}


def _is_size(name: str, value: Any) -> bool:
    """What is 0 stays off; these two are often left to be worked out."""
    may_be_none = ("head_dim", "num_key_value_heads")
    return name in SIZES and (bool(value) or (value is None and name in may_be_none))


def _is_dropout(name: str, value: Any) -> bool:
    words = ("dropout", "pdrop", "layerdrop", "jitter")
    return any(word in name for word in words) and isinstance(value, float)


def _shrunk_layers(default: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as there are kinds of them, two at least; lists with an entry a layer."""
    depth = next((default[name] for name in DEPTHS if default.get(name)), 0)
    lists = {
        name: value
        for name, value in default.items()
        if isinstance(value, list) and len(value) == depth
    }
    kinds = list(zip(*(lists[name] for name in KINDS if name in lists), strict=True))
    order = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    places = (order + [place for place in range(depth) if place not in order])[: max(2, len(order))]
    short = {name: [value[place] for place in sorted(places)] for name, value in lists.items()}
    return {**{name: len(places) for name in DEPTHS if default.get(name)}, **short}


def make_model(config: PreTrainedConfig) -> Any:
    """Random weights by transformers itself, with every parameter and buffer off its start."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    move_tensors(model)
    return model.train()


def move_tensors(model: nn.Module) -> None:
    """Norms, biases and buffers have first values that another model of the family has as well."""
    stored = model.state_dict(keep_vars=True)
    moved: set[int] = set()
    with torch.no_grad():
        for tensor in stored.values():
            if not tensor.is_floating_point() or id(tensor) in moved:
                continue
            moved.add(id(tensor))
            noise = 0.02 * torch.randn_like(tensor)
            # In matrices that are no parameters a zero is a mask.
            is_mask = tensor.dim() > 1 and not isinstance(tensor, nn.Parameter)
            tensor.add_(noise * tensor if is_mask else noise)


def save_model(config: PreTrainedConfig, place: Path) -> None:
    """A directory as `save_pretrained` writes it.

    Twice, because transformers sets a few values anew when it loads a family: a router's last
    bias, or the padding's row of an embedding.
    """
    make_model(config).save_pretrained(place)
    AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).save_pretrained(place)
