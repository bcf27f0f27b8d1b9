"""Sizes of a model that cannot be counted from its config: the model is built on meta and
counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from shardwise.errors import UserError
from shardwise.facts.head_form import PLAIN, HeadForm
from shardwise.facts.models import ATTENTIONS, ModelSpec
from shardwise.internals.hugging_face import supported_attentions
from shardwise.model.attention_trial import runs_with_ours
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.build import build_on_meta
from shardwise.model.head import WholeLogits, find_form
from shardwise.model.position_kind import find_positions
from shardwise.model.routers import describe_routers

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")


def count_on_meta(
    name: str, hf_config: Mapping[str, Any], *, code_dir: str | None = None
) -> ModelSpec:
    """The sizes of any family that transformers can build."""
    model = build_on_meta(hf_config, attention=None, code_dir=code_dir)
    if code_dir is None:
        _validate_comes_back(model)
    config = model.config.get_text_config()
    units = find_units(model)
    blocks = [module for unit in units.blocks for module in iter_modules(model, unit)]
    heads = _size(config, "num_attention_heads", "n_head", "num_heads", default=1)
    hidden = _size(config, "hidden_size", "n_embd", "d_model", default=1)
    vocab = _size(config, "vocab_size", default=0)
    _validate_sizes(hidden_size=hidden, num_attention_heads=heads, vocab_size=vocab)
    # Families that can have experts say 0 where a model has none.
    experts = max(1, _size(config, *_EXPERTS, default=1))
    active = max(1, _size(config, *_EXPERTS_PER_TOKEN, default=experts))
    matmul = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() == 2)
    stacked = [[p.numel() for p in block.parameters() if p.dim() == 3] for block in blocks]
    routed = sum(map(sum, stacked))
    routers = describe_routers(model)
    positions, in_table = find_positions(model)
    head, whole_logits = _head_form(model)
    ends = [unit.num_params for unit in units.units if not unit.is_block]
    return ModelSpec(
        name=name,
        model_type=str(hf_config.get("model_type", "")),
        num_layers=len(blocks),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=_size(config, "head_dim", default=hidden // heads),
        ffn_size=_ffn_size(config, hidden, experts, max(map(sum, stacked))),
        vocab_size=vocab,
        tied_embeddings=_is_tied(model),
        attention_dropout=_drops_attention(config),
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
        matmul_params_per_token=matmul + routed * active // experts + vocab * hidden,
        attentions=_attentions(model, hf_config, code_dir),
        source="counted",
        head=head,
        whole_logits=whole_logits,
    )


def _head_form(model: PreTrainedModel) -> tuple[HeadForm, str]:
    """The form of the head, and why there is none."""
    try:
        return find_form(model), ""
    except WholeLogits as reason:
        return PLAIN, str(reason)


def _ffn_size(config: Any, hidden: int, experts: int, stacked_params: int) -> int:
    """The width of the MLP, or of one expert: a gated one has three matrices."""
    if stacked_params and experts > 1:
        return stacked_params // (3 * hidden * experts)
    return _size(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)


def _validate_comes_back(model: PreTrainedModel) -> None:
    """Raise for a family whose saved model cannot be loaded again.

    For some families with several towers transformers builds the text model alone, and has no name
    for it.
    """
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{model.config.model_type} models cannot be trained here",
            why="AutoModelForCausalLM builds them from another family's config.json, and could not "
            "load what they are saved as",
            fix="name a model that AutoModelForCausalLM loads: model.name=DIR",
        )


def _validate_sizes(**sizes: int) -> None:
    """Raise where a size that every model has is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(
                f"config.json gives {name}={size}, but the least is 1",
                fix=f"mend config.json, or write model.overrides.{name}=NUMBER",
            )


def _size(config: Any, *names: str, default: int) -> int:
    """The first of these fields that has a value; for a list by layer, its largest."""
    values = (_value(config, name) for name in names)
    found = next((value for value in values if value is not None), default)
    return int(max(found) if isinstance(found, list | tuple) else found)


def _value(config: Any, name: str) -> Any:
    """A field, or a list of it where the configuration has one for each layer and says so."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return [getattr(layer, name) for layer in config.per_layer_config]
    return getattr(config, name, None)


def _drops_attention(config: Any) -> bool:
    """Whether a rate of dropout in attention is above 0. Families give it several names."""
    rates = (
        value
        for name, value in config.to_dict().items()
        if "drop" in name and ("attn" in name or "attention" in name)
    )
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def _attentions(
    model: PreTrainedModel, hf_config: Mapping[str, Any], code_dir: str | None
) -> tuple[str, ...]:
    """The attention implementations that the class declares, as from_config reads them, and ours
    where they run.

    Ours are called through the interface that kernels of other packages are called through. Some
    classes use that interface and do not declare it.
    """
    says = supported_attentions(model)
    declared = says["registered"] and says["flex"]
    has_kernel = says["sdpa"] or says["flash"]
    tried = has_kernel and not declared and runs_with_ours(hf_config, code_dir=code_dir)
    has = {
        "sdpa": says["sdpa"],
        "eager": True,
        "flash_attention_2": says["flash"],
        "flash_attention_4": tried or (says["registered"] and has_kernel),
        "flex_attention": tried or declared,
    }
    return tuple(name for name in ATTENTIONS if has[name])


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight
