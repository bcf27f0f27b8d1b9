"""`shardwise fabric` between two namespaces: it sees what the shaped link carries, and names it."""

from __future__ import annotations

import pytest

from fabric import measure
from namespaces import why_not_here

SPEED, EXPECTED = 100, 400  # Mbit/s


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
def test_a_slow_link_is_measured_and_its_pair_named() -> None:
    reason = why_not_here()
    if reason is not None:
        print(f"links are not measured: {reason}")
        pytest.skip(reason)
    words = ("--sizes", "8MiB", "--collectives", "all_reduce")
    code, found = measure(SPEED, EXPECTED, *words)
    assert code == 4
    assert not found["passed"]
    between = [each for each in found["pairs"] if each["group"] == "between"]
    ways = [{(flow["sender"], flow["receiver"]) for flow in each["flows"]} for each in between]
    assert ways == [{(0, 2), (1, 3)}, {(2, 0), (3, 1)}]
    for each in between:
        assert 8e-6 * each["bytes_per_s"] == pytest.approx(SPEED, rel=0.1)
        assert each["verdict"] == "slow"
    gates = {gate["name"]: gate for gate in found["gates"]}
    assert gates["data"]["verdict"] == "pass"
    assert gates["pairs between"]["verdict"] == "fail"
    assert gates["pairs between"]["figure"] == "2 of 2 slow"
    for words_of_both in ("10.77.13.1", "10.77.13.2", "of 382 Mbit/s"):
        assert words_of_both in gates["pairs between"]["advice"]
    # A ring through all ranks is as fast as the link that it crosses; tcp and gloo take some of it.
    [ring] = [each for each in found["collectives"] if each["group"] == "all"]
    assert 0.5 * SPEED < 8e-6 * ring["bus_bytes_per_s"] < 1.1 * SPEED
