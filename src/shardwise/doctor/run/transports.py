"""NCCL's own log in the logs of a run: which transports it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.run.case import Case
from shardwise.verify.fabric.nccl_log import check_transports, read_log


def _gate(name: str) -> Callable[[Case], Iterator[str]]:
    """The figure of a transport that is not what the cluster should use."""

    def look(case: Case) -> Iterator[str]:
        if case.run.plan is None:
            return
        found = read_log("\n".join(log.text for log in case.logs if "NCCL INFO" in log.text))
        for gate in check_transports(found, case.run.plan.cluster):
            if gate.name == name and gate.verdict in ("fail", "warn"):
                yield f"{gate.figure}, expected: {gate.bound}"

    return look


TRANSPORTS: tuple[Check[Case], ...] = (
    Check(
        "SW340", "error", "NCCL uses TCP sockets instead of RDMA",
        "It found no card, and throughput between nodes collapses.",
        "check `ibv_devinfo` inside the job, NCCL_IB_HCA, and that NCCL_IB_DISABLE is unset",
        _gate("nccl network"),
    ),
    Check(
        "SW341", "warning", "NCCL does not use GPUDirect RDMA",
        "The host copies for the card: no [GDRDMA] in the log.",
        "modprobe nvidia_peermem; turn PCIe ACS off; NCCL_NET_GDR_LEVEL=SYS",
        _gate("nccl gpudirect"),
    ),
    Check(
        "SW342", "error", "GPUs of a node exchange through host memory",
        "NVLink is not used.",
        "unset NCCL_P2P_DISABLE; start the fabric manager; nvidia-smi topo -m shows the links",
        _gate("nccl peer access"),
    ),
    Check(
        "SW343", "warning", "NVLink SHARP is not used",
        "All-reduce inside a node is about a quarter slower.",
        "start the fabric manager; unset NCCL_NVLS_ENABLE",
        _gate("nccl nvls"),
    ),
)  # fmt: skip
