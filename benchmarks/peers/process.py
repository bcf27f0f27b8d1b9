"""A contender in a process of its own: what it printed, or why there is nothing to read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from peers.contenders import BENCHMARKS, Job, Measured
from shardwise.facts.allocator import ALLOCATOR

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError", re.IGNORECASE)
_ERROR = re.compile(r"error", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    measured: Measured | None
    problem: str
    """Empty where all went well."""

    took_s: float


def run_job(job: Job, log: Path, timeout_s: float) -> Outcome:
    """Start it, wait, and read its answer; all that it says beside it is kept in `log`."""
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            job.command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # With its data workers; ranks of ours leave when their launcher does.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome(None, "the time was up", time.monotonic() - started)
    took = time.monotonic() - started
    if process.returncode != 0:
        return Outcome(None, what_failed(log.read_text(encoding="utf-8"), process.returncode), took)
    try:
        return Outcome(job.read(output), "", took)
    except (ValueError, LookupError, TypeError, OSError) as error:
        return Outcome(None, f"its answer cannot be read: {error!r}"[:160], took)


def what_failed(log: str, code: int) -> str:
    """One line out of the last words of a process."""
    if _OUT_OF_MEMORY.search(log):
        return "out of memory"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if _ERROR.search(line)), "")
    return (said or next(reversed(lines), f"exit code {code}"))[:160]


def environment() -> dict[str, str]:
    """One GPU, the modules of peers, and for all the allocator that `shardwise` gives its ranks."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = dict([ALLOCATOR, ("CUDA_VISIBLE_DEVICES", "0")])
    return defaults | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
