"""One line of a real log for every signature, as the program prints it."""

from __future__ import annotations

KNOWN_LINES: dict[str, str] = {
    # NCCL and process groups
    "SW501": "gpu-a:812:812 [0] bootstrap.cc:96 NCCL WARN Bootstrap : no socket interface found",
    "SW502": "gpu-a:812:990 [0] NCCL INFO NET/IB : No device found.",
    "SW503": "gpu-a:812:990 [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr_iova2 failed with "
    "error Cannot allocate memory",
    "SW504": "gpu-a:1:9 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
    "10.0.0.2<42353> with status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_3",
    "SW505": "gpu-a:1:9 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
    "10.0.0.2<42353> with status=5 opcode=0 len=0 vendor err 249 (Send) hca mlx5_3",
    "SW506": "gpu-a:1:9 [0] include/alloc.h:185 NCCL WARN Cuda failure 2 'out of memory'",
    "SW507": "gpu-a:1:9 [0] NCCL WARN Message truncated : received 1024 bytes instead of 256",
    "SW508": "[rank3]:[E1118 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=4711, OpType=_ALLGATHER_BASE, NumelIn=1, NumelOut=8, "
    "Timeout(ms)=600000) ran for 600012 milliseconds before timing out.",
    "SW509": "gpu-a:1:9 [0] misc/shmutils.cc:87 NCCL WARN Error while creating shared memory "
    "segment /dev/shm/nccl-4bYqCc (size 9637888), error: No space left on device (28)",
    "SW510": "gpu-a:1:9 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both "
    "on CUDA device 1b000",
    "SW511": "gpu-a:1:9 [0] misc/socket.cc:441 NCCL WARN socketFinalizeConnect: connect to "
    "10.0.0.2<43219> failed : Connection refused",
    "SW512": "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "SW513": "ncclInternalError: Internal check failed.",
    "SW514": "ncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.",
    "SW515": "ncclSystemError: System call (e.g. socket, malloc) or external library call failed "
    "or device error.",
    "SW516": "ncclUnhandledCudaError: Call to CUDA function failed.",
    "SW517": "gpu-a:1:9 [0] NCCL WARN NET/OFI Unable to find a protocol that worked.  Failing "
    "initialization.",
    "SW518": 'gpu-a:1:9 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead '
    "to system instablity or hang!",
    "SW519": "gpu-a:1:9 [0] transport/nvls.cc:245 NCCL WARN Failed to bind NVLink SHARP (NVLS) "
    "Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed in the "
    "present state'.",
    "SW520": "gpu-a:1:9 [0] NCCL WARN Mismatched NCCL version detected : rank 0 version 22809 "
    "rank 8 version 22602",
    "SW521": "[rank0]:[F1118 ProcessGroupNCCL.cpp:1553] [PG ID 0 PG GUID 0 Rank 0] "
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring "
    "enqueued collectives.",
    "SW522": "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
    "collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE)",
    "SW523": "gpu-a:1:9 [0] transport/net_ib.cc:198 NCCL WARN NET/IB : Unable to open device "
    "mlx5_0",
    "SW524": "gpu-a:1:9 [0] NCCL INFO NET/Plugin: Failed to initialize NET plugin IBext_v10",
    # CUDA
    "SW530": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacity of 79.19 GiB of which 1.02 GiB is free.",
    "SW531": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "SW532": "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "SW533": "../aten/src/ATen/native/cuda/Indexing.cu:1255: indexSelectLargeIndex: block: [9,0,0],"
    " thread: [1,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
    "SW534": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "SW535": "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    "SW536": "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    "SW537": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "SW538": "RuntimeError: CUDA error: system not yet initialized",
    "SW539": "RuntimeError: No CUDA GPUs are available",
    "SW540": "[91.2] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008",
    "SW541": "RuntimeError: CUDA error: unspecified launch failure",
    "SW542": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
    "`cublasCreate(handle)`",
    "SW543": "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling "
    "`cublasGemmEx( handle, opa, opb, m, n, k)`",
    "SW544": "RuntimeError: CUDA error: invalid device ordinal",
    "SW545": "Failed to initialize NVML: Driver/library version mismatch",
    "SW546": "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
    "SW547": "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "SW548": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
    "262144, Hardware limit: 101376.",
    "SW549": "ImportError: libcudnn.so.9: cannot open shared object file: No such file or "
    "directory",
    # torch and torchrun
    "SW560": "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
    "local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: "
    "address already in use",
    "SW561": "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection "
    "to the C10d store has failed. See inner exception for details.",
    "SW562": "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. "
    "2/3 clients joined.",
    "SW563": "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms "
    "while trying to connect to (gpu-a, 29500).",
    "SW564": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "SW565": "  exitcode  : -9 (pid: 4711)",
    "SW566": "  exitcode  : -11 (pid: 4711)",
    "SW567": "  traceback : Signal 7 (SIGBUS) received by PID 4711",
    "SW568": "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
    "SW569": "OSError: [Errno 24] Too many open files",
    "SW570": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed "
    "by peer [127.0.0.1]:23456",
    "SW571": "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:168]"
    " ifa != nullptr. Unable to find address for: enp3s0",
    "SW572": "RuntimeError: Expected to have finished reduction in the prior iteration before "
    "starting a new one.",
    "SW573": "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:",
    "SW574": "OSError: meta/llama is not a local folder and is not a valid model identifier listed "
    "on 'https://huggingface.co/models'",
    "SW575": "huggingface_hub.errors.GatedRepoError: 403 Client Error.",
    "SW576": "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in "
    "directory runs/demo/checkpoints/step-00000060.",
    "SW577": "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded",
    "SW578": "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and "
    "torch.float32",
    "SW579": "W1118 12:00:00 torch/_dynamo/convert_frame.py:1016] [0/8] torch._dynamo hit "
    "config.recompile_limit (8)",
    "SW580": "AssertionError: FSDP expects uniform original parameter dtype but got "
    "{torch.bfloat16, torch.float32}",
    "SW581": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "SW582": "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert "
    "all torch.Tensor to DTensor before calling distributed operators!",
    "SW583": "ModuleNotFoundError: No module named 'flash_attn'",
    "SW584": "ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by "
    "libtorch.so)",
    "SW585": "NotImplementedError: Cannot copy out of meta tensor; no data!",
    "SW586": "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
    "SW587": "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:"
    "dict_keys([1])",
    "SW588": "[rank0]:[W1118 ProcessGroupNCCL.cpp:1476] Warning: WARNING: "
    "destroy_process_group() was not called before program exit, which can leak resources.",
    # Slurm
    "SW600": "slurmstepd: error: *** JOB 4711 ON gpu-a CANCELLED AT 2026-11-18T12:00:00 DUE TO "
    "TIME LIMIT ***",
    "SW601": "slurmstepd: error: *** JOB 4711 ON gpu-a CANCELLED AT 2026-11-18T12:00:00 DUE TO "
    "PREEMPTION ***",
    "SW602": "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step "
    "tasks have been OOM Killed.",
    "SW603": "slurmstepd: error: *** STEP 4711.0 ON gpu-a CANCELLED AT 2026-11-18T12:00:00 DUE TO "
    "NODE FAILURE ***",
    "SW604": "srun: error: Node failure on gpu-b",
    "SW605": "srun: error: Unable to create step for job 4711: More processors requested than "
    "permitted",
    "SW606": "sbatch: error: Batch job submission failed: Requested node configuration is not "
    "available",
    "SW607": "sbatch: error: Batch job submission failed: Invalid account or account/partition "
    "combination specified",
    "SW608": "srun: error: gpu-b: task 1: Exited with exit code 1",
    "SW609": "slurmstepd: error: execve(): torchrun: No such file or directory",
    "SW610": "  4711  gpu  train  me  PD  0:00  4 (QOSMaxGRESPerUser)",
    "SW611": "srun: Job 4711 step creation temporarily disabled, retrying (Requested nodes are "
    "busy)",
    "SW612": "slurmstepd: error: couldn't chdir to `/home/me/runs': No such file or directory: "
    "going to /tmp instead",
    "SW613": "slurmstepd: error: *** STEP 4711.0 ON gpu-a CANCELLED AT 2026-11-18T12:00:00 ***",
    # Kubernetes
    "SW630": "      Reason:       OOMKilled",
    "SW631": "Warning  FailedScheduling  5m  default-scheduler  0/9 nodes are available: 9 "
    "Insufficient nvidia.com/gpu.",
    "SW632": "train-0   0/1   ImagePullBackOff   0   2m",
    "SW633": "train-0   0/1   CrashLoopBackOff   5 (20s ago)   8m",
    "SW634": "Message: The node was low on resource: ephemeral-storage. Threshold quantity: 10%",
    "SW635": 'Warning  FailedMount  1m  kubelet  MountVolume.SetUp failed for volume "data"',
    "SW636": 'Warning  FailedAttachVolume  Multi-Attach error for volume "pvc-1" Volume is '
    "already used by pod(s) train-0",
    "SW637": "0/9 nodes are available: 9 node(s) had untolerated taint {nvidia.com/gpu: present}.",
    "SW638": "Normal  Preempted  1m  default-scheduler  Preempted by pod 7c1 on node gpu-a",
    "SW639": "Warning  BackoffLimitExceeded  1m  job-controller  Job has reached the specified "
    "backoff limit",
    "SW640": "Pod was active on the node longer than the specified deadline",
    "SW641": "Warning  Unschedulable  1m  volcano  pod group is not ready, 3 Pending, 4 "
    "minAvailable.",
    "SW642": 'Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot create '
    'resource "jobs"',
    "SW643": 'pods "train-0" is forbidden: exceeded quota: gpu, requested: '
    "requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8",
    "SW644": "Warning  NodeNotReady  1m  node-controller  Node is not ready",
    "SW645": "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
    # storage
    "SW660": "OSError: [Errno 28] No space left on device",
    "SW661": "OSError: [Errno 122] Disk quota exceeded",
    "SW662": "OSError: [Errno 30] Read-only file system: 'runs/demo'",
    "SW663": "OSError: [Errno 116] Stale file handle",
    "SW664": "OSError: [Errno 5] Input/output error",
    "SW665": "PermissionError: [Errno 13] Permission denied: '/data/train.jsonl'",
    "SW666": "safetensors_rust.SafetensorError: Error while deserializing header: "
    "MetadataIncompleteBuffer",
    "SW667": "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
    "directory",
    "SW668": "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the "
    "GetObject operation",
    "SW669": "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "SW670": "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url",
    "SW671": "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/bucket'",
    "SW672": "Lustre: scratch-OST0003-osc: Connection to scratch-OST0003 (at 10.0.0.9@o2ib) was "
    "lost; in progress operations using this service will wait for recovery to complete",
    "SW673": "nfs: server 10.0.0.9 not responding, still trying",
    "SW674": "OSError: [Errno 37] No locks available",
    "SW675": "socket.gaierror: [Errno -3] Temporary failure in name resolution",
}

# What healthy runs print, and what looks like a fault and is none.
HEALTHY = """\
2 ranks on this CPU, full_shard, mesh replicate=1 x shard=2
resumed at step 60 from runs/demo/checkpoints/step-00000060
step  61/120  loss 2.6137  gnorm 0.60  lr 1.8e-03  eta 23s  2.6k tok/s/rank
  mem 0.4/12 GiB (plan 0.5)  data 0%
saved step 120 (stage 0.02 s, write 0.11 s, commit 0.00 s, read back 0.03 s)
gpu-a:812:812 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>
gpu-a:812:812 [0] NCCL INFO NET/Plugin: Loaded net plugin IBext_v10 (v10)
gpu-a:812:990 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>
gpu-a:812:990 [0] NCCL INFO Using network IB
gpu-a:812:990 [0] NCCL INFO NVLS multicast support is available on dev 0
gpu-a:812:990 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
gpu-a:812:990 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu-a:812:990 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 16 - Init COMPLETE
W1118 12:00:00 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment variable to be 1
Loading checkpoint shards: 100%|##########| 4/4
slurmstepd: info: Setting TmpFS quota to 100G
train-0   1/1   Running   0   2m
"""
