"""Ranks of sites of different sizes fetch from each other what they both hold."""

from __future__ import annotations

import socket
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from shardwise.parallel.mailbox import Address, Mailbox, fetch
from shardwise.parallel.spans import RowSpan, cut, shared

PARAMS = (10, 1, 7, 33)


def shards(num_ranks: int) -> list[list[RowSpan]]:
    """Each parameter cut into equal parts, as FSDP2 cuts rows."""
    found: list[list[RowSpan]] = [[] for _ in range(num_ranks)]
    before = 0
    for size in PARAMS:
        length = -(-size // num_ranks)
        for rank, spans in enumerate(found):
            low, high = min(size, rank * length), min(size, (rank + 1) * length)
            spans += [RowSpan(before + low, high - low)] if low < high else []
        before += size
    return found


def test_what_two_ranks_share_adds_up_to_the_model() -> None:
    for mine in shards(3):
        places = sorted(
            (each.mine, each.length) for theirs in shards(2) for each in shared(mine, theirs)
        )
        assert all(a + length == b for (a, length), (b, _) in pairwise(places))
        assert sum(length for _, length in places) == sum(span.length for span in mine)


def test_a_part_of_a_vector_has_the_spans_of_that_part() -> None:
    spans = [RowSpan(5, 4), RowSpan(20, 6)]
    assert cut(spans, 2, 7) == [RowSpan(7, 2), RowSpan(20, 3)]
    assert cut(spans, 0, 4) == [RowSpan(5, 4)] and cut(spans, 10, 12) == []


def test_two_ranks_have_what_three_hold() -> None:
    model = np.arange(sum(PARAMS), dtype=np.float32)
    mailboxes = [Mailbox("127.0.0.1", 10.0) for _ in range(3)]
    addresses = []
    for mailbox, spans in zip(mailboxes, shards(3), strict=True):
        vector = np.concatenate([model[span.start : span.end] for span in spans])
        takers = sum(any(shared(theirs, spans)) for theirs in shards(2))
        mailbox.post("learnt/1", [vector, -vector], {"updates": 3}, num_takers=takers)
        addresses.append(Address("127.0.0.1", mailbox.port, spans))
    for spans in shards(2):
        into = [np.full(sum(s.length for s in spans), np.nan, np.float32) for _ in range(2)]
        about = [fetch(each, "learnt/1", spans, into, 10.0) for each in addresses]
        wanted = np.concatenate([model[span.start : span.end] for span in spans])
        assert np.array_equal(into[0], wanted) and np.array_equal(into[1], -wanted)
        assert {"updates": 3} in about
    deadline = time.monotonic() + 10.0
    while any(mailbox.is_awaited() for mailbox in mailboxes):
        assert time.monotonic() < deadline
    sent = sum(mailbox.take_back("learnt/1") for mailbox in mailboxes)
    assert sent == 2 * 4 * sum(PARAMS)
    with pytest.raises(OSError, match="does not have"):
        fetch(addresses[0], "learnt/1", shards(2)[0], into, 10.0)
    for mailbox in mailboxes:
        mailbox.close()


def test_a_site_that_closes_within_a_vector_is_noticed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_half() -> None:
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.sendall(b"{}\n" + bytes(8))
        connection.close()

    threading.Thread(target=serve_half, daemon=True).start()
    spans = [RowSpan(0, 4)]
    address = Address("127.0.0.1", listener.getsockname()[1], spans)
    with pytest.raises(OSError, match="closed"):
        fetch(address, "learnt/1", spans, [np.zeros(4, np.float32)], 10.0)
    listener.close()
