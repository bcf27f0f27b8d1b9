"""Lines of logs that are known, with their cause and what to do."""

from shardwise.doctor.signatures.cuda import CUDA
from shardwise.doctor.signatures.kubernetes_lines import KUBERNETES
from shardwise.doctor.signatures.nccl import NCCL
from shardwise.doctor.signatures.slurm_lines import SLURM
from shardwise.doctor.signatures.storage_lines import STORAGE
from shardwise.doctor.signatures.torch_lines import TORCH

SIGNATURES = (*NCCL, *CUDA, *TORCH, *SLURM, *KUBERNETES, *STORAGE)
