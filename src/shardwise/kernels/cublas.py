"""Environment variables that decide how cuBLAS schedules the tiles of a matmul.

cuBLAS reads them before the first matmul of a process.
"""

from __future__ import annotations

import os

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def drop_workspace() -> None:
    """Take cuBLAS's workspace away, so that it schedules tiles in a fixed order.

    The bits are the same, and matmuls on Hopper are half a percent faster. cuBLASLt, which float8
    and layers with a bias call, needs a workspace and gets one of its own. A value that the user
    has set stays.
    """
    os.environ.setdefault(_WORKSPACE, ":0:0")
    os.environ.setdefault("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")


def fix_workspace() -> None:
    """Give cuBLAS the workspace that torch demands for deterministic algorithms."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
