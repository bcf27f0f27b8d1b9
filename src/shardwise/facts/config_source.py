"""Where a model's config.json comes from: a preset, a directory or the hub."""

from __future__ import annotations

import copy
import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.config.schema import ModelConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.presets import PRESETS
from shardwise.files import read_json, user_path

# Names of weight files in any format. If such a file cannot be read, that is an error, and weights
# are never random instead.
_WEIGHT_PATTERNS = (
    *("*.safetensors", "pytorch_model*.bin", "pytorch_model_fsdp_*", "*.distcp", ".metadata"),
    # DeepSpeed's, of which one may name the directory that holds them or the one above it.
    *("*mp_rank_00_model_states.pt", "*/*mp_rank_00_model_states.pt"),
)
# Index files by format. The first format that is there is read.
_INDEXES = {
    "model.safetensors.index.json": "*.safetensors",
    "pytorch_model.bin.index.json": "pytorch_model*.bin",
}
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")

# Endings of hub ids whose weights have the shape of the model before them.
_TUNED = re.compile(r"-(instruct|base|chat|it|pt|hf|v\d[\d.]*|\d{4})$")
# Files are a few kilobytes; some list a thousand labels.
_MAX_CONFIG_BYTES = 16 * 2**20

# Fields that files leave out when they equal the family's default, and that may be overridden.
_WELL_KNOWN = frozenset(
    {
        "attention_dropout",
        "head_dim",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "is_decoder",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_cache",
        "vocab_size",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)
# GPT-2 has its own field names; its config.json must not get two names for one number.
_GPT2_WORDS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "attention_dropout": "attn_pdrop",
}
_NOT_IN_GPT2 = frozenset(
    {
        "head_dim",
        "is_decoder",
        "num_key_value_heads",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's configuration with overrides applied, and where its files are."""

    name: str
    hf_config: dict[str, Any]
    directory: Path | None
    """The local directory, or the hub's snapshot in the cache; None for presets. A snapshot may
    hold nothing but config.json until its weights are fetched."""

    kind: Literal["preset", "directory", "hub"]
    weights_from: Path | None = None
    """The directory or file of weights that the user named; else they are in `directory`."""

    @property
    def weights(self) -> Path | None:
        """Where the first weights lie; None if there are none now."""
        place = self.weights_from or self.directory
        return place if place is not None and _holds_weights(place) else None

    @property
    def has_all_weights(self) -> bool:
        """Whether there are weights and no file of them is missing, as after an interrupted
        download."""
        return self.weights is not None and not _any_missing(self.weights)


def read_model_config(config: ModelConfig) -> ModelSource:
    """Find the model that the configuration names and read its config.json."""
    directory: Path | None = None
    kind: Literal["preset", "directory", "hub"]
    if config.name in PRESETS:
        kind, hf_config = "preset", copy.deepcopy(PRESETS[config.name])
    elif (path := user_path(config.name)).is_dir():
        kind, directory, hf_config = "directory", path, _read_json(path / "config.json")
    elif _HUB_ID.fullmatch(config.name):
        file = _download_config(config.name, config.revision)
        kind, directory, hf_config = "hub", file.parent, _read_json(file)
    else:
        raise UserError(
            f"unknown model {config.name!r}",
            why="it is no preset, no directory and no hub id (ORG/NAME)",
            fix=_advice(config.name),
        )
    return ModelSource(
        name=config.name,
        hf_config=apply_overrides(hf_config, config.overrides),
        directory=directory,
        kind=kind,
        weights_from=_named_weights(config.weights_from),
    )


def preset_named(name: str) -> str | None:
    """The preset of the shape that a name means: the preset's own, or the hub id of that model or
    of its tuned forms. For plans that read no weights."""
    last = name.rstrip("/").split("/")[-1].lower().removeprefix("meta-")
    while last not in PRESETS and (bare := _TUNED.sub("", last)) != last:
        last = bare
    return last if last in PRESETS else None


def _named_weights(name: str | None) -> Path | None:
    if name is None:
        return None
    place = user_path(name)
    if not _holds_weights(place):
        raise UserError(
            f"there are no weights in model.weights_from={name}",
            why="nothing there looks like safetensors, pytorch_model*.bin, DCP's .metadata or "
            "DeepSpeed's model states"
            if place.exists()
            else "there is no such file or directory",
            fix="name what save_pretrained, Accelerate, DeepSpeed or DCP wrote: "
            "model.weights_from=DIR, or "
            "leave model.weights_from out",
        )
    return place


def _holds_weights(place: Path) -> bool:
    return place.is_file() or any(True for pattern in _WEIGHT_PATTERNS for _ in place.glob(pattern))


def _any_missing(place: Path) -> bool:
    for index, pattern in _INDEXES.items():
        if any(True for _ in place.glob(pattern)):
            return not all((place / name).is_file() for name in _listed_in(place / index))
    return False


def _listed_in(index: Path) -> set[str]:
    """The files that an index lists. A fault in it is reported where weights are read."""
    try:
        names = read_json(index)["weight_map"].values()
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return set()
    return {str(name) for name in names}


def apply_overrides(hf_config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A copy with these fields changed. A field that the model would not read is an error."""
    changed = copy.deepcopy(hf_config)
    gpt2 = hf_config.get("model_type") == "gpt2"
    known = hf_config.keys() | (_WELL_KNOWN - _NOT_IN_GPT2 if gpt2 else _WELL_KNOWN)
    for key, value in overrides.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(
                f"model.overrides.{key} is no field of this model's config.json",
                why=f"a {hf_config.get('model_type', 'model')} would ignore it",
                fix=f"did you mean model.overrides.{near[0]}={json.dumps(value)}?"
                if near
                else f"leave it out; the fields are {', '.join(sorted(known))}",
            )
        if key == "rope_theta" and isinstance(changed.get("rope_parameters"), dict):
            # Files that transformers 5 wrote keep it here, where it takes precedence.
            changed["rope_parameters"]["rope_theta"] = value
        else:
            changed[_GPT2_WORDS.get(key, key) if gpt2 else key] = value
    return changed


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file, _MAX_CONFIG_BYTES)
    except FileNotFoundError as error:
        raise UserError(
            f"there is no {file}",
            why="a model directory holds config.json, as save_pretrained writes it",
            fix="write model.name=DIR with the directory that has it",
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {file}: {error}", fix="fetch or save the file anew"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UserError(
            f"{file} names no model_type",
            why="transformers needs it to choose the model class",
            fix='add the family of the model, such as "model_type": "llama"',
        )
    return content


def _download_config(repo: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        return Path(hf_hub_download(repo, "config.json", revision=revision))
    # OSError covers the network, missing and gated repositories and offline mode.
    except (OSError, EntryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"cannot fetch config.json of {repo!r} from the hub",
            why=str(error).strip().split("\n")[0],
            fix="log in with `hf auth login`, or write model.name=DIR of a local copy; "
            f"{_advice(repo)}",
            code=ExitCode.ENVIRONMENT,
        ) from error


def _advice(name: str) -> str:
    last_part = name.rstrip("/").split("/")[-1].lower()
    near = difflib.get_close_matches(last_part, PRESETS, n=3, cutoff=0.5)
    if near:
        return f"did you mean the preset {' or '.join(f'model.name={name}' for name in near)}?"
    return f"write model.name=DIR, or one of the presets: {', '.join(PRESETS)}"
