"""The files beside the weights in a Hugging Face directory: configurations, tokenizer, code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.errors import printable
from shardwise.files import user_path
from shardwise.plan.planned import Plan

_TEMPLATE = "chat_template.jinja"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
    *(_TEMPLATE, "chat_template.json"),
)


def write_configs(model: PreTrainedModel, plan: Plan, dtype: torch.dtype, directory: Path) -> None:
    """config.json and generation_config.json."""
    config: Any = model.config
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    config.use_cache = plan.hf_config.get("use_cache", True)
    config.save_pretrained(directory)
    source = Path(plan.model_dir) if plan.model_dir else None
    if source and (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", directory / "generation_config.json")
    elif model.can_generate():
        generation: Any = model.generation_config
        generation.use_cache = config.use_cache
        generation.save_pretrained(directory)


def copy_code(source: Path, directory: Path) -> None:
    """Copy the model's own code from the directory that the exporting user trusts."""
    for file in source.glob("*.py"):
        shutil.copyfile(file, directory / file.name)


def copy_tokenizer(plan: Plan, directory: Path) -> list[str]:
    """Copy the tokenizer that the model was trained with, and return notes for the user."""
    name = plan.settings.data.tokenizer
    # Made-up tokens have no tokenizer, and the model's own lies beside it.
    is_own = name in (plan.settings.model.name, "auto", "none")
    source = plan.model_dir if is_own else name
    folder = user_path(source) if source else None
    found = [folder / file for file in _TOKENIZER_FILES] if folder and name != "byte" else []
    found = [file for file in found if file.is_file()]
    for file in found:
        shutil.copyfile(file, directory / file.name)
    if found:
        note = f"tokenizer: {len(found)} files from {printable(str(folder))}"
        return [note, *_copy_template(plan, directory)]
    if name == "byte" or is_own:
        return ["no tokenizer files: the model was trained on bytes"]
    return [f"no tokenizer files: {name} is not a directory; add them with save_pretrained"]


def _copy_template(plan: Plan, directory: Path) -> list[str]:
    """Copy the chat template that the model was trained with, in place of the tokenizer's own."""
    name = plan.settings.data.chat_template
    if name is None:
        return []
    if not user_path(name).is_file():
        return [f"no chat template: {printable(name)} is not there; add it as {_TEMPLATE}"]
    shutil.copyfile(user_path(name), directory / _TEMPLATE)
    return [f"chat template: {printable(name)}"]
