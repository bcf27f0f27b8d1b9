from __future__ import annotations

import pytest

from shardwise.units import format_bit_rate, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("16MiB", 2**24), (" 1.5 gib ", 3 * 2**29), ("8M", 2**23), ("1GB", 10**9)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1TiB", "-4", "1e9", "ten"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_rates_are_shown_as_links_are_sold() -> None:
    assert [format_rate(rate) for rate in (45.12e9, 23.9e6, 500.0)] == [
        "45.12 GB/s",
        "23.9 MB/s",
        "0.5 kB/s",
    ]
    assert [format_bit_rate(rate) for rate in (25e6, 50e9)] == ["200 Mbit/s", "400.00 Gbit/s"]
