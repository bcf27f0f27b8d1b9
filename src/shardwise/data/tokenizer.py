"""Text to token ids and back: bytes without any file, or a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import UserError, brief
from shardwise.facts.tokenizer_files import has_own_tokenizer, validate_tokenizer_files
from shardwise.files import user_path

TokenIds = NDArray[np.int32]

# Sixty times the largest vocabulary of today.
_MOST_IDS = 2**24


class Tokenizer(Protocol):
    """What the data room needs of a tokenizer."""

    @property
    def identity(self) -> str:
        """Names the tokenizer and its content: two that encode alike share cached tokens."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` can give."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> TokenIds:
        """The ids of one text, without special tokens around it."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of several texts, which some tokenizers encode faster together."""

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text of ids, for people to read."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    identity = "byte"
    eos_id = 256
    vocab_size = 257

    def encode(self, text: str) -> TokenIds:
        """One id for each byte."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Each text by itself: there is nothing to gain from a batch."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text; ends of documents are left out and cut characters are marked."""
        return bytes(int(i) for i in ids if i != self.eos_id).decode(errors="replace")


class HubTokenizer:
    """A transformers tokenizer, read from a directory or the hub."""

    def __init__(self, name: str, backend: Any) -> None:
        self.backend = backend
        vocab: dict[str, int] = backend.get_vocab()
        # Ids may have holes, so that the number of tokens can be less than the largest id.
        self.vocab_size = max(vocab.values(), default=-1) + 1
        _validate_size(name, self.vocab_size)
        self.eos_id = _eos_id(name, backend)
        self.identity = f"{Path(name).name}@{_content_hash(backend, vocab)}"

    def encode(self, text: str) -> TokenIds:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of several texts, in parallel where the tokenizer is a fast one."""
        # Not verbose: documents longer than the model's context are cut later, by packing.
        encoded = self.backend(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text, special tokens left out."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))


def load_tokenizer(name: str, model_name: str, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of `data.tokenizer`. `auto` is the model's own, of `revision`."""
    if name == "auto":
        return _load_model_tokenizer(model_name, revision)
    if name == "byte":
        return ByteTokenizer()
    return _load_hub_tokenizer(name, revision if name == model_name else None)


def _load_model_tokenizer(model_name: str, revision: str | None) -> Tokenizer:
    own = has_own_tokenizer(model_name)
    return _load_hub_tokenizer(model_name, revision) if own else ByteTokenizer()


def _load_hub_tokenizer(name: str, revision: str | None) -> HubTokenizer:
    # transformers takes seconds to import, which users of bytes need not wait for.
    from transformers import AutoTokenizer

    path = user_path(name)
    location = str(path) if path.is_dir() else name
    try:
        if path.is_dir():
            validate_tokenizer_files(path)
        backend = AutoTokenizer.from_pretrained(
            location, revision=revision, trust_remote_code=False
        )
        tokenizer = HubTokenizer(location, backend)
        # Some faults of its files show only when it is used.
        tokenizer.encode("text")
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"tokenizer {name!r} cannot be loaded",
            why=brief(error),
            fix="write data.tokenizer=DIR with tokenizer.json (or a hub id that this machine can "
            "reach), or data.tokenizer=byte",
        ) from error
    return tokenizer


def _validate_size(name: str, vocab_size: int) -> None:
    """Raise for an absurd id: the library fills a table up to the largest id, which would take
    gigabytes."""
    if vocab_size > _MOST_IDS:
        raise UserError(
            f"tokenizer {name!r} has a token with the id {vocab_size - 1}",
            why=f"no embedding has more than {_MOST_IDS} rows",
            fix="fetch its tokenizer.json again, or choose another: data.tokenizer=DIR",
        )


def _eos_id(name: str, backend: Any) -> int:
    if backend.eos_token_id is None:
        raise UserError(
            f"tokenizer {name!r} has no end-of-sequence token",
            why="it separates packed documents",
            fix="add an eos_token to its tokenizer_config.json, or choose another: "
            "data.tokenizer=DIR",
        )
    return int(backend.eos_token_id)


def _content_hash(backend: Any, vocab: dict[str, int]) -> str:
    """A hash of what decides the ids, so that a tokenizer changed in place is another one."""
    if backend.is_fast:
        content = backend.backend_tokenizer.to_str()
    else:
        content = json.dumps([type(backend).__name__, sorted(vocab.items())])
    # The end-of-sequence token is transformers' own setting and not in the backend's content.
    return hashlib.sha256(f"{backend.eos_token_id}\n{content}".encode()).hexdigest()[:16]
