"""Limits of a node's operating system: files, locked memory, shared memory, RAM, ports, disk."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.machine.node import Node
from shardwise.launch.disk_room import checkpoint_bytes
from shardwise.plan.adam import ADAM_BYTES
from shardwise.plan.rank_share import trained_share
from shardwise.units import GIB, KIB, MIB, format_bytes, format_duration, format_rate

_FEWEST_FILES = 4096
# Without RDMA nothing is registered, and NCCL itself locks a few megabytes.
_LEAST_LOCKED = 64 * MIB
_SHM_OF_A_RANK = 64 * MIB
_LEAST_SHM = 1 * GIB
# Parameters, gradients and two moments of Adam in fp32.
_OFFLOADED_BYTES = 16
_LONGEST_SAVE_S = 600


def _few_files(node: Node) -> Iterator[str]:
    if node.open_files is not None and node.open_files < _FEWEST_FILES:
        yield f"ulimit -n is {node.open_files}, below {_FEWEST_FILES}"


def _little_locked(node: Node) -> Iterator[str]:
    has_cards = bool(node.rdma_ports) and bool(node.gpus)
    if has_cards and node.locked_bytes is not None and node.locked_bytes < _LEAST_LOCKED:
        yield f"ulimit -l is {node.locked_bytes // KIB} KiB on a node with RDMA cards"


def _small_shm(node: Node) -> Iterator[str]:
    ranks = len(node.gpus) or (node.plan.cluster.devices_per_node if node.plan else 1)
    needed = max(_LEAST_SHM, ranks * _SHM_OF_A_RANK) if node.gpus else _SHM_OF_A_RANK * ranks
    if node.shm_bytes is not None and node.shm_bytes < needed:
        yield f"/dev/shm has {format_bytes(node.shm_bytes)}; {ranks} ranks need about " + (
            format_bytes(needed)
        )


def _little_memory(node: Node) -> Iterator[str]:
    plan = node.plan
    if plan is None or node.memory_left is None:
        return
    setting, each = "memory.offload=cpu", _OFFLOADED_BYTES
    if not plan.decided.offload:
        setting, each = "memory.offload_optimizer=true", ADAM_BYTES
    if not (plan.decided.offload or plan.decided.offload_optimizer):
        return
    needed = trained_share(plan.model, plan.decided) * each * plan.cluster.devices_per_node
    if needed > node.memory_left:
        yield (
            f"{setting} puts {format_bytes(needed)} on each node, and "
            f"{format_bytes(node.memory_left)} are left here"
        )


def _port_taken(node: Node) -> Iterator[str]:
    if node.taken_port is not None:
        yield f"something listens on port {node.taken_port} of {node.host} already"


def _slow_disk(node: Node) -> Iterator[str]:
    plan, rate = node.plan, node.write_bytes_per_s
    if plan is None or not rate:
        return
    size = checkpoint_bytes(plan)
    save_s = size / rate / plan.cluster.num_nodes
    every, step_s = plan.config.checkpoint.every, plan.forecast.step_s if plan.forecast else None
    between_s = every * step_s if every and step_s else None
    too_long = save_s > _LONGEST_SAVE_S or (between_s is not None and save_s > between_s)
    if too_long:
        often = f", and a save every {format_duration(between_s)}" if between_s else ""
        yield (f"{format_bytes(size)} at {format_rate(rate)} take {format_duration(save_s)}{often}")


def _few_cores(node: Node) -> Iterator[str]:
    ranks = len(node.gpus)
    if ranks and node.cores < 2 * ranks:
        yield f"{node.cores} cores for {ranks} GPUs"


def _own_name(node: Node) -> Iterator[str]:
    plan = node.plan
    if plan is None or plan.cluster.num_nodes == 1:
        return
    if node.address is None:
        yield f"the name {node.host} leads to no address"
    elif node.address.startswith("127."):
        yield f"the name {node.host} leads to {node.address}, which other nodes cannot reach"


LIMITS: tuple[Check[Node], ...] = (
    Check(
        "SW201", "warning", "Few open files are allowed",
        "Ranks, loaders and NCCL open hundreds of files and sockets. The rest fails with EMFILE.",
        "raise it: ulimit -n 65536, LimitNOFILE in systemd, or `ulimits` of the container",
        _few_files,
    ),
    Check(
        "SW202", "warning", "Little memory may be locked",
        "RDMA registers memory. Without the right NCCL falls back to sockets or fails.",
        "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity for slurmd, or --ulimit memlock=-1",
        _little_locked,
    ),
    Check(
        "SW203", "warning", "/dev/shm is small",
        "NCCL's shared-memory transport and data workers need it; a bus error is the symptom.",
        "in Docker --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with medium: Memory",
        _small_shm,
    ),
    Check(
        "SW204", "error", "Host memory is too small for offload",
        "Parameters, gradients and both moments are in host memory: 16 bytes for a parameter.",
        "use more nodes, or write memory.offload=none with more GPUs, or optim.state=bf16",
        _little_memory,
    ),
    Check(
        "SW205", "error", "The rendezvous port is taken",
        "torchrun waits for ever where another service holds its port.",
        "choose another --rdzv-endpoint HOST:PORT, or end what holds the port: ss -ltnp",
        _port_taken,
    ),
    Check(
        "SW207", "warning", "The disk of the checkpoints is slow",
        "A save that takes longer than the time to the next one holds the training up.",
        "choose a faster place with runs_dir=DIRECTORY, or save less often with checkpoint.every",
        _slow_disk,
    ),
    Check(
        "SW208", "warning", "There are few CPU cores for the GPUs",
        "Each rank has a Python thread that launches kernels, NCCL's threads and data to prepare.",
        "ask for more cores: --cpus-per-task of Slurm, or requests.cpu of the pod",
        _few_cores,
    ),
    Check(
        "SW209", "warning", "The host's own name does not lead to it",
        "Ranks on other nodes are told this name or address, and wait for it in vain.",
        "mend /etc/hosts, or use the address of the network: --rdzv-endpoint ADDRESS:29500",
        _own_name,
    ),
)  # fmt: skip
