"""What processes that were forked off have in common: signals, as subprocess.Popen sends them."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from contextlib import suppress


class Signalled(ABC):
    """A process that can be sent signals, until it has ended."""

    pid: int

    @abstractmethod
    def poll(self) -> int | None:
        """Its exit code, once it has ended."""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
