"""Runs mutated cases, each in a fork of this process, which has imported everything once.

    python zygote.py SEED FIRST COUNT RESULTS [FAILED_INPUTS [KIND,...]]

Ranks are not started: where they would be, a case has passed. A case may use so much CPU time and
memory, and wait so long; what exceeds it is a failure, as is a traceback or an error without a fix.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpus
from case import Case
from cases import build_case
from launches import build_launched

import shardwise.launch.peers as peers
import shardwise.launch.this_machine as local
import shardwise.launch.worker as worker
from shardwise.cli.main import main

CPU_S = 20
WAIT_S = 60
MEMORY_BYTES = 8 * 2**30
KNOWN_CODES = {2, 3, 4, 5, 6, 7, 75}


def run_all(
    seed: int, numbers: range, results: Path, failed: Path | None, kinds: list[str]
) -> None:
    """One line for each case, in the file `results`."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        home = Path(folder) / "home"
        home.mkdir()
        corpus.build_corpus(home)
        build_launched(home)
        _warm_up(home)
        gc.freeze()
        with results.open("a") as stream:
            for number in numbers:
                scratch = Path(folder) / "case"
                scratch.mkdir()
                found = run_one(seed, number, home, scratch, kinds)
                if found["fault"] and failed is not None:
                    shutil.copytree(scratch, failed / str(number), symlinks=True,
                                    ignore=shutil.ignore_patterns("pipe"),
                                    copy_function=_copy_plain)  # fmt: skip
                stream.write(json.dumps(found) + "\n")
                stream.flush()
                shutil.rmtree(scratch)


def _warm_up(home: Path) -> None:
    """Run commands on sound inputs here, so that no child has to import or build anything anew."""
    scratch = home.with_name("case")
    shutil.copytree(home, scratch)
    os.chdir(scratch)
    for model in ("tiny-llama", "model", "sharded", "others/gpt2", "others/opt", "others/mixtral"):
        Path("run.json").write_text(
            json.dumps(corpus.RUN | {"model": {"name": model}, "name": "warm"})
        )
        shutil.rmtree("runs/warm", ignore_errors=True)
        for verb in ("plan", "train"):
            _run_quietly(verb, "run.json")
    run = str(Path("runs", "run"))
    for words in (
        ["checkpoint", "verify", run],
        ["verify", run],
        ["report", run],
        ["config", "ls"],
    ):
        _run_quietly(*words)
    _run_quietly("export", run, "--to", "out")
    _run_quietly("status", run)
    _run_quietly("plan", "missing.yaml", expected=2)
    os.chdir(home)
    shutil.rmtree(scratch)


def _run_quietly(*words: str, expected: int = 0) -> None:
    sys.argv = ["shardwise", *words]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = _exit_code()
    if code != expected:
        raise RuntimeError(f"{words} ended with {code}:\n{said.getvalue()}")


def _copy_plain(source: str, target: str) -> None:
    if os.path.isfile(source):
        shutil.copyfile(source, target, follow_symlinks=False)


def run_one(
    seed: int, number: int, home: Path, scratch: Path, kinds: Sequence[str] = ()
) -> dict[str, Any]:
    """Make the case, run it in a child, judge what the child left."""
    kind, case = build_case(seed, number, home, scratch, kinds)
    before = [_digest(folder) for folder in case.kept]
    said = scratch.with_name("said")
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_in_child(case, scratch, said)
    status, cpu_s = _wait(child)
    text = said.read_bytes().decode(errors="replace")
    after = [_digest(folder) for folder in case.kept]
    fault = _fault(status, text) or ("lost" if before != after else "")
    if status == 0 and not fault:
        fault = case.fault_of(scratch)
    return {
        "number": number, "kind": kind, "words": [word[:200] for word in case.words],
        "environment": case.environment, "fault": fault, "code": os.waitstatus_to_exitcode(status),
        "said": text[-2000:] if fault else "", "seconds": round(time.monotonic() - began, 2),
        "cpu_s": round(cpu_s, 2),
    }  # fmt: skip


def _run_in_child(case: Case, scratch: Path, said: Path) -> None:
    """Never returns."""
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 2))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), encoding="utf-8")
        os.chdir(scratch)
        os.environ.update(case.environment)
        sys.argv = ["shardwise", *case.words]
        code = _exit_code()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code() -> int:
    def pass_on(*_: object) -> None:
        raise SystemExit(0)

    local.start_ranks = pass_on  # type: ignore[assignment]
    worker.run_rank = pass_on
    # Others that a rank could tell of its error will never come.
    peers._GRACE_S = peers._REFUSAL_S = 0.2
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001 (whatever it is, it is what is looked for)
        traceback.print_exc()
        return 1
    return 0


def _wait(child: int) -> tuple[int, float]:
    """(how it ended, seconds of CPU time)."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            return status, used.ru_utime + used.ru_stime
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    return status, used.ru_utime + used.ru_stime


def _fault(status: int, text: str) -> str:
    """What is wrong with how the case ended; empty where nothing is."""
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)} (out of time?)"
    code = os.waitstatus_to_exitcode(status)
    if "Traceback (most recent call last)" in text:
        return "traceback"
    if code == 0:
        return ""
    if code not in KNOWN_CODES:
        return f"exit code {code}"
    is_usage = "Try 'shardwise" in text or "Usage: shardwise" in text
    return "" if "fix:" in text or is_usage else "no fix"


def _digest(folder: Path) -> str:
    """Of all files below it; empty where it is gone."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.name}\0".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest() if folder.is_dir() else ""


if __name__ == "__main__":
    import datasets  # noqa: F401  (once here rather than in every child)

    seed, first, count = map(int, sys.argv[1:4])
    inputs = Path(sys.argv[5]) if sys.argv[5:] else None
    kinds = sys.argv[6].split(",") if sys.argv[6:] else []
    run_all(seed, range(first, first + count), Path(sys.argv[4]), inputs, kinds)
