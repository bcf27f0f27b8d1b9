"""A real Prometheus server over the endpoint of a run, with what `shardwise observe` writes."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from shardwise.metrics.monitoring.scrape import DCGM_PORT

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
HAS_PROMETHEUS = shutil.which("prometheus") is not None
WHY_SKIPPED = "prometheus is not installed (Debian: apt-get install prometheus)"


def free_port() -> int:
    """One that nobody is given who asks for any: it is taken seconds later, when ranks have begun,
    and gloo and W&B take ports meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _observe(*words: str) -> None:
    subprocess.run([SHARDWISE, "observe", *words], check=True, capture_output=True)


class Prometheus:
    """A test has no minutes: it scrapes every `every` seconds, and all windows are scaled.

    `dcgm` is where a test has DCGM's exporter: on the usual port there may be a real one.
    """

    def __init__(
        self, folder: Path, target: int, *, every: float, scale: float, dcgm: int = DCGM_PORT
    ) -> None:
        folder.mkdir()
        self.rules = folder / "rules.yaml"
        config = folder / "prometheus.yml"
        _observe("scrape", f"--nodes=127.0.0.1:{target}", f"--every={every}", f"--to={config}")
        _observe("rules", f"--scale={scale}", f"--to={self.rules}")
        text = config.read_text(encoding="utf-8")
        config.write_text(text.replace(f":{DCGM_PORT}", f":{dcgm}"), encoding="utf-8")
        self.port = free_port()
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--web.enable-lifecycle",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "log.txt").open("w"),
        )

    def rescale(self, scale: float) -> None:
        """Go on with other windows; what was scraped stays."""
        _observe("rules", f"--scale={scale}", f"--to={self.rules}")
        reload = Request(f"http://127.0.0.1:{self.port}/-/reload", method="POST")
        urlopen(reload, timeout=20).close()

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series that match now."""
        return list(self._get("query", query=expr).get("result", []))

    def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or firing."""
        return list(self._get("alerts").get("alerts", []))

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {each["labels"]["alertname"] for each in self.alerts() if each["state"] == "firing"}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)

    def _get(self, what: str, **fields: str) -> dict[str, Any]:
        """Nothing while the server starts."""
        address = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urlencode(fields)}"
        try:
            with urlopen(address, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)["data"]
                return found
        except OSError:
            return {}
