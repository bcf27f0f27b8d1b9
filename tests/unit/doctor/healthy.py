"""Plans and nodes without a fault, which every check must stay quiet on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from shardwise.config.load import load_config
from shardwise.doctor.machine.gpu import GpuState
from shardwise.doctor.machine.network import RdmaPort
from shardwise.doctor.machine.node import Node
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.units import GIB

EXAMPLES = Path(__file__).parents[3] / "examples"
# Adapters are counted with torch, which takes seconds.
CHEAP_EXAMPLES = (
    "demo",
    "llama-3.1-8b-8xh100",
    "llama-3.1-70b-4x8xh100",
    "llama-3.1-70b-hsdp-4x8xh200",
    "llama-3.1-8b-offload-1xh100",
    "llama-3.2-1b-1xh100",
    "mixtral-8x7b-4x8xh100",
    "qwen2.5-7b-8xa100-jsonl",
)
PLACES = (
    ("llama-3.1-8b", "8xH100"),
    ("llama-3.1-8b", "4x8xH100"),
    ("llama-3.1-8b", "2x8xA100-80GB"),
    ("llama-3.1-70b", "4x8xH100"),
    ("llama-3.1-70b", "8x8xH200"),
    ("llama-3.2-3b", "8xA100-40GB"),
    ("qwen3-32b", "2x8xH200"),
    ("qwen3-8b", "8xH200"),
    ("qwen3-30b-a3b", "2x8xH200"),
    ("mistral-7b", "8xH100"),
    ("gemma-3-4b", "8xH100"),
    ("gemma-7b", "8xB200"),
    ("gpt-oss-20b", "8xH200"),
    ("phi-4", "8xH100"),
    ("olmo-3-7b", "8xH100"),
    ("smollm3-3b", "8xA100-80GB"),
)


@cache
def plan_of(*settings: str) -> Plan:
    """The plan of these settings over a small, quick default."""
    return choose_plan(load_config(None, ["data=synthetic", *settings]), {})


@cache
def healthy_plans() -> tuple[Plan, ...]:
    examples = [
        choose_plan(load_config(str(EXAMPLES / f"{name}.yaml"), []), {}) for name in CHEAP_EXAMPLES
    ]
    places = [plan_of(f"model={model}", f"cluster={place}") for model, place in PLACES]
    return (*examples, *places)


GPU = {
    "index": "0",
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "570.124.06",
    "pcie.link.gen.max": "5",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "retired_pages.pending": "[N/A]",
    "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.sw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "power.limit": "700.00",
    "power.default_limit": "700.00",
    "clocks.max.sm": "1980",
    "clocks.applications.graphics": "1980",
    "clocks.default_applications.graphics": "1980",
    "temperature.gpu": "34",
    "memory.used": "4",
    "mig.mode.current": "Disabled",
    "compute_mode": "Default",
}


def gpus(count: int = 8, **changes: str) -> tuple[GpuState, ...]:
    """A healthy server; `changes` (dots spelled `__`) befall its GPU 3."""
    odd = {name.replace("__", "."): value for name, value in changes.items()}
    return tuple(
        GpuState({**GPU, "index": str(at), **(odd if at == 3 else {})}) for at in range(count)
    )


def cards(count: int = 8, state: str = "ACTIVE") -> tuple[RdmaPort, ...]:
    rate = "400 Gb/sec (4X NDR)"
    return tuple(
        RdmaPort(f"mlx5_{at}", "1", "ACTIVE" if at else state, rate) for at in range(count)
    )


def server(plan: Plan | None, *, rdma: Sequence[RdmaPort] = (), **changes: object) -> Node:
    """A node of eight H100 without a fault."""
    parts: dict[str, object] = {
        "host": "gpu-a",
        "cores": 192,
        "open_files": 1_048_576,
        "locked_bytes": None,
        "shm_bytes": 512 * GIB,
        "memory_left": 1900 * GIB,
        "gpus": gpus(),
        "xids": (),
        "nccl": "2.28.9",
        "interfaces": {"lo": "unknown", "eth0": "up", "ib0": "up"},
        "rdma_ports": tuple(rdma) or cards(),
        "modules": frozenset({"nvidia_peermem"}),
        "bridges": (),
        "address": "10.0.0.7",
        "environ": {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "eth"},
        "taken_port": None,
        "write_bytes_per_s": 4e9,
        "plan": plan,
    }
    return Node(**{**parts, **changes})  # type: ignore[arg-type]
