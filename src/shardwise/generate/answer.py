"""Answers to prompts, several at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.data.conversation import Turn
from shardwise.data.records import CorruptRecord
from shardwise.data.tokenizer import TokenIds
from shardwise.errors import UserError
from shardwise.generate.loaded_model import Speaker


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen."""

    max_tokens: int
    temperature: float
    """0 takes the likeliest token each time."""
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model says to a prompt."""

    prompt: str
    text: str
    num_tokens: int
    ended: bool
    """Whether the model has ended the answer itself."""


def answer_all(
    speaker: Speaker, prompts: Sequence[str], how: Sampling, batch: int
) -> Iterator[Answer]:
    """An answer to each prompt, in their order, `batch` of them at a time."""
    torch.manual_seed(how.seed)
    for start in range(0, len(prompts), batch):
        yield from _answer(speaker, prompts[start : start + batch], how)


@torch.inference_mode()
def _answer(speaker: Speaker, prompts: Sequence[str], how: Sampling) -> list[Answer]:
    asked = [_encode(speaker, prompt) for prompt in prompts]
    longest = max(map(len, asked))
    room = _room_after(speaker, longest)
    pad, ends = speaker.tokenizer.eos_id, _end_ids(speaker)
    # Padding stands on the left, so that all answers begin at the same place.
    ids = torch.tensor([[pad] * (longest - len(each)) + each.tolist() for each in asked])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in asked])
    sampled = {"temperature": how.temperature, "top_p": how.top_p} if how.temperature else {}
    device = speaker.model.device
    made: torch.Tensor = speaker.model.generate(  # type: ignore[operator]
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=min(how.max_tokens, room),
        do_sample=bool(how.temperature),
        eos_token_id=ends,
        pad_token_id=pad,
        **sampled,
    )
    rows = made[:, longest:].tolist()
    return [_read(speaker, prompt, row, ends) for prompt, row in zip(prompts, rows, strict=True)]


def _read(speaker: Speaker, prompt: str, row: list[int], ends: list[int]) -> Answer:
    """The tokens before the first that ends the answer."""
    stop = next((index for index, token in enumerate(row) if token in ends), len(row))
    text = speaker.tokenizer.decode(row[:stop])
    return Answer(prompt, text, stop, stop < len(row))


def _encode(speaker: Speaker, prompt: str) -> TokenIds:
    if speaker.template is None:
        ids = speaker.tokenizer.encode(prompt)
    else:
        try:
            text = speaker.template.render([Turn("user", prompt)], opens_answer=True)
        except CorruptRecord as fault:
            raise UserError(
                f"the prompt cannot be rendered: {fault}",
                fix="write --raw to leave the template out",
            ) from fault
        ids, _ = speaker.template.encode(text)
    # A model needs a token to go on from.
    return ids if len(ids) else np.array([speaker.tokenizer.eos_id], dtype=np.int32)


def _end_ids(speaker: Speaker) -> list[int]:
    """The tokens that end an answer: the template's, and the end of a document."""
    own = [] if speaker.template is None else speaker.template.answer_end_ids()
    return sorted({speaker.tokenizer.eos_id, *own})


def _room_after(speaker: Speaker, num_tokens: int) -> int:
    """How many tokens the model has positions for after a prompt."""
    positions = getattr(speaker.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return sys.maxsize
    if num_tokens >= positions:
        raise UserError(
            f"the prompt has {num_tokens} tokens, the model has {positions} positions",
            fix="ask something shorter: `shardwise generate RUN PROMPT`",
        )
    return int(positions) - num_tokens
