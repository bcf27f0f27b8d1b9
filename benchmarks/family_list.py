"""The families of the scoreboard: real shapes, cut to as many layers as one GPU needs to be judged.

A family is a model's config.json with fewer layers; its kinds of layers keep their proportion. Most
are presets. Those at the end are not: nobody looked at them while the plan's figures were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from peers.shapes import Setting
from shardwise.facts.preset_shape import shape_of
from shardwise.facts.presets import PRESETS

# Recompute none, selective and full; two lengths of sequences; two micro-batches of each.
SETTINGS = ("2-none@4096", "4-selective@4096", "4-full@4096", "1-none@8192", "2-selective@8192")
# Ranks that the GPU is rank 0 of. One is the GPU alone.
PLACES = (8, 1)
# What a tiny model has instead of these fields, where its family has them at all.
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mamba_n_heads": 2,
    "mamba_d_state": 16,
    "sliding_window": 32,
}
# Defaults of transformers lie beyond a tiny vocabulary.
_TINY_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Tokens of a real sequence for one of a tiny model.
_TINY_SEQUENCE = 64


def cut_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of config.json with so many layers."""
    found = {**config, "num_hidden_layers": layers}
    if "max_window_layers" in found:
        found["max_window_layers"] = layers
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][:layers]
    return found


@dataclass(frozen=True, slots=True)
class Case:
    """A setting and a length of sequences, written `2-none@4096`."""

    setting: Setting
    seq_len: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Raises ValueError where the text is no case."""
        setting, _, seq_len = text.partition("@")
        return cls(Setting.parse(setting), int(seq_len))

    @property
    def tokens(self) -> int:
        """Of one step of one rank."""
        return self.setting.micro_batch * self.seq_len

    def __str__(self) -> str:
        return f"{self.setting}@{self.seq_len}"

    def tiny(self) -> Case:
        """The same with short sequences."""
        return Case(self.setting, self.seq_len // _TINY_SEQUENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model of which a part is measured."""

    config: Mapping[str, Any]
    """The fields of config.json, with all layers."""

    layers: Mapping[int, int]
    """How many are left, by the number of ranks."""

    least: int = 1
    """The fewest layers that hold every kind of them."""

    seen: bool = True
    """Whether the plan's figures were made with a look at it."""

    def cut(self, layers: int) -> dict[str, Any]:
        """The fields with so many layers."""
        return cut_config(self.config, layers)

    def tiny(self, layers: int | None = None) -> dict[str, Any]:
        """A model for CPUs, with every kind of layer unless it is told how many."""
        small = {name: value for name, value in _TINY.items() if self.config.get(name) is not None}
        if self.config["num_key_value_heads"] == self.config["num_attention_heads"]:
            small["num_key_value_heads"] = small["num_attention_heads"]
        return {**self.cut(layers or max(2, self.least)), **small, **_TINY_IDS}


def _family(config: Mapping[str, Any], eight: int, one: int, least: int = 1) -> Family:
    return Family(config=config, layers={8: eight, 1: one}, least=least)


def _preset(name: str, eight: int, one: int, least: int = 1) -> Family:
    # transformers writes into the dictionaries that it is given.
    return _family(deepcopy(PRESETS[name]), eight, one, least)


def _unseen(config: Mapping[str, Any], eight: int, one: int, least: int = 1) -> Family:
    return replace(_family(config, eight, one, least), seen=False)


_GRANITE = shape_of(4096, 12800, 40, 32, 8) | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "vocab_size": 49155,
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
# The shape of DeepSeek-V2-Lite, in V3's form.
_DEEPSEEK_16B = {
    **PRESETS["deepseek-v3"],
    **shape_of(2048, 10944, 27, 16, 16),
    "vocab_size": 102400,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
_COMMAND_R7B = shape_of(4096, 14336, 32, 32, 8) | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "vocab_size": 256000,
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "rope_theta": 50000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}
_STARCODER2_7B = shape_of(4608, 18432, 32, 36, 4) | {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "vocab_size": 49152,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "embedding_dropout": 0.0,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 16384,
    "norm_epsilon": 1e-05,
    "residual_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_bias": True,
}
_MINITRON_8B = shape_of(4096, 16384, 32, 32, 8) | {
    "architectures": ["NemotronForCausalLM"],
    "model_type": "nemotron",
    "vocab_size": 256000,
    "head_dim": 128,
    "hidden_act": "relu2",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-05,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GLM_4_9B = shape_of(4096, 13696, 40, 32, 2) | {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "vocab_size": 151552,
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_STABLELM_2_12B = shape_of(5120, 13824, 40, 32, 8) | {
    "architectures": ["StableLmForCausalLM"],
    "model_type": "stablelm",
    "vocab_size": 100352,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8192,
    "partial_rotary_factor": 0.25,
    "qk_layernorm": True,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "use_qkv_bias": False,
}
_FALCON_3_7B = {
    **PRESETS["llama-3.1-8b"],
    **shape_of(3072, 23040, 28, 12, 4),
    "vocab_size": 131072,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000042.0,
}
_ERNIE_21B = shape_of(2560, 12288, 28, 20, 4) | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "vocab_size": 103424,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}

_GEMMA_2_9B = shape_of(3584, 14336, 42, 16, 8) | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256000,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_APERTUS_8B = shape_of(4096, 21504, 32, 32, 8) | {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "vocab_size": 131072,
    "attention_bias": False,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 12000000.0,
    "tie_word_embeddings": False,
}
_SEED_OSS_36B = shape_of(5120, 27648, 64, 80, 8) | {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "vocab_size": 155136,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
}
_EXAONE_4_32B = shape_of(5120, 27392, 64, 40, 8) | {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "vocab_size": 102400,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": False,
}
_OLMOE_7B = shape_of(2048, 1024, 16, 16, 16) | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 50304,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GPT_NEOX_20B = shape_of(6144, 24576, 44, 64, 64) | {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": 50432,
    "attention_dropout": 0.0,
    "hidden_act": "gelu_fast",
    "hidden_dropout": 0.0,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
}
_OLMO_2_13B = shape_of(5120, 13824, 40, 40, 40) | {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 100352,
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_HUNYUAN_7B = shape_of(4096, 14336, 32, 32, 8) | {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
    "vocab_size": 128167,
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_PHI_3_5_MOE = shape_of(4096, 6400, 32, 32, 8) | {
    "architectures": ["PhimoeForCausalLM"],
    "model_type": "phimoe",
    "vocab_size": 32064,
    "attention_bias": True,
    "hidden_act": "silu",
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MINIMAX_M2 = shape_of(3072, 1536, 62, 48, 8) | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": False,
}
_LFM_2_2_6B = shape_of(2048, 10752, 30, 32, 8) | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 65536,
    "block_auto_adjust_ff_dim": False,
    "conv_bias": False,
    "layer_types": (["conv"] * 2 + ["full_attention"]) * 10,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "tie_word_embeddings": True,
}
_QWEN_3_NEXT = shape_of(2048, 5120, 48, 16, 2) | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "head_dim": 256,
    "hidden_act": "silu",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
}
_GRANITE_4_H_TINY = shape_of(1536, 512, 40, 12, 4) | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "logits_scaling": 6,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_heads": 48,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 6,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Family] = {
    "llama-3.1-8b": _preset("llama-3.1-8b", 16, 12),
    "qwen3-8b": _preset("qwen3-8b", 16, 12),
    "mistral-7b": _preset("mistral-7b", 16, 12),
    # Five local layers to each global one.
    "gemma-3-12b": _preset("gemma-3-12b", 18, 12, least=6),
    "mixtral-8x7b": _preset("mixtral-8x7b", 6, 2),
    "qwen3-30b-a3b": _preset("qwen3-30b-a3b", 12, 6),
    # Local and global layers in turn.
    "gpt-oss-20b": _preset("gpt-oss-20b", 8, 4, least=2),
    "phi-4": _preset("phi-4", 12, 8),
    # Three local layers to each global one.
    "olmo-3-7b": _preset("olmo-3-7b", 16, 12, least=4),
    # One layer in four without rotary positions.
    "smollm3-3b": _preset("smollm3-3b", 36, 24, least=4),
    # The first layer is dense.
    "glm-4.5-air": _preset("glm-4.5-air", 5, 2, least=2),
    "deepseek-16b": _family(_DEEPSEEK_16B, 12, 6, least=2),
    "qwen2.5-7b": _preset("qwen2.5-7b", 14, 10),
    "granite-8b": _family(_GRANITE, 16, 12),
    "command-r7b": _family(_COMMAND_R7B, 12, 8, least=4),
    "starcoder2-7b": _family(_STARCODER2_7B, 16, 12),
    "minitron-8b": _family(_MINITRON_8B, 12, 8),
    "glm-4-9b": _family(_GLM_4_9B, 16, 12),
    "stablelm-2-12b": _family(_STABLELM_2_12B, 14, 10),
    "falcon3-7b": _family(_FALCON_3_7B, 12, 10),
    "ernie-21b-a3b": _family(_ERNIE_21B, 10, 5, least=2),
    # Local and global layers in turn.
    "gemma-2-9b": _unseen(_GEMMA_2_9B, 12, 8, least=2),
    "apertus-8b": _unseen(_APERTUS_8B, 14, 8),
    "seed-oss-36b": _unseen(_SEED_OSS_36B, 8, 4),
    # Three local layers to each global one.
    "exaone-4-32b": _unseen(_EXAONE_4_32B, 8, 4, least=4),
    "olmoe-7b": _unseen(_OLMOE_7B, 16, 6),
    "gpt-neox-20b": _unseen(_GPT_NEOX_20B, 10, 6),
    "olmo-2-13b": _unseen(_OLMO_2_13B, 12, 8),
    "hunyuan-7b": _unseen(_HUNYUAN_7B, 14, 10),
    "phi-3.5-moe": _unseen(_PHI_3_5_MOE, 6, 3),
    "minimax-m2": _unseen(_MINIMAX_M2, 4, 1),
    # Two convolutions, then attention.
    "lfm2-2.6b": _unseen(_LFM_2_2_6B, 15, 12, least=3),
    # Three layers of linear attention to each full one.
    "qwen3-next-80b": _unseen(_QWEN_3_NEXT, 8, 4, least=4),
    # Nine layers of Mamba 2 to one with attention.
    "granite-4-h-tiny": _unseen(_GRANITE_4_H_TINY, 20, 10, least=6),
}
