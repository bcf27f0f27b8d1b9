"""A tokenizer's chat template: conversations to text, and the text to tokens with their places."""

from __future__ import annotations

import hashlib
import json
import re
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
# An answer that no template writes by itself.
_UNUSUAL = "8f1e0c answer"
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Besides jinja2's own: what expressions of a template raise for values that they do not expect.
_FAULTS_OF_ROWS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """Renders with the tokenizer's own template, or with `source` in its place."""

    def __init__(self, tokenizer: HubTokenizer, source: str | None = None) -> None:
        self._backend = tokenizer.backend
        self._source = source
        self.identity = _content_hash(tokenizer.backend, source)
        """The hash of all that decides the text of a conversation, besides the conversation."""

    def render(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens_answer: bool = False,
    ) -> str:
        """The text of the turns; with `opens_answer`, up to where the assistant would begin."""
        return self._render(turns, tools, add_generation_prompt=opens_answer)[0]

    def render_marked(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the turns, and the places of the answers that the template marks."""
        return self._render(turns, tools, return_assistant_tokens_mask=True)

    def marks_answers(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template says itself what the assistant writes, with `{% generation %}`."""
        source: str = self._backend.get_chat_template(self._source, list(tools) or None)
        return _MARK.search(source) is not None

    def _render(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], **wanted: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        given: Any = [dict(tool) for tool in tools] or None
        names: dict[str, Any] = {**self._backend.special_tokens_map, **wanted}
        try:
            template = self._backend.get_chat_template(self._source, given)
            messages = [turn.message() for turn in turns]
            rendered: Any = render_jinja_template([messages], given, None, template, **names)
        except TemplateSyntaxError as error:
            raise _unreadable("the chat template", f"line {error.lineno}: {error}") from error
        except (TemplateError, *_FAULTS_OF_ROWS) as error:
            raise CorruptRecord("the chat template refuses it", brief(error)) from error
        (text,), places = rendered
        return text, places[0] if places else []

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

    def answer_end_ids(self) -> list[int]:
        """The special token that the template writes after an answer, if it writes one."""
        text = self.render([Turn("user", "?"), Turn("assistant", _UNUSUAL)])
        ids, _ = self.encode(text.rpartition(_UNUSUAL)[2])
        return [int(i) for i in ids if int(i) in self._backend.added_tokens_decoder][:1]

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


def _content_hash(backend: Any, source: str | None) -> str:
    """A template may write any special token, which are not in the backend's own content."""
    template = source if source is not None else backend.chat_template
    content = json.dumps([template, backend.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


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
