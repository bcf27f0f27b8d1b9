"""What NCCL and torch's process groups say."""

from __future__ import annotations

from shardwise.doctor.check import Check
from shardwise.doctor.signatures.log import Logs, sign

_LOOK_ELSEWHERE = "look for the first error on another rank; this one only noticed"

NCCL: tuple[Check[Logs], ...] = (
    sign(
        "SW501", "error", "NCCL finds no network interface",
        r"[Nn]o socket interface found",
        "NCCL_SOCKET_IFNAME excludes every interface, or only loopback is up.",
        "set NCCL_SOCKET_IFNAME to an interface of `ip addr`, or unset it",
    ),
    sign(
        "SW502", "warning", "NCCL finds no RDMA card",
        r"NET/IB : No device found",
        "Traffic between nodes goes over TCP. On a node without such cards that is expected.",
        "in a container give it /dev/infiniband and IPC_LOCK; check `ibv_devinfo` and NCCL_IB_HCA",
    ),
    sign(
        "SW503", "error", "Memory could not be locked for RDMA",
        r"ibv_(?:create_qp|reg_mr\w*|create_cq) failed with error Cannot allocate memory",
        "The limit of locked memory is too low for the buffers of NCCL.",
        "ulimit -l unlimited; LimitMEMLOCK=infinity for slurmd; --ulimit memlock=-1 for Docker",
    ),
    sign(
        "SW504", "error", "A packet was sent again and again without an answer (RDMA error 12)",
        r"Got completion from peer [^\n]*(?:error |status=)12\b",
        "A cable, a switch port or the other card is down, or RoCE loses packets.",
        "check the link counters of both hosts; for RoCE flow control; then `shardwise fabric`",
    ),
    sign(
        "SW505", "error", "An RDMA connection was closed (RDMA error 5)",
        r"Got completion from peer [^\n]*(?:error |status=)5\b",
        "The other rank has died.",
        _LOOK_ELSEWHERE,
        follows=True,
    ),
    sign(
        "SW506", "error", "NCCL ran out of GPU memory",
        r"NCCL WARN Cuda failure (?:2 )?'out of memory'",
        "NCCL allocates its buffers outside of torch's allocator.",
        "leave it room: a smaller train.micro_batch; fewer channels with NCCL_MAX_NCHANNELS=8",
    ),
    sign(
        "SW507", "error", "Ranks have called different collectives",
        r"Message truncated : received \d+ bytes instead of \d+",
        "One rank sends another size than its peer expects: settings or code differ.",
        "give all nodes the same configuration, data and packages",
    ),
    sign(
        "SW508", "error", "A collective timed out",
        r"Watchdog caught collective operation timeout",
        "A rank did not arrive: it died, hangs, or is at another collective.",
        "look for the rank whose last collective has the lowest number, and at its stack",
        follows=True,
    ),
    sign(
        "SW509", "error", "Shared memory is full",
        r"(?:Error while (?:creating|attaching to) shared memory segment|"
        r"Call to posix_fallocate failed : No space left)",
        "NCCL exchanges data of one node through /dev/shm.",
        "--shm-size=16g or --ipc=host for Docker; an emptyDir with medium: Memory in Kubernetes",
    ),
    sign(
        "SW510", "error", "Two ranks use one GPU",
        r"Duplicate GPU detected",
        "The ranks of a node did not each take their own device.",
        "start as many ranks as GPUs: --nproc-per-node; check CUDA_VISIBLE_DEVICES",
    ),
    sign(
        "SW511", "error", "Ranks cannot connect to each other",
        r"[Cc]onnect to [^\n]* failed : (?:Connection refused|No route to host|"
        r"Connection timed out|Network is unreachable)",
        "A firewall blocks NCCL's ports, or an address of the wrong network is used.",
        "open the ports between nodes; set NCCL_SOCKET_IFNAME to the network that nodes share",
    ),
    sign(
        "SW512", "error", "NCCL was called wrongly",
        r"ncclInvalid(?:Usage|Argument)",
        "Often two ranks on one GPU, or a tensor on another device.",
        "run again with NCCL_DEBUG=WARN; it names the call",
    ),
    sign(
        "SW513", "error", "NCCL failed inside",
        r"ncclInternalError",
        "Often different versions of NCCL on the nodes, or a broken topology in a VM.",
        "compare versions with NCCL_DEBUG=VERSION on all nodes; update NCCL",
    ),
    sign(
        "SW514", "error", "Another rank has gone",
        r"ncclRemoteError",
        "The network failed, or a process ended.",
        _LOOK_ELSEWHERE,
        follows=True,
    ),
    sign(
        "SW515", "error", "A system call of NCCL failed",
        r"ncclSystemError",
        "A socket, shared memory or a card failed. NCCL's own warning says which.",
        "run again with NCCL_DEBUG=WARN, and look at the lines with NCCL WARN",
        follows=True,
    ),
    sign(
        "SW516", "error", "A CUDA call of NCCL failed",
        r"ncclUnhandledCudaError",
        "The GPU failed or is out of memory. NCCL's own warning says which.",
        "run again with NCCL_DEBUG=WARN; look for an Xid in `dmesg`",
        follows=True,
    ),
    sign(
        "SW517", "error", "The EFA plugin found no provider",
        r"NET/OFI (?:No eligible providers were found|Unable to find a protocol)",
        "NCCL falls back to TCP on AWS.",
        "install libfabric and aws-ofi-nccl; give the pod vpc.amazonaws.com/efa",
    ),
    sign(
        "SW518", "warning", "The IOMMU translates addresses of devices",
        r'Missing "iommu=pt" from kernel command line',
        "Transfers between devices hang or are slow.",
        "add iommu=pt to the kernel's command line, and restart the node",
    ),
    sign(
        "SW519", "error", "NVLink SHARP could not be used",
        r"Failed to bind NVLink SHARP \(NVLS\) Multicast memory",
        "The fabric manager or an NVSwitch is in a bad state.",
        "systemctl restart nvidia-fabricmanager; until then export NCCL_NVLS_ENABLE=0",
    ),
    sign(
        "SW520", "error", "Ranks have different versions of NCCL",
        r"Mismatched NCCL version detected",
        "They do not understand each other.",
        "install the same torch and nvidia-nccl package on all nodes",
    ),
    sign(
        "SW521", "error", "The watchdog of a rank got stuck",
        r"watchdog got stuck for",
        "A CUDA call or Python's lock was held for minutes.",
        "look at the stacks of that rank; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC gives it longer",
        follows=True,
    ),
    sign(
        "SW522", "error", "Ranks are at different collectives",
        r"Detected mismatch between collectives on ranks",
        "One rank took another way through the code: other settings, data or an error.",
        "give all nodes the same configuration and packages",
    ),
    sign(
        "SW523", "error", "An RDMA card could not be opened",
        r"NET/IB : Unable to open device",
        "The container may not use it, or another process has it alone.",
        "give the container /dev/infiniband; check NCCL_IB_HCA",
    ),
    sign(
        "SW524", "error", "A plugin of NCCL could not be loaded",
        r"NET/Plugin[: ][^\n]*(?:Failed to initialize|Could not find:[^\n]*ncclNet)",
        "NCCL uses its own transports instead, which may be slower.",
        "match the plugin's version to that of NCCL, or unset NCCL_NET_PLUGIN",
    ),
)  # fmt: skip
