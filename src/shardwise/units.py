"""Bytes, counts, durations: how they are printed, in one place."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """8030261248 -> '8.03B'; 41200 -> '41.2k'."""
    for suffix, size, digits in (("T", 1e12, 2), ("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if abs(count) >= size:
            return f"{count / size:.{digits}f}{suffix}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """6720 -> '1h52m'; 75 -> '1m15s'."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{secs:02d}s"
    return f"{secs}s"
