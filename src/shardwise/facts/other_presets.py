"""Presets of models whose blocks are not a Llama's: windows, experts, latent attention.

Their sizes are counted from transformers' code; facts/counted_presets.json keeps what was counted.
"""

from __future__ import annotations

from typing import Any

from shardwise.facts.preset_shape import shape_of

_QWEN_3_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}

_GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 1000000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "use_cache": True,
}

_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "rope_type": "yarn",
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "rope_theta": 150000.0,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "use_cache": True,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}

_OLMO_3: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "vocab_size": 100278,
    "bos_token_id": None,
    "eos_token_id": 100257,
    "pad_token_id": 100277,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_cache": True,
}

_GRANITE_4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "pad_token_id": 100256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "layer_types": ["attention"] * 40,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 0,
    "num_local_experts": 0,
    "output_router_logits": False,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": True,
    "use_cache": True,
}


def _granite_4_hybrid(mamba_heads: int) -> dict[str, Any]:
    """What the Granite 4 models with Mamba 2 share: every tenth block attends, without rope."""
    return _GRANITE_4 | {
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": mamba_heads,
        "mamba_proj_bias": False,
        "position_embedding_type": "nope",
        "rope_theta": 10000.0,
    }


OTHER_PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN_3_EXPERTS
    | shape_of(2048, 6144, 48, 32, 4)
    | {"moe_intermediate_size": 768},
    "qwen3-235b-a22b": _QWEN_3_EXPERTS
    | shape_of(4096, 12288, 94, 64, 4)
    | {"moe_intermediate_size": 1536},
    "gemma-3-1b": _GEMMA_3
    | shape_of(1152, 6912, 26, 4, 1)
    | {
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rope_scaling": None,
        "sliding_window": 512,
    },
    "gemma-3-4b": _GEMMA_3 | shape_of(2560, 10240, 34, 8, 4),
    "gemma-3-12b": _GEMMA_3 | shape_of(3840, 15360, 48, 16, 8),
    "gemma-3-27b": _GEMMA_3
    | shape_of(5376, 21504, 62, 32, 16)
    | {"head_dim": 128, "query_pre_attn_scalar": 168},
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "phi-4": shape_of(5120, 17920, 40, 40, 10)
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": 100352,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "pad_token_id": 100257,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
    },
    "glm-4.5-air": shape_of(4096, 10944, 46, 96, 8)
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "eos_token_id": 151329,
        "pad_token_id": 151329,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_qk_norm": False,
    },
    "deepseek-v3": shape_of(7168, 18432, 61, 128, 128)
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "use_cache": True,
        "v_head_dim": 128,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    },
    "olmo-3-7b": _OLMO_3 | shape_of(4096, 11008, 32, 32, 32),
    "olmo-3-32b": _OLMO_3 | shape_of(5120, 27648, 64, 40, 8),
    "smollm3-3b": shape_of(2048, 11008, 36, 16, 4)
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 128004,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 65536,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    },
    "granite-4.0-micro": _GRANITE_4
    | shape_of(2560, 8192, 40, 40, 8)
    | {
        "attention_multiplier": 0.015625,
        "logits_scaling": 10,
        "shared_intermediate_size": 8192,
    },
    "granite-4.0-h-micro": _granite_4_hybrid(64)
    | shape_of(2048, 8192, 40, 32, 8)
    | {
        "attention_multiplier": 0.015625,
        "logits_scaling": 8,
        "shared_intermediate_size": 8192,
    },
    "granite-4.0-h-tiny": _granite_4_hybrid(48)
    | shape_of(1536, 512, 40, 12, 4)
    | {
        "attention_multiplier": 0.0078125,
        "logits_scaling": 6,
        "num_experts_per_tok": 6,
        "num_local_experts": 64,
        "shared_intermediate_size": 1024,
    },
    "granite-4.0-h-small": _granite_4_hybrid(128)
    | shape_of(4096, 768, 40, 32, 8)
    | {
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16,
        "num_experts_per_tok": 10,
        "num_local_experts": 72,
        "shared_intermediate_size": 1536,
    },
}
