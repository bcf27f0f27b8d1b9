"""What CUDA, its libraries and the driver say."""

from __future__ import annotations

from shardwise.doctor.check import Check
from shardwise.doctor.signatures.log import Logs, sign

CUDA: tuple[Check[Logs], ...] = (
    sign(
        "SW530", "error", "A GPU ran out of memory",
        r"CUDA out of memory",
        "The step needs more than the device has, or other processes use a part of it.",
        "`shardwise plan` shows what memory goes to: a smaller train.micro_batch, or "
        "memory.checkpoint_activations=full",
    ),
    sign(
        "SW531", "error", "A kernel accessed memory that is not its own",
        r"an illegal memory access was encountered",
        "A kernel or an index is wrong. The line that reports it is a later one.",
        "run again with CUDA_LAUNCH_BLOCKING=1 to see the call; try train.kernels=torch",
    ),
    sign(
        "SW532", "error", "An index is out of range on the GPU",
        r"device-side assert triggered",
        "Usually a token id that the model has no row for, or a wrong label.",
        "compare tokenizer and vocabulary; the first CUDA assertion in the log names the kernel",
    ),
    sign(
        "SW533", "error", "A token has no row in the embedding",
        r"Assertion `srcIndex < srcSelectDimSize` failed",
        "The tokenizer has more tokens than the model.",
        "use the model's own tokenizer: leave data.tokenizer out",
    ),
    sign(
        "SW534", "error", "The GPU's memory has an uncorrectable error",
        r"uncorrectable ECC error encountered",
        "The hardware failed; results of that GPU are lost.",
        "drain the node, reset the GPU, and replace it if it returns",
    ),
    sign(
        "SW535", "error", "The GPU is reserved by another process",
        r"all CUDA-capable devices are busy or unavailable",
        "The compute mode is exclusive, or a dead process still holds it.",
        "nvidia-smi shows who; nvidia-smi --compute-mode 0",
    ),
    sign(
        "SW536", "error", "The driver is too old for this torch",
        r"(?:CUDA driver version is insufficient|The NVIDIA driver on your system is too old)",
        "torch was built for a newer CUDA than the driver knows.",
        "update the driver, or install a torch for an older CUDA",
    ),
    sign(
        "SW537", "error", "torch has no code for this GPU",
        r"no kernel image is available for execution on the device",
        "The installed torch was not built for this compute capability.",
        "install a torch that lists the GPU: python -c 'import torch; "
        "print(torch.cuda.get_arch_list())'",
    ),
    sign(
        "SW538", "error", "NVSwitch is not ready",
        r"system not yet initialized",
        "The fabric manager does not run, or has another version than the driver.",
        "systemctl start nvidia-fabricmanager, of the driver's version",
    ),
    sign(
        "SW539", "error", "CUDA finds no GPU",
        r"(?:No CUDA GPUs are available|Found no NVIDIA driver on your system|"
        r"Unexpected error from cudaGetDeviceCount)",
        "The job has no GPU, the container has no driver, or CUDA_VISIBLE_DEVICES is wrong.",
        "check nvidia-smi inside the job, --gpus of Docker, and CUDA_VISIBLE_DEVICES",
    ),
    sign(
        "SW540", "error", "The driver reports an error of a GPU (XID)",
        r"NVRM: Xid",
        "48, 63, 64, 74, 79, 94 and 95 are hardware; 13 and 31 are usually a program.",
        "look the number up in NVIDIA's list; for hardware drain the node",
    ),
    sign(
        "SW541", "error", "A kernel failed",
        r"CUDA error: unspecified launch failure",
        "A kernel crashed, or the GPU did.",
        "look for an Xid in `dmesg`; run again with CUDA_LAUNCH_BLOCKING=1",
    ),
    sign(
        "SW542", "error", "cuBLAS could not allocate memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        "The GPU's memory is full when the first matmul runs.",
        "a smaller train.micro_batch; see that no other process is on the GPU",
    ),
    sign(
        "SW543", "error", "A matmul failed",
        r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)",
        "Often an earlier error of the same GPU, or memory that is full.",
        "look at the lines before it; look for an Xid in `dmesg`",
    ),
    sign(
        "SW544", "error", "A rank asks for a GPU that is not there",
        r"CUDA error: invalid device ordinal",
        "There are more ranks on the node than GPUs.",
        "start as many ranks as nvidia-smi shows GPUs: --nproc-per-node",
    ),
    sign(
        "SW545", "error", "The driver was updated without a restart",
        r"Driver/library version mismatch",
        "The loaded kernel module and the library have different versions.",
        "restart the node, or unload and load the nvidia modules",
    ),
    sign(
        "SW546", "error", "A GPU is lost",
        r"(?:GPU is lost|Unable to determine the device handle for GPU|"
        r"GPU has fallen off the bus)",
        "The GPU left the bus: power, heat or hardware.",
        "drain the node and restart it; replace the GPU if it returns",
    ),
    sign(
        "SW547", "error", "NVLink failed",
        r"uncorrectable NVLink error detected",
        "A link between GPUs failed during the run.",
        "drain the node; nvidia-smi nvlink --errorcounters shows the link",
    ),
    sign(
        "SW548", "error", "A Triton kernel needs more than the GPU has",
        r"out of resource: shared memory",
        "The kernel was tuned for another GPU.",
        "write train.kernels=torch, or memory.compile=false",
    ),
    sign(
        "SW549", "error", "A CUDA library is missing",
        r"(?:cannot open shared object file|Unable to load any of \{libcud)",
        "torch and a CUDA package do not belong together, or LD_LIBRARY_PATH hides them.",
        "install torch anew, and unset LD_LIBRARY_PATH",
    ),
)  # fmt: skip
