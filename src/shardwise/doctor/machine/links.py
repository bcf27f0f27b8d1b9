"""Links of a node: RDMA cards, interfaces, PCIe access control, and NCCL's variables."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.machine.node import Node

_PREFIXES = ("infiniband", "roce")
# What NCCL reads as "do not use it".
_ON = ("1", "true", "yes")
_GOOD_NCCL = [2, 20]
_DEBUG_EVERYTHING = ("INFO", "TRACE")


def _names(text: str) -> tuple[bool, bool, list[str]]:
    """(whether others are meant, whether names are exact, the names) of NCCL's `^=a,b`."""
    other = text.startswith("^")
    rest = text.removeprefix("^")
    exact = rest.startswith("=")
    return other, exact, [name.partition(":")[0] for name in rest.removeprefix("=").split(",")]


def _unknown_interface(node: Node) -> Iterator[str]:
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        other, exact, wanted = _names(node.environ.get(variable, ""))
        if other or not any(wanted) or not node.interfaces:
            continue
        # gloo takes whole names, NCCL the beginnings of names.
        exact = exact or variable.startswith("GLOO")
        there = [
            name
            for name in node.interfaces
            for prefix in wanted
            if name == prefix or (not exact and prefix and name.startswith(prefix))
        ]
        if not there:
            yield (
                f"{variable}={node.environ[variable]}, and the interfaces are "
                f"{', '.join(node.interfaces)}"
            )
        elif all(node.interfaces[name] == "down" for name in there):
            yield f"{variable}={node.environ[variable]}: {', '.join(there)} is down"


def _unknown_card(node: Node) -> Iterator[str]:
    text = node.environ.get("NCCL_IB_HCA", "")
    other, exact, wanted = _names(text)
    cards = sorted({port.card for port in node.rdma_ports})
    if other or not text:
        return
    missing = [
        name
        for name in wanted
        if not any(card == name or (not exact and card.startswith(name)) for card in cards)
    ]
    if missing:
        yield f"NCCL_IB_HCA={text}, and the cards are {', '.join(cards) or 'none'}"


def _no_card(node: Node) -> Iterator[str]:
    plan = node.plan
    if plan is None or plan.cluster.num_nodes == 1 or not node.gpus or node.rdma_ports:
        return
    expected = plan.cluster.fabric.between.name
    if expected.startswith(_PREFIXES):
        yield f"the plan counts with {expected}, and this node shows no RDMA card"


def _port_down(node: Node) -> Iterator[str]:
    down = [port for port in node.rdma_ports if port.state != "ACTIVE"]
    is_partly = len(down) < len(node.rdma_ports)
    for port in down if node.gpus or is_partly else ():
        yield f"{port.card} port {port.port} is {port.state or 'in an unknown state'}"


def _uneven_rates(node: Node) -> Iterator[str]:
    rates = sorted({port.rate for port in node.rdma_ports if port.state == "ACTIVE"})
    if len(rates) > 1 and "NCCL_IB_HCA" not in node.environ:
        yield f"active RDMA ports have rates {', '.join(rates)}"


def _switched_off(node: Node) -> Iterator[str]:
    if node.environ.get("NCCL_IB_DISABLE", "").lower() in _ON and node.rdma_ports:
        yield "NCCL_IB_DISABLE=1 on a node with RDMA cards"
    if node.environ.get("NCCL_P2P_DISABLE", "").lower() in _ON and len(node.gpus) > 1:
        yield "NCCL_P2P_DISABLE=1: GPUs of this node exchange through host memory"
    if node.environ.get("NCCL_SHM_DISABLE", "").lower() in _ON:
        yield "NCCL_SHM_DISABLE=1: ranks of this node may exchange over the network"


def _no_direct_access(node: Node) -> Iterator[str]:
    if node.gpus and node.rdma_ports and "nvidia_peermem" not in node.modules:
        yield "the module nvidia_peermem is not loaded"


def _access_control(node: Node) -> Iterator[str]:
    if node.gpus and node.bridges:
        shown = ", ".join(node.bridges[:4]) + (" and more" if len(node.bridges) > 4 else "")
        yield f"ACS is on at {len(node.bridges)} PCIe bridges: {shown}"


def _old_nccl(node: Node) -> Iterator[str]:
    numbers = [int(part) for part in (node.nccl or "").split(".") if part.isdecimal()]
    if node.gpus and numbers and numbers < _GOOD_NCCL:
        yield f"NCCL {node.nccl}"


def _much_logging(node: Node) -> Iterator[str]:
    debug = node.environ.get("NCCL_DEBUG", "").upper()
    detail = node.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
    if debug in _DEBUG_EVERYTHING and "NCCL_DEBUG_FILE" not in node.environ:
        yield f"NCCL_DEBUG={debug}"
    if detail == "DETAIL":
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL checks each collective with another one"
    if node.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield "CUDA_LAUNCH_BLOCKING=1 waits for every kernel"


LINKS: tuple[Check[Node], ...] = (
    Check(
        "SW240", "error", "NCCL or gloo is told to use an interface that is not there",
        "Ranks hang at init_process_group, or end with: no socket interface found.",
        "name one of these interfaces, such as NCCL_SOCKET_IFNAME=eth0, or unset the variable",
        _unknown_interface,
    ),
    Check(
        "SW241", "error", "NCCL is told to use an RDMA card that is not there",
        "NCCL falls back to TCP sockets, and throughput collapses.",
        "set NCCL_IB_HCA to cards that `ibv_devinfo` shows, or unset it",
        _unknown_card,
    ),
    Check(
        "SW242", "error", "There is no RDMA card",
        "Collectives between nodes then go over TCP sockets, many times slower than planned.",
        "give the job the cards (in a container /dev/infiniband), or write cluster.interconnect",
        _no_card,
    ),
    Check(
        "SW243", "error", "An RDMA port is down",
        "NCCL uses fewer cards, or hangs on the one that is down.",
        "check cable and switch port: ibstat; leave the card out with NCCL_IB_HCA",
        _port_down,
    ),
    Check(
        "SW244", "warning", "RDMA ports have different rates",
        "NCCL may use a management card beside the fast ones, and wait for it.",
        "name the fast cards: NCCL_IB_HCA=mlx5_0,mlx5_1",
        _uneven_rates,
    ),
    Check(
        "SW245", "warning", "A fast transport is switched off",
        "Somebody set this to get around a fault, and it costs most of the bandwidth.",
        "unset the variable, and see with `shardwise fabric` whether it is still needed",
        _switched_off,
    ),
    Check(
        "SW246", "note", "GPUDirect RDMA may be missing",
        "Without it the host copies for the card. Newer drivers can use dmabuf instead.",
        "modprobe nvidia_peermem; look for [GDRDMA] in the log of NCCL_DEBUG=INFO",
        _no_direct_access,
    ),
    Check(
        "SW247", "error", "PCIe access control (ACS) is on",
        "Traffic between GPU and card goes up to the CPU and back. NCCL drops GPUDirect silently.",
        "turn ACS off in the BIOS, or for each bridge: setpci -s ADDRESS ECAP_ACS+0x6.w=0000",
        _access_control,
    ),
    Check(
        "SW248", "warning", "NCCL is old",
        "Versions before 2.20 use more memory for each communicator and know fewer transports.",
        "install a newer torch, or nvidia-nccl-cu12",
        _old_nccl,
    ),
    Check(
        "SW249", "note", "A debugging variable is set",
        "It costs time in every step, or fills the disk with logs.",
        "unset it when the fault is found",
        _much_logging,
    ),
)  # fmt: skip
