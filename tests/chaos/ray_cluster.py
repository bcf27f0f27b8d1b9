"""A real Ray cluster of two nodes on this machine: two raylets, of one core each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launched import free_port

RAY = Path(sys.prefix, "ray")
_START_S = 900.0


def ray_environment() -> dict[str, str]:
    """Ray beside the other packages, and a command of ours on the PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Ray's workers give way to all others, and on a busy machine they would hardly run at all.
    quiet |= {"RAY_worker_niceness": "0", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600"}
    python = os.pathsep.join([str(RAY), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": python, "PATH": path, **quiet}


@contextmanager
def ray_cluster() -> Iterator[str]:
    """The address of its dashboard, while the block runs."""
    # Sockets have short names, and a test's own folder has not.
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        port, dashboard = _start_head(place)
        _start(f"--address=127.0.0.1:{port}")
        _wait_for_jobs(dashboard)
        yield dashboard
    finally:
        _end(place)
        shutil.rmtree(place, ignore_errors=True)


def _start_head(place: str) -> tuple[int, str]:
    """Its port, and the address of its dashboard. A try that was too slow leaves some of its
    processes, which end before the next one, on other ports."""
    deadline = time.monotonic() + _START_S
    while True:
        port, dashboard = free_port(), free_port()
        words = ("--head", f"--port={port}", f"--dashboard-port={dashboard}")
        done = _try(*words, f"--temp-dir={place}", "--include-dashboard=true")
        if done.returncode == 0:
            return port, f"http://127.0.0.1:{dashboard}"
        assert time.monotonic() < deadline, done.stdout + done.stderr
        _end(place)


def _start(*words: str) -> None:
    """A node that is up."""
    deadline = time.monotonic() + _START_S
    while (done := _try(*words)).returncode != 0:
        assert time.monotonic() < deadline, done.stdout + done.stderr


def _try(*words: str) -> subprocess.CompletedProcess[str]:
    """Start a node. On a busy machine one takes longer than the 30 s that Ray waits for it, and
    ends."""
    agent = f"--dashboard-agent-listen-port={free_port()}"
    return _ray("start", "--num-cpus=1", "--num-gpus=0", "--disable-usage-stats", agent, *words)


def _end(place: str) -> None:
    """End all processes of a cluster: each is told the folder. `ray stop` would end others too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_with(place):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        _wait_until_gone(place)


def _ray(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    return subprocess.run(
        command, env=ray_environment(), capture_output=True, text=True, timeout=_START_S
    )


def _wait_until_gone(place: str) -> None:
    deadline = time.monotonic() + 30
    while processes_with(place) and time.monotonic() < deadline:
        time.sleep(0.1)


def _wait_for_jobs(dashboard: str) -> None:
    """Until a job has run on two nodes: their agents take a while after the dashboard answers."""
    script = (
        "import ray, time; ray.init(address='auto', logging_level='error');\n"
        "while len(ray.nodes()) < 2: time.sleep(0.2)"
    )
    deadline = time.monotonic() + _START_S
    while True:
        python = (sys.executable, "-c", script)
        done = _ray("job", "submit", f"--address={dashboard}", "--", *python)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline, done.stdout + done.stderr


def processes_with(*words: str) -> list[int]:
    """Processes whose command has all of these words."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            said = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if all(any(word in part for part in said) for word in words):
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
