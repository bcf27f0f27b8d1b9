"""The link between two sites is measured through the command, and a plan takes it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from commands import Command

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_link_is_measured_and_planned_with(tmp_path: Path, shardwise: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["fabric", "--between", "sites"]
    listener = Command([*words, "--listen", address], tmp_path / "listener.txt")
    deadline = time.monotonic() + 120
    output = tmp_path / "listener.txt"
    while not (output.exists() and "listening" in output.read_text()):
        assert time.monotonic() < deadline and listener.poll() is None
        time.sleep(0.05)
    said = shardwise(*words, "--meet", address, "--seconds", "0.5", "--json").stdout
    found = json.loads(said)
    assert listener.wait(60) == 0
    assert found["sent_bytes_per_s"] > 0 and found["received_bytes_per_s"] > 0
    assert found["delay_s"] > 0
    settings = found["settings"].split()
    assert [each.split("=")[0] for each in settings] == [
        "cluster.site_link",
        "cluster.site_delay_ms",
    ]
    plan = shardwise("plan", "--model", "llama-3.2-1b", "--cluster", "2x8xH100", "mesh.site=2",
                     *settings, "--json")  # fmt: skip
    outlook = json.loads(plan.stdout)["outlook"]
    assert outlook["seconds"] > 0 and outlook["least_steps"] >= 1


def test_a_link_that_nobody_answers_on_is_an_error(shardwise: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["fabric", "--between", "sites", "--meet", address]
    error = shardwise(*words, expect=4).stderr
    assert re.search(r"cannot be measured: .*refused", error)
    assert "an end that listens" in shardwise("fabric", "--between", "sites", expect=2).stderr
