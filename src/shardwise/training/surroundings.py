"""What surrounds the steps of a run: the device, random seeds, garbage collection, attention
kernels."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.internals.hugging_face import unsearched_positions
from shardwise.kernels.cublas import drop_workspace, fix_workspace
from shardwise.kernels.hopper import on_hopper
from shardwise.kernels.own import uses_own
from shardwise.model.seeds import seed_generators
from shardwise.plan.planned import Plan

# Matmuls of seven layers, forward and backward; and of an adapter.
_OF_A_BLOCK, _OF_AN_ADAPTER = 21, 6
# Of the host, for a matmul without a workspace; with one it is 25 us. Measured beside an H200.
_HOST_S = 90e-6
# All that the host launches, beside those matmuls.
_BESIDES = 2.5


def device_name(plan: Plan) -> str:
    """The driver's name of the device, which may be more specific than the plan's."""
    is_gpu = plan.cluster.device == "cuda"
    return torch.cuda.get_device_name() if is_gpu else plan.cluster.device_name


def prepare_matmuls(plan: Plan) -> None:
    """Set up cuBLAS before the first matmul of a process. Running without a workspace was
    measured on Hopper only."""
    if plan.cluster.device != "cuda":
        return
    if plan.settings.train.deterministic:
        fix_workspace()
    elif uses_own(plan) and on_hopper() and host_keeps_up(plan):
        drop_workspace()


def host_keeps_up(plan: Plan) -> bool:
    """Whether the host would still be ahead of the GPU without a workspace, where each matmul takes
    it longer. Adapters are many small matmuls."""
    if plan.forecast is None:
        return True
    adapter = plan.model.adapter
    matmuls = _OF_A_BLOCK * plan.model.num_layers
    matmuls += _OF_AN_ADAPTER * (adapter.num_layers if adapter else 0)
    host_s = plan.decided.accumulation * matmuls * _HOST_S
    busy_s = plan.forecast.step_s - plan.forecast.terms["launch"]
    return busy_s > _BESIDES * host_s


def seed_step(seed: int, position: int, token_rank: int) -> None:
    """Seed dropout by (seed, position, rank), so a resumed run needs no saved generator. Ranks
    that hold the same tokens have one `token_rank`."""
    seed_generators(f"{seed}/{position}/{token_rank}")


@contextmanager
def steady_collector() -> Iterator[None]:
    """No garbage collection inside steps: one rank that pauses makes all others wait."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def fast_attention(device: torch.device, *, reads_positions: bool = False) -> Iterator[None]:
    """Prefer cuDNN's attention on Hopper: it is about twice as fast as the flash kernel that torch
    prefers.

    With `reads_positions`, transformers finds documents in the positions and keeps them apart.
    """
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    preferred = sdpa_kernel(order, set_priority=True) if device.type == "cuda" else nullcontext()
    with nullcontext() if reads_positions else unsearched_positions(), preferred:
        yield
