from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardwise.data.loader import BatchLoader, MicroBatch, eval_batches
from shardwise.data.sequences import IGNORE_INDEX


def rows(batches: list[MicroBatch]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch.inputs]


def global_batch(sequences: Any, step: int, num_ranks: int, accumulation: int) -> list[int]:
    found: list[int] = []
    for rank in range(num_ranks):
        loader = BatchLoader(
            sequences,
            seed=7,
            shuffle=True,
            global_batch=16,
            micro_batch=16 // num_ranks // accumulation,
            accumulation=accumulation,
            rank=rank,
            num_ranks=num_ranks,
        )
        batches = loader.step_batches(step)
        assert len(batches) == accumulation
        found += rows(batches)
    return found


def test_global_batches_do_not_depend_on_ranks_or_accumulation(counting_sequences: Any) -> None:
    sequences = counting_sequences(50)
    for step in (0, 1, 5, 1000):
        alone = global_batch(sequences, step, num_ranks=1, accumulation=1)
        for num_ranks in (1, 2, 4):
            for accumulation in (1, 2, 4):
                assert global_batch(sequences, step, num_ranks, accumulation) == alone


def test_steps_read_an_epoch_without_loss_or_repeat(counting_sequences: Any) -> None:
    sequences = counting_sequences(48)
    read = [index for step in range(3) for index in global_batch(sequences, step, 2, 2)]
    assert sorted(read) == list(range(48))


def test_micro_batches_have_their_shape_and_count_valid_tokens(counting_sequences: Any) -> None:
    loader = BatchLoader(
        counting_sequences(10, seq_len=6),
        seed=0,
        shuffle=False,
        global_batch=6,
        micro_batch=3,
        accumulation=2,
        rank=0,
        num_ranks=1,
    )
    batches = loader.step_batches(0)
    assert rows(batches) == [0, 1, 2, 3, 4, 5]
    for batch in batches:
        assert batch.inputs.shape == batch.labels.shape == (3, 6)
        assert batch.inputs.dtype == batch.labels.dtype == torch.int64
        assert batch.num_valid_tokens == 3 * 5 == int((batch.labels != IGNORE_INDEX).sum())


@pytest.mark.parametrize("change", [{"global_batch": 7}, {"rank": 2}, {"rank": -1}])
def test_a_layout_that_does_not_add_up_is_refused(
    counting_sequences: Any, change: dict[str, int]
) -> None:
    layout = {"global_batch": 8, "micro_batch": 2, "accumulation": 2, "rank": 0, "num_ranks": 2}
    with pytest.raises(ValueError, match="is not"):
        BatchLoader(counting_sequences(4), seed=0, shuffle=True, **(layout | change))


@pytest.mark.parametrize("length", [1, 5, 12, 100])
@pytest.mark.parametrize("num_sequences", [1, 7, 12, 13])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_evaluation_reads_each_sequence_once_in_equal_numbers_of_batches(
    counting_sequences: Any, length: int, num_sequences: int, num_ranks: int
) -> None:
    sequences = counting_sequences(length)
    ranks = [
        list(
            eval_batches(
                sequences,
                num_sequences=num_sequences,
                micro_batch=3,
                rank=rank,
                num_ranks=num_ranks,
            )
        )
        for rank in range(num_ranks)
    ]
    wanted = min(num_sequences, length)
    assert {len(batches) for batches in ranks} == {math.ceil(wanted / (3 * num_ranks))}
    read = []
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.inputs.shape == batch.labels.shape == (3, 4)
        counts = (batch.labels != IGNORE_INDEX).any(dim=1)
        read += batch.inputs[counts][:, 0].tolist()
        assert batch.num_valid_tokens == int(counts.sum()) * 3
    assert sorted(read) == list(range(wanted))
