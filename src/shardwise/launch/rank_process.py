"""The process of one rank, which shows signs of life before it imports anything large."""

from __future__ import annotations

import os
import sys

from shardwise.errors import UserError
from shardwise.launch.alive import come_alive


def start(plan_path: str) -> None:
    """Train. The exit code tells the launcher how it ended."""
    come_alive(os.environ)
    from shardwise.launch.worker import main

    try:
        main(plan_path)
    except UserError as error:
        # `record` has written the error. The exit code tells the launcher its kind.
        sys.exit(error.code)


if __name__ == "__main__":
    start(sys.argv[1])
