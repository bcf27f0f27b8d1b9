"""What torch, torchrun and Hugging Face libraries say."""

from __future__ import annotations

from shardwise.doctor.check import Check
from shardwise.doctor.signatures.log import Logs, sign

TORCH: tuple[Check[Logs], ...] = (
    sign(
        "SW560", "error", "The port of the store is taken",
        r"failed to listen on any local network address",
        "Another job, or what is left of the last one, holds MASTER_PORT.",
        "choose another --rdzv-endpoint HOST:PORT; see who it is: ss -ltnp",
    ),
    sign(
        "SW561", "error", "Nodes did not meet",
        r"Rendezvous(?:Timeout|Connection|Closed)Error",
        "A node did not start, or cannot reach the host of the rendezvous.",
        "check that all nodes run the same --rdzv-endpoint and --rdzv-id, and reach its port",
    ),
    sign(
        "SW562", "error", "Ranks are missing at the start",
        r"Timed out after \d+ seconds waiting for clients",
        "Fewer ranks were started than WORLD_SIZE says, or some died before.",
        "compare --nnodes and --nproc-per-node with what was started; read the other nodes' logs",
    ),
    sign(
        "SW563", "error", "The store cannot be reached",
        r"client socket has (?:timed out|failed to connect)",
        "MASTER_ADDR is wrong, a firewall is between, or rank 0 has not started.",
        "check that MASTER_ADDR is rank 0's node, and that its port is open",
    ),
    sign(
        "SW564", "error", "torchrun reports a rank that failed",
        r"ChildFailedError",
        "It repeats the error of the first rank that failed.",
        "read the log of the rank that it names as root cause",
        follows=True,
    ),
    sign(
        "SW565", "error", "A rank was killed",
        r"(?:Signal 9 \(SIGKILL\)|exitcode\s*: -9\b|killed by signal SIGKILL)",
        "Usually the kernel, because host memory ran out.",
        "dmesg shows oom-kill; give the job more memory, or load with fewer data.workers",
    ),
    sign(
        "SW566", "error", "A rank crashed",
        r"(?:Signal 11 \(SIGSEGV\)|exitcode\s*: -11\b|Fatal Python error: Segmentation fault|"
        r"killed by signal SIGSEGV)",
        "A library in C or C++ failed: often packages that do not fit together.",
        "compare versions with constraints.txt; the stack above the line names the library",
    ),
    sign(
        "SW567", "error", "A rank got a bus error",
        r"(?:Signal 7 \(SIGBUS\)|exitcode\s*: -7\b|Fatal Python error: Bus error|"
        r"killed by signal SIGBUS)",
        "Almost always /dev/shm is full, or a mapped file was cut.",
        "--shm-size=16g or --ipc=host for Docker; an emptyDir with medium: Memory in Kubernetes",
    ),
    sign(
        "SW568", "error", "A data worker died",
        r"DataLoader worker \(pid[^\n]*(?:exited unexpectedly|is killed by signal)",
        "Host memory or /dev/shm ran out, or a record broke the worker.",
        "look for oom-kill in `dmesg`; use fewer workers; enlarge /dev/shm",
    ),
    sign(
        "SW569", "error", "Too many files are open",
        r"Too many open files",
        "The limit of open files is low for this many ranks and connections.",
        "ulimit -n 65536 before the start",
    ),
    sign(
        "SW570", "error", "The connection to another rank was lost",
        r"(?:Connection closed by peer|Connection reset by peer)",
        "The other rank ended.",
        "look for the first error on another rank; this one only noticed",
        follows=True,
    ),
    sign(
        "SW571", "error", "gloo finds no interface",
        r"Unable to find (?:address|interface) for",
        "GLOO_SOCKET_IFNAME names an interface that is not there, or the host's name leads "
        "nowhere.",
        "set GLOO_SOCKET_IFNAME to an interface of `ip addr`; mend /etc/hosts",
    ),
    sign(
        "SW572", "error", "Some parameters got no gradient (DDP)",
        r"Expected to have finished reduction in the prior iteration",
        "DDP waits for gradients of parameters that the loss does not use.",
        "freeze them, or use FSDP2, which does not wait",
    ),
    sign(
        "SW573", "error", "Weights do not fit the model",
        r"(?:Error\(s\) in loading state_dict|size mismatch for)",
        "The checkpoint is of another shape, or its names have a wrapper's prefix.",
        "check model.name and model.weights_from; `shardwise checkpoint verify RUN`",
    ),
    sign(
        "SW574", "error", "There is no such model on the hub",
        r"is not a local folder and is not a valid model identifier",
        "The name is wrong, the model is private, or the machine is offline.",
        "check model.name; hf auth login; or name a local directory",
    ),
    sign(
        "SW575", "error", "The model needs a licence that was not accepted",
        r"(?:GatedRepoError|Cannot access gated repo|Access to model \S+ is restricted)",
        "The hub refuses its files to this account.",
        "accept it on the model's page, and log in with `hf auth login`",
    ),
    sign(
        "SW576", "error", "from_pretrained finds no weights",
        r"Error no file named",
        "A sharded checkpoint of FSDP is no Hugging Face directory.",
        "make one: shardwise export RUN --to DIR",
    ),
    sign(
        "SW577", "error", "A file wants to run code when it is loaded",
        r"Weights only load failed",
        "torch.load refuses pickled objects other than tensors.",
        "convert it to safetensors where you trust it",
    ),
    sign(
        "SW578", "error", "FSDP1 cannot flatten parameters of two formats",
        r"Must flatten tensors with uniform dtype",
        "Adapters in fp32 beside a base in bf16 are one flat parameter in FSDP1.",
        "use FSDP2, which shards each parameter by itself: `shardwise migrate FILE`",
    ),
    sign(
        "SW579", "warning", "A block is compiled again and again",
        r"torch\._dynamo hit config\.(?:recompile|cache_size)_limit",
        "Shapes or values change at each call, and torch falls back to slow code.",
        "give all batches one shape, or write memory.compile=false",
    ),
    sign(
        "SW580", "error", "FSDP2 got parameters of two formats in one unit",
        r"FSDP expects uniform original parameter dtype",
        "All trained parameters of a unit are reduced together.",
        "load the model in one dtype; adapters and norms in the same one",
    ),
    sign(
        "SW581", "error", "Nothing is trained",
        r"does not require grad and does not have a grad_fn",
        "All parameters that the loss depends on are frozen; with adapters and recompute the "
        "inputs need gradients.",
        "check the adapter's targets; model.enable_input_require_grads() in scripts",
    ),
    sign(
        "SW582", "error", "Sharded and plain tensors were mixed",
        r"got mixed torch\.Tensor and DTensor",
        "A part of the model is outside of fully_shard, or FSDP1 is combined with a 2-D mesh.",
        "shard every parameter with FSDP2 on one mesh",
    ),
    sign(
        "SW583", "error", "A package is missing",
        r"ModuleNotFoundError: No module named",
        "The environment of this node is not that of the others, or not complete.",
        "install it on every node, into the environment that the job uses",
    ),
    sign(
        "SW584", "error", "The system is too old for a package",
        r"version `GLIBC(?:XX)?_[\d.]+' not found",
        "A wheel was built for a newer system.",
        "use a newer container, or build the package there",
    ),
    sign(
        "SW585", "error", "A parameter has no data",
        r"Cannot copy out of meta tensor",
        "The model was built on the meta device, and a weight was not loaded.",
        "call to_empty, then load; check for keys that are missing in the checkpoint",
    ),
    sign(
        "SW586", "error", "Formats do not match in a matmul",
        r"(?:mat1 and mat2 must have the same dtype|expected (?:m1|mat1) and (?:m2|mat2) to have "
        r"the same dtype|expected scalar type \w+ but found \w+)",
        "A part of the model computes outside of the mixed-precision policy, such as recompute "
        "without autocast.",
        "use one policy: precision.param=bf16, and no autocast inside",
    ),
    sign(
        "SW587", "error", "A sharded checkpoint could not be read or written",
        r"CheckpointException",
        "One rank's file is missing or cut, or its disk is full. The first cause follows in the "
        "log.",
        "shardwise checkpoint verify RUN; make room on the disk",
    ),
    sign(
        "SW588", "error", "The process group was not closed",
        r"destroy_process_group\(\) was not called before program exit",
        "The program ended early; it is no cause by itself.",
        "look for the error before it",
        follows=True,
    ),
)  # fmt: skip
