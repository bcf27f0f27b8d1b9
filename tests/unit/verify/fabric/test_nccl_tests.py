"""Tables of nccl-tests, new and old, become points that the gates judge."""

from __future__ import annotations

import pytest

from shardwise.errors import UserError
from shardwise.facts.cluster import parse_cluster
from shardwise.verify.fabric.judge_fabric import judge
from shardwise.verify.fabric.nccl_tests import read_nccl_tests


def device_lines(hosts: list[str]) -> str:
    lines = [
        f"#  Rank {rank:2} Group  0 Pid  {700 + rank} on {host:>9} device  {rank % 8} [0000:1b:00] "
        "NVIDIA H100 80GB HBM3"
        for rank, host in enumerate(hosts)
    ]
    return "\n".join(["# Using devices", *lines, "#"])


HEAD = """#                                                    out-of-place                 in-place
#   size      count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#    (B)  (elements)                      (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
"""
ROWS = """   1048576     262144  float  sum  -1  61.20  17.13  29.98      0  60.9  17.2  30.1      0
1073741824  268435456  float  sum  -1  4900.0  219.13  383.48      0  5000.0 214.75 375.81      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 204.9
"""
NODE = ["gpu-a"] * 8


def test_a_table_of_one_node() -> None:
    text = f"# Collective test starting: all_reduce_perf\n{device_lines(NODE)}\n{HEAD}{ROWS}"
    found = read_nccl_tests(text, "out.txt")
    assert found.hosts == tuple(NODE)
    small, large = found.points
    assert (small.group, small.kind, small.ranks) == ("inside", "all_reduce", 8)
    assert (large.num_bytes, large.seconds) == (1073741824, pytest.approx(5e-3))
    assert large.bus_rate == pytest.approx(375.81e9, rel=1e-4)  # as the binary computes it
    judgement = judge(found, parse_cluster("8xH100"), 0.8)
    assert not judgement.failed
    assert judge(found, parse_cluster("8xB200"), 0.8).failed


def test_an_old_table_without_names_and_roots() -> None:
    row = "  16777216  4194304  float   500.0  33.55  16.78      0   480.0  34.95  17.48    N/A\n"
    text = f"{device_lines(['a', 'b'])}\n{HEAD}{row}"
    [point] = read_nccl_tests(text, "alltoall_perf.log").points
    assert (point.group, point.kind, point.seconds) == ("between", "all_to_all", 500e-6)
    with pytest.raises(UserError, match="does not say which collective"):
        read_nccl_tests(text, "out.log")


def test_wrong_elements_fail_the_gate() -> None:
    rows = ROWS.replace("214.75 375.81      0", "214.75 375.81     12")
    text = f"{device_lines(NODE + ['gpu-b'] * 8)}\n{HEAD}{rows}"
    found = read_nccl_tests(text, "all_reduce_perf.txt")
    assert found.points[1].group == "all"
    judgement = judge(found, parse_cluster("2x8xH100"), 0.8)
    assert [gate.name for gate in judgement.failed] == ["data"]
    assert "a rank: 12 wrong elements in all_reduce of 1.0 GiB" in judgement.failed[0].advice


@pytest.mark.parametrize(
    ("text", "says"), [(ROWS, "does not list the ranks"), (device_lines(NODE), "holds no results")]
)
def test_half_a_file_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read_nccl_tests(text, "all_reduce_perf.txt")
    assert caught.value.fix
