"""Bytes, counts, durations: how they are printed, in one place."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SIZES = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_SIZES |= {"K": KIB, "KIB": KIB, "M": MIB, "MIB": MIB, "G": GIB, "GIB": GIB}


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def parse_bytes(text: str) -> int:
    """'16MiB' -> 16777216. A bare K, M or G is binary, as nccl-tests take it."""
    match = _SIZE.fullmatch(text)
    if match is None or (unit := match[2].upper()) not in _SIZES:
        raise ValueError(f"{text!r} is no size")
    return round(float(match[1]) * _SIZES[unit])


def format_rate(bytes_per_s: float) -> str:
    """4.512e10 -> '45.12 GB/s'; decimal, as links are sold."""
    for unit, size, digits in (("GB/s", 1e9, 2), ("MB/s", 1e6, 1)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.{digits}f} {unit}"
    return f"{bytes_per_s / 1e3:.1f} kB/s"


def format_bit_rate(bytes_per_s: float) -> str:
    """2.5e7 -> '200 Mbit/s', as networks are named."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def format_count(count: float) -> str:
    """8030261248 -> '8.03B'; 41200 -> '41.2k'."""
    for suffix, size, digits in (("T", 1e12, 2), ("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if abs(count) >= size:
            return f"{count / size:.{digits}f}{suffix}"
    return f"{count:.0f}"


def speed_unit(device: str) -> str:
    """What tokens per second of one rank are called on a device."""
    return "tok/s/gpu" if device == "cuda" else "tok/s/rank"


def parse_count(text: str) -> float:
    """'15B' -> 1.5e10, '2.5e9' -> 2.5e9. ValueError for anything that is no number above zero."""
    bare = text.strip().replace(",", "").replace("_", "")
    scale = _COUNTS.get(bare[-1:].upper(), 1.0)
    count = float(bare[:-1] if bare[-1:].upper() in _COUNTS else bare) * scale
    if not 0 < count < float("inf"):
        raise ValueError(f"{text!r} is no number above zero")
    return count


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
