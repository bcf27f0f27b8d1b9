"""Wait for room on a full disk: all ranks together, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from shardwise.checkpoint.save import Room
from shardwise.parallel.mesh import World

_POLL_S = 1.0


def rooms_until(
    world: World, ask: Callable[[], Room], patience_s: float, gives_up: Callable[[], bool]
) -> Iterator[Room]:
    """The room on the disk, once a second, as the first rank sees it.

    The last one fits, or the time is over, or `gives_up` returned True.
    """
    deadline = time.monotonic() + patience_s
    is_last = False
    while not is_last:
        room = ask()
        is_last = room.fits or gives_up() or time.monotonic() >= deadline
        room, is_last = world.share((room, is_last))
        yield room
        if not is_last:
            time.sleep(_POLL_S)
