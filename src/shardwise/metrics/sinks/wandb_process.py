"""The process that talks to Weights & Biases. Events come as lines of JSON on stdin.

It is a separate process, because wandb waits forever for a network that does not answer, and would
keep a rank from ending. This process ends some time after its last line, whatever wandb does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from shardwise.metrics.events import Event
from shardwise.metrics.sinks.scalars import scalars_of

# The time to send what is left after the last line: longer than an orderly rank waits for it.
GIVE_UP_S = 30.0


def log_events(options: dict[str, Any], events: Iterator[Event]) -> None:
    """One W&B run: open it, log every event's points with their step, finish it."""
    import wandb

    # The console belongs to the run's own lines, and its output is in its own logs.
    settings = wandb.Settings(silent=True, console="off", disable_code=True)
    run = wandb.init(**options, settings=settings)
    # Steps that are done again after a rollback would be refused on W&B's own step axis.
    run.define_metric("*", step_metric="step")
    for event in events:
        if points := scalars_of(event):
            run.log({"step": event["step"], **points})
    run.finish()


def main() -> None:
    """Options are the first line, events the others; their end is the end of the run."""
    read, write = os.pipe()
    threading.Thread(target=_pass_on, args=(write,), daemon=True).start()
    with os.fdopen(read, encoding="utf-8") as lines:
        log_events(json.loads(lines.readline()), map(json.loads, lines))


def _pass_on(write: int) -> None:
    """Read stdin even while wandb waits for its network, so that its end is noticed."""
    # Where wandb has failed, nobody reads any more, and wandb's own error counts.
    with suppress(BrokenPipeError), os.fdopen(write, "wb", buffering=0) as out:
        for line in sys.stdin.buffer:
            out.write(line)
    timer = threading.Timer(GIVE_UP_S, os._exit, [1])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
