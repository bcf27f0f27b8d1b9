"""NCCL's log lines, as its versions write them, and what they mean on which cluster."""

from __future__ import annotations

import pytest

from shardwise.facts.cluster import parse_cluster
from shardwise.verify.fabric.nccl_log import Transports, captured_log, check_transports, read_log

GOOD = """
gpu-a:801:801 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.4<0>
NCCL version 2.27.5+cuda12.9
gpu-a:801:842 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.4<0>
gpu-a:801:842 [0] NCCL INFO Using network IB
gpu-a:801:842 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
gpu-a:801:842 [0] NCCL INFO Channel 00/16 : 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
gpu-a:801:850 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
gpu-a:801:850 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/1(8)/GDRDMA(PCI)
gpu-a:801:842 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu-a:801:842 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC
"""
BAD = """
gpu-a:801:842 [0] NCCL INFO NET/IB : No device found.
gpu-a:801:842 [0] NCCL INFO Using network Socket
gpu-a:801:842 [0] NCCL INFO NVLS multicast support is not available on dev 0
gpu-a:801:850 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/Socket/0
gpu-a:801:842 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
"""
STAGED = """
gpu-a:801:842 [0] NCCL INFO Using network AWS Libfabric
gpu-a:801:850 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/AWS Libfabric/0
gpu-a:801:850 [0] NCCL INFO Channel 01/0 : 15[7] -> 0[0] [receive] via NET/AWS Libfabric/1/GDRDMA
"""


def verdicts(log: str, cluster: str) -> dict[str, str]:
    gates = check_transports(read_log(log), parse_cluster(cluster))
    assert all(gate.advice for gate in gates if gate.verdict not in ("pass",))
    return {gate.name.removeprefix("nccl "): gate.verdict for gate in gates}


def test_every_line_is_read() -> None:
    found = read_log(GOOD)
    assert found == Transports(
        version="2.27.5+cuda12.9", networks=("IB",), peer=2, direct=2, nvls=1
    )
    assert read_log(BAD) == Transports(networks=("Socket",), shared=1, sockets=1, no_nvls=1)
    assert read_log(STAGED) == Transports(networks=("AWS Libfabric",), direct=1, staged=1)
    assert (found + read_log(BAD)).networks == ("IB", "Socket")
    assert (found + read_log(BAD)).channels == 6
    assert Transports.from_dict(found.to_dict()) == found
    assert read_log("a log of something else\n").channels == 0


def test_a_good_log_passes() -> None:
    expected = {"network": "pass", "gpudirect": "pass", "peer access": "pass", "nvls": "pass"}
    assert verdicts(GOOD, "2x8xH100") == expected


def test_sockets_on_infiniband_and_host_memory_on_nvlink_fail() -> None:
    expected = {"network": "fail", "peer access": "fail", "nvls": "warn"}
    assert verdicts(BAD, "2x8xH100") == expected


def test_the_same_is_right_where_there_is_nothing_better() -> None:
    """Geforce cards on Ethernet have neither."""
    expected = {"network": "pass", "peer access": "pass", "nvls": "skip"}
    assert verdicts(BAD, "2x8xRTX-4090") == expected


def test_a_card_that_the_host_copies_for_is_a_warning() -> None:
    assert verdicts(STAGED, "2x8xH100") == {"network": "pass", "gpudirect": "warn"}


def test_nccl_is_told_where_to_write_unless_someone_else_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with captured_log("cpu") as path:
        assert path is None
    with captured_log("cuda") as path:
        import os

        assert path is not None
        assert os.environ["NCCL_DEBUG_FILE"] == str(path)
        assert path.parent.is_dir()
    assert not path.parent.exists()
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with captured_log("cuda") as path:
        assert path is None
