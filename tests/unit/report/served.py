"""The page over runs as a test serves it: beside the test, and asked without a browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from shardwise.ui.server import RunsServer


@contextmanager
def served(folder: Path, every_s: float = 0.2) -> Iterator[RunsServer]:
    server = RunsServer(folder, 0, every_s)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    """(status, headers, text)."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def parts_of(server: RunsServer, *runs: str, **more: Any) -> dict[str, dict[str, str]]:
    """The parts of the page, by name."""
    words = [("token", server.token), *(("run", run) for run in runs), *more.items()]
    query = urlencode(words, doseq=True)
    status, _, text = ask(server.server_port, f"/view?{query}")
    assert status == 200, text
    return {part["name"]: part for part in json.loads(text)["parts"]}
