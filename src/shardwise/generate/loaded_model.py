"""A model with its tokenizer, from a checkpoint or from an exported directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.checkpoint.exporter import Exporter
from shardwise.checkpoint.read import VerifiedCheckpoint, find_checkpoint, verify_checkpoint
from shardwise.data.template import ChatTemplate, load_chat_template
from shardwise.data.tokenizer import HubTokenizer, Tokenizer, load_tokenizer
from shardwise.errors import UserError, brief
from shardwise.generate.adapted import load_adapted
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
    base: Path | None = None,
) -> Speaker:
    """The model of a run's checkpoint, or of a directory that `export` or `save_pretrained` made.

    `code_dir` holds the code of a model that has its own, which the user trusts. `base` holds the
    weights under adapters, where they were moved.
    """
    if (place / "config.json").is_file():
        if step is not None or best:
            asked = "--best" if best else f"--step {step}"
            raise UserError(
                f"{place} is one model, and {asked} was asked for",
                fix=f"leave {asked.split()[0]} out, or name a run directory (runs/NAME)",
            )
        _refuse_base(base, place)
        return _load_directory(place, raw=raw, device=device)
    model: Any
    checkpoint = verify_checkpoint(find_checkpoint(place, step, best=best))
    tokenizer, template = _read_tokenizer(checkpoint, raw=raw)
    # A CPU has no use for narrow formats, and masters are in fp32.
    wanted = DTYPES[checkpoint.plan.decided.param_dtype if device.type == "cuda" else "fp32"]
    if checkpoint.plan.decided.adapter != "none":
        model = load_adapted(checkpoint, wanted, device, base=base, code_dir=code_dir)
    else:
        _refuse_base(base, checkpoint.path)
        model = _load_whole(Exporter(checkpoint, wanted, lambda num_bytes: None, code_dir))
    return Speaker(model.to(device).eval(), tokenizer, template)


def _refuse_base(base: Path | None, place: Path) -> None:
    if base is not None:
        raise UserError(
            f"--base {base} is for checkpoints of adapters",
            why=f"{place} holds a whole model",
            fix="leave --base out",
        )


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


def _load_whole(exporter: Exporter) -> Any:
    """The weights as an export would write them."""
    return type(exporter.model).from_pretrained(
        None,
        config=exporter.model.config,
        state_dict=exporter.read(),
        dtype=exporter.main_dtype,
    )


def _read_tokenizer(
    checkpoint: VerifiedCheckpoint, *, raw: bool
) -> tuple[Tokenizer, ChatTemplate | None]:
    data, model = checkpoint.plan.settings.data, checkpoint.plan.settings.model
    if data.tokenizer == "none":
        raise UserError(
            f"the model of {checkpoint.path} was trained on made-up tokens, which are no text",
            fix="name a run that was trained on text: `shardwise generate RUN PROMPT`",
        )
    tokenizer = load_tokenizer(data.tokenizer, model.name, revision=model.revision)
    chats = data.format != "text" and not raw
    return tokenizer, load_chat_template(tokenizer, data.chat_template) if chats else None
