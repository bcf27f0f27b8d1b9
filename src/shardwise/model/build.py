"""The Hugging Face model, built on meta: its shape without a byte of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import UserError
from shardwise.facts.quantization import FIELD as QUANTIZATION_FIELD

# Errors that a family's code raises where a value has another type, or is far out of range.
_CANNOT_BUILD = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(AssertionError, ImportError, OSError, MemoryError, StrictDataclassError),
)
_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
_MOST = 4096
# Fields of config.json that say where the model's own code lies.
_CODE = ("auto_map", "_name_or_path", "name_or_path")
# What its weights were saved in. Ours are made in fp32, and torch need not have such a format.
_DTYPES = ("dtype", "torch_dtype")


def build_on_meta(
    hf_config: Mapping[str, Any],
    *,
    attention: str | None = "sdpa",
    code_dir: str | None = None,
) -> PreTrainedModel:
    """The model that `hf_config` describes, in fp32 and on meta.

    `code_dir` holds the model's own code. Where no attention is named, the class takes the best
    that it has.
    """
    return build_model(hf_config, attention=attention, code_dir=code_dir, device="meta")


def build_model(
    hf_config: Mapping[str, Any], *, attention: str | None, code_dir: str | None, device: str
) -> PreTrainedModel:
    """The same on any device. On a device other than meta its weights are random."""
    _validate_counts(hf_config)
    try:
        config = _transformers_config(_with_floats(hf_config), code_dir)
        # A cache of keys and values is for generation; in training it only costs memory.
        config.use_cache = False
        with torch.device(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=attention,
                dtype=torch.float32,
                trust_remote_code=code_dir is not None,
            )
    except _CANNOT_BUILD as error:
        raise UserError(
            f"transformers cannot build a {hf_config.get('model_type', 'model')} from this "
            "config.json",
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="mend config.json or model.overrides; a model of `shardwise config ls` shows what "
            "such a file holds",
        ) from error
    return model.train()


def _validate_counts(hf_config: Mapping[str, Any]) -> None:
    """Raise where a count is absurd. A module is made for each, so one digit too many would take
    hours."""
    for name in _COUNTS:
        value = hf_config.get(name)
        if isinstance(value, int | float) and value > _MOST:
            raise UserError(
                f"config.json has {name}={value}, which is more than any model has",
                fix=f"mend config.json, or write model.overrides.{name}=NUMBER",
            )


def drop_idle_window(hf_config: Mapping[str, Any], seq_len: int) -> Mapping[str, Any]:
    """The same configuration without a sliding window that no sequence of `seq_len` can reach.

    Where the window is as long as the sequence, transformers builds an explicit mask. The mask bars
    the fast attention kernels, although every token still sees all tokens before it.
    """
    window = hf_config.get("sliding_window")
    if hf_config.get("model_type") in ("mistral", "mixtral") and window and window >= seq_len:
        return {**hf_config, "sliding_window": None}
    return hf_config


def _with_floats(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity, so transformers writes `{"__float__": "Infinity"}` for it."""

    def decode(value: dict[str, Any]) -> Any:
        return float(value["__float__"]) if value.keys() == {"__float__"} else value

    decoded: dict[str, Any] = json.loads(json.dumps(hf_config), object_hook=decode)
    return decoded


def _transformers_config(hf_config: Mapping[str, Any], code_dir: str | None) -> Any:
    model_type = str(hf_config.get("model_type", ""))
    # `hf_config` never says which code is run: it may come from a file that others wrote.
    # Quantised files become plain weights, and so does the model that is built or exported.
    unread = (*_CODE, *_DTYPES, QUANTIZATION_FIELD)
    settings = {key: value for key, value in hf_config.items() if key not in unread}
    if code_dir is not None:
        own = AutoConfig.from_pretrained(code_dir, trust_remote_code=True)
        config = type(own).from_dict(settings)
        config.auto_map, config.name_or_path = getattr(own, "auto_map", {}), code_dir
        return config
    if model_type not in CONFIG_MAPPING:
        families = list(CONFIG_MAPPING)
        near = get_close_matches(model_type, families, n=3)
        raise UserError(
            f"model_type {model_type!r} is not a family that transformers knows",
            why=f"transformers {transformers.__version__} knows {len(families)} families; "
            + (f"the nearest names are {', '.join(near)}" if near else "none has such a name"),
            fix="correct model_type in config.json, or update transformers: pip install --upgrade "
            "transformers, or run the model's own code: model.trust_remote_code=true "
            "model.revision=COMMIT_HASH",
        )
    return CONFIG_MAPPING[model_type].from_dict(settings)
