"""The inputs of a run: its first weights, its tokenizer, and how documents become sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSource, ModelSpec
from shardwise.facts.tokenizer_files import has_own_tokenizer
from shardwise.plan.decisions import Choice
from shardwise.plan.given import decide
from shardwise.plan.planned import Plan

# The embedded tokenizer has one token for each byte, and one for the end of a document.
NUM_BYTE_TOKENS = 257
_BYTE_END = 256
# A vocabulary that is larger than a tokenizer's by this factor belongs to another tokenizer. Padded
# ones are larger by a few percent: Qwen's by 0.2%, Phi's by 1.8%.
FAR = 2


def choose_weights(config: RunConfig, source: ModelSource) -> Choice[str]:
    """`random`, or the place that the first weights are read from."""
    wanted = config.model.weights
    if wanted == "random":
        return Choice("random", "given", "user")
    if source.weights is not None:
        named = source.weights_from is not None
        why = "given" if named else "the model's directory has them"
        return Choice(str(source.weights), why, "user" if named else "rule")
    if wanted == "pretrained":
        raise UserError(
            f"model.weights=pretrained, but {config.model.name!r} comes without weights",
            why="presets are shapes only"
            if source.kind == "preset"
            else f"there are no weights in {source.directory}",
            fix="write model.weights=random, or name their place: model.weights_from=DIR, or "
            "model.name=DIR with config.json and safetensors (or a hub id)",
        )
    if source.kind == "preset":
        why = f"the preset {config.model.name} is a shape without weights"
    elif source.kind == "hub":
        why = f"no weights of {config.model.name} are here; `shardwise train` fetches them"
    else:
        why = f"there are no weights in {source.directory}"
    return Choice("random", why, "rule")


def choose_tokenizer(config: RunConfig) -> Choice[str]:
    """The tokenizer that `data.tokenizer` means: `byte`, or the place of one."""
    data, model_name = config.data, config.model.name
    if data.source == "synthetic":
        return Choice("none", "data.source=synthetic makes tokens and no text", "rule")
    if data.tokenizer != "auto":
        return Choice(data.tokenizer, "given", "user")
    if has_own_tokenizer(model_name):
        return Choice(model_name, "the model's own", "rule")
    return Choice("byte", f"{model_name} comes without a tokenizer", "rule")


def choose_packing(config: RunConfig) -> Choice[str]:
    """How documents share sequences."""
    if config.data.format == "text":
        return Choice("cut", "text is laid back to back and cut into sequences", "rule")
    why = f"whole {config.data.unit}s share sequences, and attention keeps documents apart"
    return decide(config, "packing", "best_fit", why)


def check_bytes(plan: Plan) -> list[UserError]:
    """What is wrong with training on bytes where nobody asked for bytes.

    A model whose vocabulary is about as large as that of bytes is taken to be made for them. For
    pretrained weights, the id of their end of a document must be that of bytes too.
    """
    if plan.decided.tokenizer != "byte" or plan.choices["tokenizer"].source == "user":
        return []
    vocab_size, name = plan.model.vocab_size, plan.model.name
    is_far = vocab_size > FAR * NUM_BYTE_TOKENS
    is_pretrained = plan.weights_dir is not None
    if not is_far and (not is_pretrained or _ends_like_bytes(plan.hf_config)):
        return []
    rest = "which its weights know as other text" if is_pretrained else "and never see the others"
    return [
        UserError(
            f"{name} comes without a tokenizer" + (" for its weights" if is_pretrained else ""),
            why=f"on bytes it would use {NUM_BYTE_TOKENS} of its {vocab_size} tokens, {rest}",
            fix="data.tokenizer=DIRECTORY_OR_HUB_ID names one; data.tokenizer=byte trains on bytes "
            "all the same",
        )
    ]


def warn_of_vocabulary(model: ModelSpec, num_tokens: int, *, pretrained: bool) -> list[str]:
    """The warning for a tokenizer that leaves most of the vocabulary unused."""
    if num_tokens * FAR >= model.vocab_size:
        return []
    effect = (
        "if these weights were trained with another tokenizer, its tokens mean other text to them"
        if pretrained
        else f"model.overrides.vocab_size={num_tokens} leaves out what is never trained"
    )
    return [f"the tokenizer has {num_tokens} tokens, {model.name} has {model.vocab_size}: {effect}"]


def _ends_like_bytes(hf_config: Mapping[str, Any]) -> bool:
    end = hf_config.get("eos_token_id")
    return _BYTE_END in (end if isinstance(end, list) else [end])
