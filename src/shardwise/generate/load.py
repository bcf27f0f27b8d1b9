"""A model with its tokenizer, from a checkpoint or from an exported directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.checkpoint.exporter import Exporter
from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.data.template import ChatTemplate, load_chat_template
from shardwise.data.tokenizer import HubTokenizer, Tokenizer, load_tokenizer
from shardwise.errors import UserError, brief
from shardwise.parallel.precision import DTYPES


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who answers."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """What prompts are rendered with; None for a model that goes on with them as they are."""


def load_speaker(
    place: Path,
    step: int | None,
    *,
    best: bool = False,
    raw: bool,
    device: torch.device,
    code_dir: Path | None = None,
) -> Speaker:
    """The model of a run's checkpoint, or of a directory that `export` or `save_pretrained` made.

    `code_dir` holds the code of a model that has its own, which the user trusts.
    """
    if (place / "config.json").is_file():
        if step is not None or best:
            asked = "--best" if best else f"--step {step}"
            raise UserError(
                f"{place} is one model, and {asked} was asked for",
                fix=f"leave {asked.split()[0]} out, or name a run directory (runs/NAME)",
            )
        return _load_directory(place, raw=raw, device=device)
    exporter = _open_checkpoint(find_checkpoint(place, step, best=best), device, code_dir)
    return _load_checkpoint(exporter, raw=raw, device=device)


def _load_directory(place: Path, *, raw: bool, device: torch.device) -> Speaker:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"no model can be read from {place}",
            why=brief(error),
            fix="name a run directory, or one that `shardwise export` made",
        ) from error
    tokenizer = load_tokenizer("auto", str(place))
    has_template = isinstance(tokenizer, HubTokenizer) and tokenizer.backend.chat_template
    template = load_chat_template(tokenizer, None) if has_template and not raw else None
    return Speaker(loaded.to(device).eval(), tokenizer, template)


def _open_checkpoint(path: Path, device: torch.device, code_dir: Path | None) -> Exporter:
    """The weights as an export would write them."""
    checkpoint = verify_checkpoint(path)
    if checkpoint.plan.decided.adapter != "none":
        raise UserError(
            f"{path} holds adapters without the weights that they belong to",
            fix=f"merge them: `shardwise export {path} --to DIR --merge`, and name that directory",
        )
    # A CPU has no use for narrow formats, and masters are in fp32.
    wanted = checkpoint.plan.decided.param_dtype if device.type == "cuda" else "fp32"
    return Exporter(checkpoint, DTYPES[wanted], lambda num_bytes: None, code_dir)


def _load_checkpoint(exporter: Exporter, *, raw: bool, device: torch.device) -> Speaker:
    settings = exporter.checkpoint.plan.settings
    data, model = settings.data, settings.model
    loaded: Any = type(exporter.model).from_pretrained(
        None,
        config=exporter.model.config,
        state_dict=exporter.read(),
        dtype=exporter.main_dtype,
    )
    if data.tokenizer == "none":
        raise UserError(
            f"the model of {exporter.checkpoint.path} was trained on made-up tokens, which are no "
            "text",
            fix="name a run that was trained on text: `shardwise generate RUN PROMPT`",
        )
    tokenizer = load_tokenizer(data.tokenizer, model.name, revision=model.revision)
    chats = data.format != "text" and not raw
    template = load_chat_template(tokenizer, data.chat_template) if chats else None
    return Speaker(loaded.to(device).eval(), tokenizer, template)
