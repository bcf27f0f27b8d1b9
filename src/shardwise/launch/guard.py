"""A thread in each rank that watches its node where no launcher of ours does."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import UserError
from shardwise.launch.hang import describe_hang
from shardwise.launch.last_words import leave_word
from shardwise.launch.lookout import Lookout
from shardwise.launch.stopping import stop_ranks
from shardwise.launch.watchdog import Watchdog

_POLL_S = 1.0
_CLAIM = "hang"


class Guard:
    """Watches from the start under torchrun and srun, and after the launcher's death under ours.

    Every rank has one, because a rank that is stopped cannot watch. The first to see a hang ends
    the ranks of the node, prints the error, and ends last.
    """

    def __init__(self, folder: Path, launcher: int | None, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._launcher = launcher
        self._environ = environ
        # Later the rank's own streams are its log.
        self._terminal = os.dup(2)
        threading.Thread(target=self._work, daemon=True, name="guard").start()

    def _work(self) -> None:
        while self._launcher is not None and os.getppid() == self._launcher:
            time.sleep(_POLL_S)
        siblings_of = os.getppid() if self._launcher is None else None
        lookout = Lookout(self._folder, siblings_of)
        hang = Watchdog(lookout, self._say).wait_for_hang()
        if hang is None or not self._is_first():
            return
        # This is printed first: once a rank has died, its agent ends this one too.
        told = describe_hang(hang)
        error = UserError(told.what, fix=told.fix, code=told.code)
        if leave_word(error, self._environ):
            self._say(f"error: {error}")
        faulthandler.dump_traceback(file=2)
        stop_ranks(lookout, hang)
        os._exit(int(error.code))

    def _is_first(self) -> bool:
        try:
            (self._folder / _CLAIM).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # better twice than never
        return True

    def _say(self, text: str) -> None:
        try:
            os.write(self._terminal, f"{text}\n".encode())
        except OSError:
            return
