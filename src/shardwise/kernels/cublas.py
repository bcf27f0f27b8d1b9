"""How cuBLAS hands out the tiles of a matmul: variables that it reads before a process's first."""

from __future__ import annotations

import os

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def drop_workspace() -> None:
    """Without one tiles go out in a fixed order: the same bits, and half a percent faster on
    Hopper. cuBLASLt, which float8 and layers with a bias call, does not work without and gets one
    of its own. What the user has set stays."""
    os.environ.setdefault(_WORKSPACE, ":0:0")
    os.environ.setdefault("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")


def fix_workspace() -> None:
    """As torch asks for where all algorithms are to be deterministic: else it does not multiply."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
