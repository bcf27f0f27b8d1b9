"""Wait for room on a full disk: all ranks together, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from shardwise.checkpoint.save import Room

_POLL_S = 1.0


def rooms_until(
    ask: Callable[[], Room], patience_s: float, gives_up: Callable[[], bool]
) -> Iterator[Room]:
    """What the disk has, once a second, as the first rank sees it. The last one fits, or the time
    is over, or `gives_up` says so."""
    deadline = time.monotonic() + patience_s
    while True:
        state: list[tuple[Room, bool] | None] = [None]
        if dist.get_rank() == 0:
            room = ask()
            state = [(room, room.fits or gives_up() or time.monotonic() >= deadline)]
        dist.broadcast_object_list(state, src=0)
        found = state[0]
        if found is None:  # rank 0 always fills it in
            raise RuntimeError("rank 0 sent no state of the disk")
        yield found[0]
        if found[1]:
            return
        time.sleep(_POLL_S)
