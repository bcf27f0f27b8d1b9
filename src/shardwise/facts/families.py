"""Families of models whose sizes are computed from config.json alone.

Only families whose structure is known to the last bias are computed. For any other, and for a file
that leaves a size to its class's default, `UnknownFamily` is raised, and the caller counts the
parameters of a model on the meta device. There is no guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.facts.positions import rotary_limit

# Activations of gates that our kernels compute: silu, and gelu in its form with tanh.
_GATES = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new")
# This is far above any model's size, and far below what overflows when sizes are multiplied.
_LARGEST = 2**40


class UnknownFamily(Exception):
    """The sizes cannot be computed from this config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How the llama-shaped families differ. A string names the config.json field that decides."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    experts: bool = False
    tied: bool = False
    default_head_dim: int | None = None


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": _Family(),
    "mixtral": _Family(experts=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=True,
        default_head_dim=128,
    ),
    "gemma": _Family(
        qkv_bias="attention_bias", output_bias="attention_bias", tied=True, default_head_dim=256
    ),
}


def spec_from_config(name: str, hf_config: Mapping[str, Any]) -> ModelSpec:
    """Compute the sizes, or raise UnknownFamily."""
    model_type = str(hf_config.get("model_type"))
    if model_type == "gpt2":
        return _gpt2_spec(name, hf_config)
    if model_type not in _FAMILIES:
        raise UnknownFamily(f"the structure of {model_type!r} models is not known here")
    return _llama_shaped_spec(name, hf_config, _FAMILIES[model_type])


def _llama_shaped_spec(name: str, config: Mapping[str, Any], family: _Family) -> ModelSpec:
    size = _reader(config)
    hidden, ffn, vocab = size("hidden_size"), size("intermediate_size"), size("vocab_size")
    layers, heads = size("num_hidden_layers"), size("num_attention_heads")
    kv_heads = _kv_heads(config, heads)
    head_dim = _given(config, "head_dim") or family.default_head_dim or hidden // heads
    _validate_heads(config, heads, kv_heads, head_dim)
    experts = size("num_local_experts") if family.experts else 1
    experts_per_token = size("num_experts_per_tok") if family.experts else 1
    _validate_experts(experts, experts_per_token)
    tied = bool(config.get("tie_word_embeddings", family.tied))

    query, key_value = heads * head_dim, 2 * kv_heads * head_dim
    attention = hidden * (query + key_value) + query * hidden
    router = hidden * experts if family.experts else 0
    expert = 3 * hidden * ffn
    biases = (
        _enabled(config, family.qkv_bias) * (query + key_value)
        + _enabled(config, family.output_bias) * hidden
        + _enabled(config, family.mlp_bias) * (2 * ffn + hidden)
    )
    norms = 2 * hidden + family.head_norms * 2 * head_dim
    embedding, head = vocab * hidden, vocab * hidden
    block = attention + router + experts * expert + biases + norms
    tail = hidden + (0 if tied else head)
    return ModelSpec(
        name=name,
        model_type=str(config["model_type"]),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        tied_embeddings=tied,
        num_experts=experts,
        experts_per_token=experts_per_token,
        num_routers=layers if family.experts else 0,
        router_aux_loss=_router_aux_loss(config) if family.experts else None,
        head_norms=family.head_norms,
        gated_mlp=config.get("hidden_act") in _GATES
        and not family.experts
        and not _enabled(config, family.mlp_bias),
        attention_window=_window(config),
        attention_dropout=bool(config.get("attention_dropout")),
        max_positions=rotary_limit(config),
        embedding_params=embedding,
        block_params=block,
        tail_params=tail,
        total_params=embedding + layers * block + tail,
        matmul_params_per_token=layers * (attention + router + experts_per_token * expert) + head,
        source="config.json",
    )


def _gpt2_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    if config.get("add_cross_attention"):
        raise UnknownFamily("a gpt2 with cross-attention needs an encoder")
    size = _reader(config)
    hidden, layers, heads = size("n_embd"), size("n_layer"), size("n_head")
    if hidden % heads:
        raise UnknownFamily("transformers decides whether heads of this size work")
    vocab, positions = size("vocab_size"), size("n_positions")
    ffn = _given(config, "n_inner") or 4 * hidden
    tied = bool(config.get("tie_word_embeddings", True))

    matmuls = 4 * hidden * hidden + 2 * hidden * ffn
    block = matmuls + (4 * hidden + ffn + hidden) + 4 * hidden  # weights, biases, two norms
    embedding, head = (vocab + positions) * hidden, vocab * hidden
    tail = 2 * hidden + (0 if tied else head)
    return ModelSpec(
        name=name,
        model_type="gpt2",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=ffn,
        vocab_size=vocab,
        tied_embeddings=tied,
        attention_dropout=bool(config.get("attn_pdrop", 0.1)),
        max_positions=positions,
        position_table=True,
        embedding_params=embedding,
        block_params=block,
        tail_params=tail,
        total_params=embedding + layers * block + tail,
        matmul_params_per_token=layers * matmuls + head,
        source="config.json",
    )


def _reader(config: Mapping[str, Any]) -> Callable[[str], int]:
    """A lookup that refuses fields which the file leaves to transformers' defaults."""

    def size(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise UnknownFamily(f"config.json gives no usable {key} ({value!r})")
        return value

    return size


def _router_aux_loss(config: Mapping[str, Any]) -> float | None:
    """The coefficient of the load-balancing loss, where config.json asks for that loss."""
    if not config.get("output_router_logits"):
        return None
    coefficient = config.get("router_aux_loss_coef")
    if not isinstance(coefficient, int | float):
        raise UnknownFamily("config.json leaves router_aux_loss_coef to the class's default")
    return float(coefficient)


def _given(config: Mapping[str, Any], key: str) -> int | None:
    """A size that a file may leave out or give as null."""
    return None if config.get(key) is None else _reader(config)(key)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """The number of key and value heads. Llama's default is one for each query head; for other
    families an absent field means the class's number."""
    if config.get("num_key_value_heads") is None and (
        config["model_type"] == "llama" or "num_key_value_heads" in config
    ):
        return heads
    return _reader(config)("num_key_value_heads")


def _validate_heads(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> None:
    """Raise where attention could not be computed."""
    if heads % kv_heads:
        raise UserError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}",
            why="every key and value head serves the same number of query heads",
            fix=f"write model.overrides.num_key_value_heads={gcd(heads, kv_heads)}, or mend "
            "config.json",
        )
    if head_dim % 2 or (config.get("head_dim") is None and config["hidden_size"] % heads):
        raise UnknownFamily("transformers decides whether heads of this size work")


def _validate_experts(experts: int, experts_per_token: int) -> None:
    if experts_per_token > experts:
        raise UserError(
            f"num_experts_per_tok={experts_per_token}, but there are {experts} experts",
            why="a token goes to each expert at most once",
            fix=f"write model.overrides.num_experts_per_tok={experts}, or mend config.json",
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """Mistral's and Mixtral's window. Qwen's covers only some blocks, and is off as published."""
    if config.get("use_sliding_window"):
        raise UnknownFamily("some of its blocks have a window")
    if config["model_type"] not in ("mistral", "mixtral"):
        return None
    return _given(config, "sliding_window")


def _enabled(config: Mapping[str, Any], switch: bool | str) -> bool:
    return bool(config.get(switch, False)) if isinstance(switch, str) else switch
