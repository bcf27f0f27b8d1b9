"""A tokenizer's chat template: conversations to text, and the text to tokens with their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.conversation import Turn
from shardwise.data.records import CorruptRecord
from shardwise.data.tokenizer import HubTokenizer, TokenIds, Tokenizer
from shardwise.errors import UserError, brief
from shardwise.files import read_bytes, user_path
from shardwise.units import MIB

_MAX_TEMPLATE_BYTES = MIB
# Besides jinja2's own: what expressions of a template raise for values that they do not expect.
_FAULTS_OF_ROWS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """Renders with the tokenizer's own template, or with `source` in its place."""

    def __init__(self, tokenizer: HubTokenizer, source: str | None = None) -> None:
        self._backend = tokenizer.backend
        self._source = source

    def render(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens_answer: bool = False,
    ) -> str:
        """The text of the turns; with `opens_answer`, up to where the assistant would begin."""
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            # In a batch of one, because transformers takes no conversation without turns alone.
            texts = self._backend.apply_chat_template(
                [[turn.message() for turn in turns]],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._source,
                add_generation_prompt=opens_answer,
                tokenize=False,
            )
        except TemplateSyntaxError as error:
            raise _unreadable("the chat template", f"line {error.lineno}: {error}") from error
        except (TemplateError, *_FAULTS_OF_ROWS) as error:
            raise CorruptRecord("the chat template refuses it", brief(error)) from error
        return str(texts[0])

    def encode(self, text: str) -> tuple[TokenIds, NDArray[np.int64]]:
        """The ids of rendered text, and the first and last + 1 character of each."""
        encoded = self._backend(
            text,
            add_special_tokens=False,  # the template has written them
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        places = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], dtype=np.int32), places

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text with its special tokens, for people to read."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))


def load_chat_template(tokenizer: Tokenizer, path: str | None) -> ChatTemplate:
    """The template of `data.chat_template`, or that of the tokenizer."""
    if not isinstance(tokenizer, HubTokenizer):
        raise UserError(
            "bytes have no chat template",
            why="conversations are rendered by the template of a tokenizer, with its special "
            "tokens",
            fix="write data.tokenizer=DIR with tokenizer.json (or a hub id)",
        )
    if not tokenizer.backend.is_fast:
        raise UserError(
            f"tokenizer {tokenizer.identity} does not say which characters a token stands for",
            why="it has no tokenizer.json, and the mask is made from these places",
            fix="write data.tokenizer=DIR with tokenizer.json (or a hub id)",
        )
    if path is None and not tokenizer.backend.chat_template:
        raise UserError(
            f"tokenizer {tokenizer.identity} has no chat template",
            why="base models come without one",
            fix="write data.chat_template=FILE with a Jinja template, or data.tokenizer=DIR of "
            "the model's chat version",
        )
    return ChatTemplate(tokenizer, None if path is None else _read_template(path))


def _read_template(path: str) -> str:
    try:
        return read_bytes(user_path(path), _MAX_TEMPLATE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(f"data.chat_template {path}", "it is not UTF-8") from error
    except OSError as error:
        raise _unreadable(f"data.chat_template {path}", error.strerror or str(error)) from error


def _unreadable(what: str, why: str) -> UserError:
    return UserError(
        f"{what} cannot be read", why=why, fix="write data.chat_template=FILE with a Jinja template"
    )
