"""Where documents lie in a micro-batch."""

from __future__ import annotations

import numpy as np

from shardwise.data.documents import Documents, place_documents
from shardwise.data.sequences import starts_after

END = 9


def find_documents(rows: np.ndarray) -> Documents:
    return place_documents([starts_after(row, END) for row in rows], rows.shape[1])


def found(*rows: list[int]) -> tuple[list[list[int]], list[int]]:
    documents = find_documents(np.array(rows))
    size = np.size(rows)
    starts = documents.starts.tolist()
    assert documents.starts.dtype.itemsize == 4 and set(starts[starts.index(size) :]) == {size}
    return documents.positions.tolist(), starts[: starts.index(size)]


def test_a_document_begins_after_each_end_and_with_each_sequence() -> None:
    positions, starts = found([1, 2, END, 3, 4, 5], [6, END, 7, END, 8, 8])
    assert positions == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 1]]
    assert starts == [0, 3, 6, 8, 10]


def test_ends_in_a_row_begin_nothing() -> None:
    positions, starts = found([1, END, END, END, 2, END], [END, 3, END, END, END, END])
    assert positions == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert starts == [0, 4, 6, 7]


def test_there_is_the_same_room_for_few_and_for_some() -> None:
    few = np.full((2, 64), 1)
    some, many = few.copy(), few.copy()
    some[:, 3::8] = END
    many[:, 1::2] = END
    rooms = [len(find_documents(each).starts) - 1 for each in (few, some, many)]
    assert rooms == [32, 32, 64]
