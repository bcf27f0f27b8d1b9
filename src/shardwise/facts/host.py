"""The memory of this host, total and available: the machine's, a container's or a job's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# By version of control groups: where groups are, then the files of their limit and usage.
_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that processes can still allocate here; None where the system does not say."""
    machine = _numbers(root / "proc/meminfo").get("MemAvailable:")
    found = [*_left_in_groups(root), *([] if machine is None else [1024 * machine])]
    return min(found, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that processes of this container or job may hold in all; None without a limit."""
    return min((limit for limit, *_ in _limits(root)), default=None)


def _left_in_groups(root: Path) -> Iterator[int]:
    """For every limit of this process: the limit, less the memory that cannot be reclaimed."""
    for limit, use, group in _limits(root):
        cached = _numbers(group / "memory.stat").get("inactive_file", 0)
        yield max(0, limit - use + cached)


def _limits(root: Path) -> Iterator[tuple[int, int, Path]]:
    """(limit, use, group) of every control group that bounds this process."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in _GROUPS:
            continue
        top, limit_file, use_file = _GROUPS[controllers]
        # A limit holds for all groups below. In a container the top is its own, whatever the path.
        own = root / top / path.lstrip("/")
        for group in (own, *own.parents):
            limit, use = (_number(group / file) for file in (limit_file, use_file))
            if limit is not None and use is not None:
                yield limit, use, group


def _number(file: Path) -> int | None:
    """A limit that is not set says "max"."""
    text = next(iter(_lines(file)), "")
    return int(text) if text.isdecimal() else None


def _numbers(file: Path) -> dict[str, int]:
    words = (line.split() for line in _lines(file))
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
