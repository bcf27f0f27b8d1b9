"""The sequences to train on and those held out, from a data section."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.config.held_out import held_out_of
from shardwise.config.mixed_datasets import read_datasets
from shardwise.config.schema import DataConfig
from shardwise.data.conversations import StoredConversations, prepare_conversations
from shardwise.data.has_text import of_dataset
from shardwise.data.mixture import MixedSequences
from shardwise.data.pack import prepare_tokens
from shardwise.data.progress import Say, silent
from shardwise.data.sequences import SequenceSet, SyntheticSequences, TokenSequences
from shardwise.data.template import load_chat_template
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.data.tokens import TokenFile
from shardwise.data.windows import ConversationWindows
from shardwise.errors import UserError


@dataclass(frozen=True, slots=True)
class DataSplits:
    """What the train loop reads, and what the record says about it."""

    train: SequenceSet
    eval: SequenceSet | None
    skipped: tuple[str, ...]
    tokenizer_identity: str
    num_documents: int
    """Documents or conversations to train on; 0 where tokens are made up."""
    num_train_tokens: int
    identity: str
    """Which tokens are trained on, wherever they lie: a hash of them, or how they are made."""
    token_digests: dict[str, str]
    """A hash of the tokens of each split; none where they are made up."""
    conversations: StoredConversations | None = None
    """What became of conversations; None where there are none, or several datasets of them."""
    mixed: tuple[MixedSplits, ...] = ()
    """The datasets of a mixture; empty where there is none."""

    @property
    def num_sequences(self) -> int:
        """The training sequences of one pass. A mixture has as many as all its datasets."""
        if self.mixed:
            return sum(len(each.splits.train) for each in self.mixed)
        return len(self.train)


@dataclass(frozen=True, slots=True)
class MixedSplits:
    """One dataset of a mixture."""

    name: str
    share: float
    splits: DataSplits

    def passes(self, num_sequences: float) -> float:
        """How often it is read in a run of so many sequences of all datasets."""
        return num_sequences * self.share / len(self.splits.train)


def build_sequences(  # noqa: PLR0913  (what decides the tokens, and who hears of it)
    config: DataConfig,
    *,
    vocab_size: int,
    model_name: str,
    seed: int,
    cache_root: Path,
    model_revision: str | None = None,
    verify: bool = True,
    say: Say = silent,
) -> DataSplits:
    """Tokenise the source, or find it in the cache, and cut it into sequences.

    Tokens from the cache are hashed, unless another process does that (`verify`).
    """
    if config.source == "synthetic":
        return _synthetic_splits(config, vocab_size, seed)
    tokenizer = load_tokenizer(config.tokenizer, model_name, revision=model_revision)
    validate_vocabulary(tokenizer, vocab_size)
    found = []
    for each in read_datasets(config):
        with of_dataset(each):
            splits = _splits_of(each.data, tokenizer, cache_root, verify, say)
            found.append(MixedSplits(each.name, each.share, splits))
    held_out = None if held_out_of(config) is None else found.pop().splits
    trained = _mix(found, seed, config.shuffle) if config.mixture else found[0].splits
    return trained if held_out is None else _with_held_out(trained, held_out)


def _with_held_out(trained: DataSplits, held_out: DataSplits) -> DataSplits:
    """The training data of one and, as what is held out, that of the other."""
    return replace(
        trained,
        eval=held_out.train,
        skipped=trained.skipped + held_out.skipped,
        token_digests=trained.token_digests | {"eval": held_out.token_digests["train"]},
    )


def _splits_of(
    config: DataConfig, tokenizer: Tokenizer, cache_root: Path, verify: bool, say: Say
) -> DataSplits:
    """The sequences of one dataset."""
    if config.format != "text":
        return _conversation_splits(config, tokenizer, cache_root, verify, say)
    packed = prepare_tokens(config, tokenizer, cache_root, verify=verify, say=say)
    _validate_length(packed.train, config.seq_len)

    def cut(file: TokenFile) -> TokenSequences:
        apart = config.document_mask
        return TokenSequences(file, config.seq_len, tokenizer.eos_id, keeps_documents_apart=apart)

    return DataSplits(
        train=cut(packed.train),
        eval=cut(packed.eval) if packed.eval else None,
        skipped=packed.skipped,
        tokenizer_identity=tokenizer.identity,
        num_documents=packed.train.num_documents,
        num_train_tokens=packed.train.num_tokens,
        identity=f"sha256:{packed.train.sha256}",
        token_digests={
            name: file.sha256
            for name, file in (("train", packed.train), ("eval", packed.eval))
            if file is not None
        },
    )


def _mix(found: list[MixedSplits], seed: int, shuffle: bool) -> DataSplits:
    """All datasets as one. The loss on what is held out is by the same weights."""
    splits, shares = [each.splits for each in found], [each.share for each in found]
    held_out = [each.eval for each in splits if each.eval is not None]
    evaluated = None
    if held_out:
        length = sum(map(len, held_out))
        evaluated = MixedSequences(held_out, shares, seed=0, shuffle=False, length=length)
    identity = json.dumps([[each.share, each.splits.identity] for each in found])
    return DataSplits(
        train=MixedSequences([each.train for each in splits], shares, seed=seed, shuffle=shuffle),
        eval=evaluated,
        skipped=tuple(record for each in splits for record in each.skipped),
        tokenizer_identity=splits[0].tokenizer_identity,
        num_documents=sum(each.num_documents for each in splits),
        num_train_tokens=sum(each.num_train_tokens for each in splits),
        identity=f"mixture:{hashlib.sha256(identity.encode()).hexdigest()}",
        token_digests={
            f"{split} of {each.name}": digest
            for each in found
            for split, digest in each.splits.token_digests.items()
        },
        mixed=tuple(found),
    )


def _conversation_splits(
    config: DataConfig, tokenizer: Tokenizer, cache_root: Path, verify: bool, say: Say
) -> DataSplits:
    template = load_chat_template(tokenizer, config.chat_template)
    stored = prepare_conversations(config, tokenizer, template, cache_root, verify=verify, say=say)
    apart = config.keeps_documents_apart
    windows = {
        name: ConversationWindows(
            stored, split, config.seq_len, tokenizer.eos_id, keeps_documents_apart=apart
        )
        for name, split in stored.splits.items()
    }
    digests = {name: stored.digest(split) for name, split in stored.splits.items()}
    return DataSplits(
        train=windows["train"],
        eval=windows.get("eval"),
        skipped=stored.skipped,
        tokenizer_identity=tokenizer.identity,
        num_documents=stored.train.num_conversations,
        num_train_tokens=stored.train.num_tokens,
        identity=f"sha256:{digests['train']}",
        token_digests=digests,
        conversations=stored,
    )


def _synthetic_splits(config: DataConfig, vocab_size: int, seed: int) -> DataSplits:
    train = SyntheticSequences(vocab_size, config.seq_len, seed)
    # The complement is negative, so no run's training seed is another's evaluation seed.
    held_out = SyntheticSequences(vocab_size, config.seq_len, ~seed)
    return DataSplits(
        train=train,
        eval=held_out if config.eval_fraction > 0 else None,
        skipped=(),
        tokenizer_identity="none",
        num_documents=0,
        num_train_tokens=len(train) * config.seq_len,
        identity=f"synthetic:{vocab_size}",
        token_digests={},
    )


def validate_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise where the tokenizer has tokens that the model has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.identity} has {tokenizer.vocab_size} tokens, "
            f"the model only {vocab_size}",
            why="ids beyond the embedding cannot be looked up",
            fix="choose the model's own tokenizer: data.tokenizer=DIR, or train from random "
            f"weights: model.weights=random model.overrides.vocab_size={tokenizer.vocab_size}",
        )


def _validate_length(file: TokenFile, seq_len: int) -> None:
    if file.num_tokens <= seq_len:
        raise UserError(
            f"the training data has {file.num_tokens} tokens, which is not one full sequence",
            why=f"data.seq_len={seq_len} needs {seq_len + 1} tokens: the last one is only a label",
            fix=_shorter(file.num_tokens),
        )


def _shorter(num_tokens: int) -> str:
    longest = num_tokens - 1
    return (
        f"write data.seq_len={longest} or less, or give more text"
        if longest > 1
        else ("give more text: data.path=FILES")
    )
