"""The Hugging Face model, built on meta: its shape without a byte of weights."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import UserError


def build_on_meta(
    hf_config: Mapping[str, Any],
    *,
    attention: str = "sdpa",
    code_dir: str | None = None,
) -> PreTrainedModel:
    """The model that `hf_config` describes, fp32 and on meta; `code_dir` holds its own code."""
    config = _transformers_config(hf_config, code_dir)
    # A cache of keys and values is for generation; in training it only costs memory.
    config.use_cache = False
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attention,
            dtype=torch.float32,
            trust_remote_code=code_dir is not None,
        )
    return model.train()


def drop_idle_window(hf_config: Mapping[str, Any], seq_len: int) -> Mapping[str, Any]:
    """The same model without a sliding window that no sequence of `seq_len` can reach.

    With a window as long as the sequence transformers makes an explicit mask, which bars the fast
    attention kernels, although every token still sees all the tokens before it.
    """
    window = hf_config.get("sliding_window")
    if hf_config.get("model_type") in ("mistral", "mixtral") and window and window >= seq_len:
        return {**hf_config, "sliding_window": None}
    return hf_config


def _transformers_config(hf_config: Mapping[str, Any], code_dir: str | None) -> Any:
    model_type = str(hf_config.get("model_type", ""))
    if code_dir is not None:
        own = AutoConfig.from_pretrained(code_dir, trust_remote_code=True)
        return type(own).from_dict(dict(hf_config))
    try:
        config = AutoConfig.for_model(model_type)
    except ValueError as error:
        families = list(CONFIG_MAPPING)
        near = get_close_matches(model_type, families, n=3)
        raise UserError(
            f"model_type {model_type!r} is not a family that transformers knows",
            why=f"transformers {transformers.__version__} knows {len(families)} families; "
            + (f"the nearest names are {', '.join(near)}" if near else "none has such a name"),
            fix="correct model_type in the model's config.json, update transformers, or set "
            "model.trust_remote_code with a pinned revision",
        ) from error
    return type(config).from_dict(dict(hf_config))
