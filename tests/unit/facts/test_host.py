"""What is left of a host's memory, from the files of machines and of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.facts.host import memory_left, memory_limit

MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nNothing:\n\nMemAvailable: 4000 kB\n"}
JOB = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/memory.max": "1000000\n",
    "sys/fs/cgroup/job/step/memory.current": "900000\n",
    "sys/fs/cgroup/job/step/memory.stat": "anon 1\ninactive_file 50000\n",
}
WHOLE_JOB = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/memory.max": "1000000\n",
    "sys/fs/cgroup/job/memory.current": "200000\n",
}
UNLIMITED = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/memory.current": "900000\n",
}
CONTAINER = {
    "proc/self/cgroup": "4:cpu,cpuacct:/a\n3:memory:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "700000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "800000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MACHINE, 4000 * 1024),
        (MACHINE | JOB, 150_000),
        (MACHINE | WHOLE_JOB, 800_000),
        (MACHINE | UNLIMITED, 4000 * 1024),
        (MACHINE | CONTAINER, 0),
        ({}, None),
    ],
)
def test_the_least_that_is_left_counts(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(tmp_path) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MACHINE, None),
        (MACHINE | JOB, 1_000_000),
        (MACHINE | WHOLE_JOB, 1_000_000),
        (MACHINE | UNLIMITED, None),
        (MACHINE | CONTAINER, 700_000),
    ],
)
def test_the_limit_of_a_container_or_job(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == expected


def test_this_machine_has_some() -> None:
    left = memory_left()
    assert left is None or 2**20 < left < 2**50
