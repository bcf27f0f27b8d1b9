"""Sizes of a model that cannot be counted on paper: built on meta and counted there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from shardwise.facts.models import ModelSpec
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.build import build_on_meta
from shardwise.model.positions import find_positions
from shardwise.model.routers import describe_routers


def count_on_meta(
    name: str, hf_config: Mapping[str, Any], *, code_dir: str | None = None
) -> ModelSpec:
    """The sizes of any family that transformers can build."""
    model = build_on_meta(hf_config, attention="eager", code_dir=code_dir)
    config = model.config.get_text_config()
    units = find_units(model)
    blocks = [module for unit in units.blocks for module in iter_modules(model, unit)]
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", default=1)
    hidden = int(_first(config, "hidden_size", "n_embd", "d_model", default=1))
    vocab = int(_first(config, "vocab_size", default=0))
    experts = int(_first(config, "num_local_experts", "num_experts", "n_routed_experts", default=1))
    active = int(_first(config, "num_experts_per_tok", "moe_top_k", default=experts))
    matmul = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() == 2)
    routed = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() == 3)
    routers = describe_routers(model)
    positions, in_table = find_positions(model)
    ends = [unit.num_params for unit in units.units if not unit.is_block]
    return ModelSpec(
        name=name,
        model_type=str(hf_config.get("model_type", "")),
        num_layers=len(blocks),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(_first(config, "num_key_value_heads", default=heads)),
        head_dim=int(_first(config, "head_dim", default=hidden // heads)),
        ffn_size=int(_first(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)),
        vocab_size=vocab,
        tied_embeddings=_is_tied(model),
        max_positions=positions,
        position_table=in_table,
        num_experts=experts,
        experts_per_token=active,
        num_routers=routers.num_routers,
        why_no_routers=routers.why_none,
        router_aux_loss=routers.asked,
        embedding_params=ends[0] if ends else 0,
        block_params=max(unit.num_params for unit in units.blocks),
        tail_params=ends[-1] if len(ends) > 1 else 0,
        total_params=sum(p.numel() for p in model.parameters()),
        matmul_params_per_token=matmul + routed * active // max(1, experts) + vocab * hidden,
        source="counted",
    )


def _first(config: Any, *names: str, default: Any) -> Any:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight
