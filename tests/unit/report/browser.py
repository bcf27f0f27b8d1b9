"""A real Chromium, driven through its own debugging pipe: no library and no port is needed.

`python tests/unit/report/browser.py` installs it where apt-get and the rights for it are there.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_ANSWER_S = 30.0
# Chromium listens on descriptor 3 and answers on 4.
_AS_3_AND_4 = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)


def find_chromium() -> str | None:
    """The one that CHROMIUM names, or the first on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def install_chromium() -> None:
    """By Debian's package, for those who may install one."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SystemExit("needs apt-get, as root; or set CHROMIUM to a browser's path")
    quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "check": True}
    subprocess.run(["apt-get", "update", "-qq"], **quiet)  # type: ignore[call-overload]
    words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    subprocess.run([*words, "chromium", "fonts-dejavu-core"], **quiet)  # type: ignore[call-overload]


class Page:
    """One tab: what it says, what it loads, what it looks like."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._pending = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, file: Path) -> None:
        """Load a file and wait until it is there."""
        self.visit(file.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Load what is at an address and wait until it is there."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def look(self, width: int, *, scheme: str = "light", height: int = 900) -> None:
        """A screen of this width, by day or by night."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page, not only the window."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def print(self, file: Path) -> None:
        """As paper would have it."""
        made = self.call("Page.printToPDF", printBackground=True)
        file.write_bytes(base64.b64decode(made["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions, since the page was opened."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                said.append(json.dumps(params["exceptionDetails"]))
            if event["method"] == "Runtime.consoleAPICalled":
                said.append(json.dumps(params["args"]))
            if event["method"] == "Log.entryAdded":
                said.append(params["entry"]["text"])
        return said

    def requests(self) -> list[str]:
        """Everything that was asked for since the page was opened."""
        sent = [each for each in self.events if each["method"] == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in sent]

    def wait_until(self, expression: str, seconds: float = _ANSWER_S) -> None:
        """Until a JavaScript expression is true."""
        until = time.monotonic() + seconds
        while not self.ask(f"!!({expression})"):
            if time.monotonic() > until:
                shown = self.ask("document.body.innerText")
                raise TimeoutError(f"{expression} is not true: {shown}")
            time.sleep(0.05)

    def wait_for(self, method: str) -> None:
        """Until an event has come."""
        until = time.monotonic() + _ANSWER_S
        while not any(event["method"] == method for event in self.events):
            self._take(until)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _ANSWER_S
        while True:
            answer = self._take(until)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _take(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            if not piece:
                raise TimeoutError("Chromium does not answer")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def chromium_page(program: str, profile: Path) -> Iterator[Page]:
    """A tab of a Chromium that lives as long as the block."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    ours = [sys.executable, "-c", _AS_3_AND_4, str(to_read), str(from_write)]
    words = [*ours, program, *_FLAGS]
    process = subprocess.Popen(
        [*words, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(from_read, to_write)
    finally:
        process.terminate()
        process.wait(20)
        os.close(to_write)
        os.close(from_read)


if __name__ == "__main__":
    if find_chromium() is None:
        install_chromium()
    sys.stdout.write(f"{find_chromium()}\n")
