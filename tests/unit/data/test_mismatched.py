"""Answers that are exchanged between the prompts of a sequence, as KTO's KL term wants them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwise.data.loader import MicroBatch, eval_batches
from shardwise.data.mismatched import exchange_answers
from shardwise.data.sequences import IGNORE_INDEX, PADDING, ComparedRow, Sequence

SEQ_LEN = 24
# (prompt, answer) of each document of a sequence. No token is twice.
Said = tuple[list[int], list[int]]
THREE: list[Said] = [([1, 2, 3], [10, 11]), ([4], [12, 13, 14, 15]), ([5, 6], [16])]


class Rows:
    """Sequences of these documents, whose numbers go on from one sequence to the next."""

    seq_len = SEQ_LEN

    def __init__(self, *rows: list[Said]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int) -> Sequence:
        before = sum(map(len, self.rows[:index]))
        inputs = np.zeros(SEQ_LEN, dtype=np.int64)
        labels = np.full(SEQ_LEN, IGNORE_INDEX, dtype=np.int64)
        starts, at = [], 0
        for prompt, answer in self.rows[index]:
            starts.append(at)
            tokens = [*prompt, *answer]
            inputs[at : at + len(tokens)] = tokens
            labels[at + len(prompt) - 1 : at + len(tokens) - 1] = answer
            at += len(tokens)
        numbers = [before + number for number in range(len(starts))]
        compared = ComparedRow(
            np.array([*numbers, PADDING]), np.array([*(n % 2 == 0 for n in numbers), False])
        )
        return Sequence(inputs, labels, np.array([*starts, at]), compared)


def batch_of(*rows: list[Said]) -> MicroBatch:
    (batch,) = eval_batches(
        Rows(*rows), num_sequences=9, micro_batch=len(rows) + 1, rank=0, num_ranks=1
    )
    return batch


def documents(batch: MicroBatch) -> dict[int, tuple[list[int], list[int]]]:
    """(all tokens, those that are trained on) of each compared document, by its number."""
    found = batch.compared
    assert found is not None
    ends = found.lengths.cumsum(0)
    inputs, labels = batch.inputs.flatten(), batch.labels.flatten()
    told = {}
    for number, place, count in zip(found.numbers, found.places, found.num_tokens, strict=True):
        part = slice(int(ends[place] - found.lengths[place]), int(ends[place]))
        trained = labels[part][labels[part] != IGNORE_INDEX].tolist()
        assert len(trained) == count
        told[int(number)] = (inputs[part].tolist(), trained)
    return told


def test_each_prompt_gets_the_answer_of_another_in_the_same_sequence() -> None:
    two: list[Said] = [([7], [20, 21]), ([8, 9], [22])]
    batch = batch_of(THREE, two)
    before = [tensor.clone() for tensor in (batch.inputs, batch.labels)]
    told = documents(exchange_answers(batch))
    assert told == {
        0: ([1, 2, 3, 12, 13, 14, 15], [12, 13, 14, 15]),
        1: ([4, 16], [16]),
        2: ([5, 6, 10, 11], [10, 11]),
        3: ([7, 22], [22]),
        4: ([8, 9, 20, 21], [20, 21]),
    }
    assert torch.equal(batch.inputs, before[0]) and torch.equal(batch.labels, before[1])


def test_positions_and_lengths_are_those_of_the_exchanged_documents() -> None:
    batch = exchange_answers(batch_of(THREE))
    assert batch.documents is not None and batch.compared is not None
    assert batch.documents.starts[:4].tolist() == [0, 7, 9, 13]
    assert batch.documents.positions[0].tolist()[:13] == [*range(7), 0, 1, *range(4)]
    assert batch.compared.lengths.tolist() == [7, 2, 4, SEQ_LEN - 13, SEQ_LEN]


def test_two_answers_to_one_prompt_are_not_exchanged() -> None:
    pairs: list[Said] = [([1], [10]), ([1], [11, 12]), ([2], [13]), ([2], [14])]
    told = documents(exchange_answers(batch_of(pairs)))
    assert {number: tokens[0] for number, (tokens, _) in told.items()} == {0: 1, 1: 1, 2: 2, 3: 2}
    assert {trained[0] for number, (_, trained) in told.items() if number < 2} == {13, 14}
    # Of three prompts that are the same, one can be answered by another's answer.
    told = documents(
        exchange_answers(batch_of([([1], [10]), ([1], [11]), ([1], [12]), ([2], [13])]))
    )
    assert all((tokens[0] == 1) == (trained == [13]) for tokens, trained in told.values())
    assert len(told) == 2


@pytest.mark.parametrize("row", [[([1, 2], [10])], [([1], [10]), ([1], [11])]])
def test_a_sequence_with_one_prompt_has_no_other_answer(row: list[Said]) -> None:
    batch = batch_of(row)
    exchanged = exchange_answers(batch)
    assert documents(exchanged) == {}
    assert sorted(exchanged.inputs[0].tolist()) == sorted(batch.inputs[0].tolist())
