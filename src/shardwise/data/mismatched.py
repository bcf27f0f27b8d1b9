"""Prompts with answers to other prompts of the same sequence, which KTO compares with.

Documents of a sequence exchange their answers, so the exchanged ones fill the same number of
tokens, and depend neither on ranks nor on accumulation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.data.compared import Compared
from shardwise.data.documents import place_documents
from shardwise.data.loader import MicroBatch
from shardwise.data.sequences import IGNORE_INDEX

Tokens = NDArray[np.int64]


class _Side(NamedTuple):
    """Part of a document: its tokens, and the labels that belong to it."""

    inputs: Tokens
    labels: Tokens


class _Document(NamedTuple):
    prompt: _Side
    answer: _Side
    """The label of the prompt's last token is the first of the answer's."""


def exchange_answers(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with exchanged answers.

    Only documents whose answer comes from another prompt are compared: none where a sequence holds
    one prompt, and not all where one prompt has more than half of its documents.
    """
    found = batch.compared
    if found is None or batch.documents is None:
        raise ValueError("this micro-batch has no documents that share sequences")
    ends = np.cumsum(found.lengths.numpy())
    firsts = ends - found.lengths.numpy()
    inputs, labels = (side.numpy().reshape(-1).copy() for side in (batch.inputs, batch.labels))
    lengths, is_other = found.lengths.numpy().copy(), np.zeros(len(found), dtype=np.bool_)
    rows = firsts[found.places.numpy()] // batch.inputs.shape[1]
    for row in np.unique(rows):
        mine = np.flatnonzero(rows == row)
        places = found.places.numpy()[mine]
        documents = [_cut(inputs, labels, firsts[at], ends[at]) for at in places]
        partners = _partners([each.prompt.inputs.tobytes() for each in documents])
        begin = int(firsts[places[0]])
        made = [(documents[at].prompt, documents[its].answer) for at, its in partners]
        sides = [side for both in made for side in both]
        end = begin + sum(len(side.inputs) for side in sides)
        inputs[begin:end] = np.concatenate([side.inputs for side in sides])
        labels[begin:end] = np.concatenate([side.labels for side in sides])
        lengths[places] = [sum(len(side.inputs) for side in both) for both in made]
        prompts = [each.prompt.inputs for each in documents]
        is_other[mine] = [not np.array_equal(prompts[at], prompts[its]) for at, its in partners]
    return _batch_of(batch, found, inputs, labels, lengths, is_other)


def _cut(inputs: Tokens, labels: Tokens, first: int, end: int) -> _Document:
    """A document at its first token that is trained on."""
    before = first + int(np.argmax(labels[first:end] != IGNORE_INDEX))
    return _Document(
        _Side(inputs[first : before + 1].copy(), labels[first:before].copy()),
        _Side(inputs[before + 1 : end].copy(), labels[before:end].copy()),
    )


def _partners(prompts: list[bytes]) -> list[tuple[int, int]]:
    """(document, the document whose answer it gets), in the order of documents.

    Sorted by prompt and moved on by the size of the largest group, all get an answer to another
    prompt, where no group is more than half.
    """
    order = sorted(range(len(prompts)), key=lambda at: prompts[at])
    by = max(Counter(prompts).values())
    return sorted((at, order[(place + by) % len(order)]) for place, at in enumerate(order))


def _batch_of(
    batch: MicroBatch,
    found: Compared,
    inputs: Tokens,
    labels: Tokens,
    lengths: Tokens,
    is_other: NDArray[np.bool_],
) -> MicroBatch:
    """The micro-batch of these tokens, in which the chosen documents are compared."""
    shape, kept = batch.inputs.shape, torch.from_numpy(is_other)
    firsts = np.cumsum(lengths) - lengths
    num_tokens = np.add.reduceat((labels != IGNORE_INDEX).astype(np.int64), firsts)
    places = found.places[kept]
    starts = [firsts[firsts // shape[1] == row] - row * shape[1] for row in range(shape[0])]
    return replace(
        batch,
        inputs=torch.from_numpy(inputs.reshape(shape)),
        labels=torch.from_numpy(labels.reshape(shape)),
        documents=place_documents(starts, shape[1]),
        compared=Compared(
            torch.from_numpy(lengths),
            places,
            found.numbers[kept],
            found.preferred[kept],
            torch.from_numpy(num_tokens[places.numpy()].astype(np.float32)),
        ),
    )
