from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_conversations import SEQ_LEN, prepared, windows_of, write_rows

from shardwise.data.grouping import LengthOrder
from shardwise.data.loader import BatchLoader
from shardwise.data.sequences import IGNORE_INDEX

LENGTHS = np.random.default_rng(0).integers(1, 96, size=1000)


def order_of(**changes: int) -> LengthOrder:
    settings = {"seed": 3, "global_batch": 8, **changes}
    return LengthOrder(LENGTHS, 96, shuffle=True, **settings)


@pytest.mark.parametrize("global_batch", [8, 24, 7])
def test_every_epoch_has_each_sequence_once(global_batch: int) -> None:
    order = order_of(global_batch=global_batch)
    count = -(-3 * len(LENGTHS) // global_batch)
    read = [at for index in range(count) for at in order.batch(index)[0]]
    epochs = [read[start : start + 1000] for start in (0, 1000, 2000)]
    assert all(sorted(epoch) == list(range(1000)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_batch_is_a_function_of_seed_and_position() -> None:
    """Read from the start, alone, or with another seed."""
    order = order_of()
    found = [order.batch(index) for index in range(140)]
    assert [order_of().batch(index) for index in (139, 70, 0)] == [found[139], found[70], found[0]]
    assert order_of(seed=4).batch(0) != found[0]


def test_batches_are_of_similar_lengths_and_lose_no_token() -> None:
    order = order_of()
    batches = [order.batch(index) for index in range(125)]
    assert all(LENGTHS[found].max() <= length <= 96 for found, length in batches)
    padding = 1 - LENGTHS.sum() / sum(8 * length for _, length in batches)
    assert padding < 0.1 < 0.4 < 1 - LENGTHS.sum() / (1000 * 96)
    assert order.padding_share() == pytest.approx(padding, abs=0.03)
    # The long ones do not come first.
    sizes = [length for _, length in batches[:32]]
    assert sizes != sorted(sizes) and sizes != sorted(sizes, reverse=True)


def test_ranks_share_batches_without_their_padding(tmp_path: Path) -> None:
    windows = windows_of(prepared(write_rows(tmp_path / "a.jsonl"), tmp_path))
    order = LengthOrder(windows.lengths, SEQ_LEN, seed=0, shuffle=True, global_batch=4)
    layouts = [(4, 1, 1), (2, 1, 2), (1, 2, 2)]
    seen = []
    for micro_batch, accumulation, num_ranks in layouts:
        loaders = [
            BatchLoader(
                windows,
                **{"seed": 0, "shuffle": True, "global_batch": 4, "order": order},
                **{"micro_batch": micro_batch, "accumulation": accumulation},
                **{"rank": rank, "num_ranks": num_ranks},
            )
            for rank in range(num_ranks)
        ]
        batches = [batch for loader in loaders for batch in loader.step_batches(1)]
        assert len({batch.inputs.shape[1] for batch in batches}) == 1
        seen.append([row.tolist() for batch in batches for row in batch.inputs])
    assert seen[0] == seen[1] == seen[2]
    found, length = order.batch(1)
    labels = [windows.get(at).labels for at in found]
    assert all((row[length:] == IGNORE_INDEX).all() for row in labels)
