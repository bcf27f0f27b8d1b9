"""Model configurations that need no download: the contents of config.json by preset name.

Published models keep the classic fields of their files (`rope_theta`, `rope_scaling`), which
transformers 5 still reads. The tiny and small ones are for CPUs: their vocabularies hold the
embedded byte tokenizer's 257 tokens (bytes, then the end of text) and they have no dropout.
"""

from __future__ import annotations

from typing import Any

from shardwise.facts.other_presets import OTHER_PRESETS
from shardwise.facts.preset_shape import shape_of

_BYTE_VOCAB: dict[str, Any] = {"vocab_size": 320, "bos_token_id": 256, "eos_token_id": 256}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_cache": True,
}

_LLAMA_2: dict[str, Any] = _LLAMA | {
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


def _llama_3(rope_factor: float) -> dict[str, Any]:
    """What the 3.1 and 3.2 models share; only the factor of their rope scaling differs."""
    return _LLAMA | {
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


_QWEN_2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}


def _qwen_3(num_layers: int) -> dict[str, Any]:
    """What the dense Qwen3 models share."""
    return _QWEN_2 | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "eos_token_id": 151645,
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": num_layers,
        "rope_scaling": None,
        "sliding_window": None,
    }


_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_cache": True,
}

_MIXTRAL: dict[str, Any] = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}

_GEMMA: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "vocab_size": 256000,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    # The published files say "gelu" and mean this one.
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
}

_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 50257,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "tie_word_embeddings": True,
    "use_cache": True,
}


_TINY: dict[str, Any] = (
    _BYTE_VOCAB | shape_of(128, 384, 4, 4, 2) | {"max_position_embeddings": 2048}
)

PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama_3(8.0) | shape_of(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _llama_3(8.0) | shape_of(8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _llama_3(8.0) | shape_of(16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _llama_3(32.0)
    | shape_of(2048, 8192, 16, 32, 8)
    | {"head_dim": 64, "tie_word_embeddings": True},
    "llama-3.2-3b": _llama_3(32.0)
    | shape_of(3072, 8192, 28, 24, 8)
    | {"head_dim": 128, "tie_word_embeddings": True},
    "llama-2-7b": _LLAMA_2 | shape_of(4096, 11008, 32, 32, 32),
    "llama-2-13b": _LLAMA_2 | shape_of(5120, 13824, 40, 40, 40),
    "qwen2.5-7b": _QWEN_2 | shape_of(3584, 18944, 28, 28, 4) | {"max_window_layers": 28},
    "qwen2.5-32b": _QWEN_2
    | shape_of(5120, 27648, 64, 40, 8)
    | {"max_window_layers": 64, "rms_norm_eps": 1e-05},
    "qwen3-0.6b": _qwen_3(28) | shape_of(1024, 3072, 28, 16, 8) | {"tie_word_embeddings": True},
    "qwen3-1.7b": _qwen_3(28) | shape_of(2048, 6144, 28, 16, 8) | {"tie_word_embeddings": True},
    "qwen3-4b": _qwen_3(36) | shape_of(2560, 9728, 36, 32, 8) | {"tie_word_embeddings": True},
    "qwen3-8b": _qwen_3(36) | shape_of(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen_3(40) | shape_of(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen_3(64) | shape_of(5120, 25600, 64, 64, 8),
    "mistral-7b": _MISTRAL,
    "mistral-small-24b": _MISTRAL
    | shape_of(5120, 32768, 40, 32, 8)
    | {
        "vocab_size": 131072,
        "head_dim": 128,
        "rope_theta": 100000000.0,
        "sliding_window": None,
    },
    "mixtral-8x7b": _MIXTRAL,
    "gemma-2b": _GEMMA | shape_of(2048, 16384, 18, 8, 1),
    "gemma-7b": _GEMMA | shape_of(3072, 24576, 28, 16, 16),
    "gpt2": _GPT2,
    **OTHER_PRESETS,
    "tiny-llama": _LLAMA | _TINY | {"rope_theta": 10000.0},
    "tiny-qwen": _QWEN_2
    | _TINY
    | {"max_window_layers": 4, "sliding_window": None, "tie_word_embeddings": True},
    "tiny-mixtral": _MIXTRAL | _TINY | {"intermediate_size": 256, "num_local_experts": 4},
    "tiny-gpt2": _GPT2
    | _BYTE_VOCAB
    | {
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "n_embd": 128,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 2048,
    },
    "small-llama": _LLAMA
    | _BYTE_VOCAB
    | shape_of(512, 1408, 8, 8, 4)
    | {"max_position_embeddings": 2048, "rope_theta": 10000.0},
}
