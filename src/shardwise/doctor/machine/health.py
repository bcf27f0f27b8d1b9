"""GPUs before a run starts: errors, throttling, power, links, and what else is on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.machine.gpu import GpuState
from shardwise.doctor.machine.node import Node

_THROTTLES = {
    "clocks_throttle_reasons.hw_thermal_slowdown": "slowed down by heat (hardware)",
    "clocks_throttle_reasons.sw_thermal_slowdown": "slowed down by heat (driver)",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "slowed down by its power supply",
}
# Codes after which NVIDIA asks for a reset or a replacement: memory, NVLink, the bus.
_HARDWARE_XIDS = (48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120)
_XID = re.compile(r"Xid \(([^)]*)\): (\d+)")
_OLD_PCIE = 3
_LEAST_CLOCK = 0.95
_LEAST_POWER = 0.95
# A driver's own context takes a few hundred MiB.
_USED_MIB = 1024
_HOT_C = 85

Tell = Callable[[GpuState], str | None]


def _each(tell: Tell) -> Callable[[Node], Iterator[str]]:
    """One line for every GPU that the function has something to say about."""

    def look(node: Node) -> Iterator[str]:
        for gpu in node.gpus:
            if (text := tell(gpu)) is not None:
                yield f"{gpu.name}: {text}"

    return look


def _uncorrected(gpu: GpuState) -> str | None:
    errors = gpu.number("ecc.errors.uncorrected.volatile.total")
    return f"{errors:.0f} uncorrected ECC errors since the driver was loaded" if errors else None


def _remapping(gpu: GpuState) -> str | None:
    if gpu.text("remapped_rows.failure") in ("Yes", "1"):
        return "remapping a row of its memory has failed"
    if gpu.text("remapped_rows.pending") in ("Yes", "1"):
        return "rows of its memory wait to be remapped"
    if gpu.text("retired_pages.pending") == "Yes":
        return "pages of its memory wait to be retired"
    return None


def _throttled(gpu: GpuState) -> str | None:
    reasons = [words for field, words in _THROTTLES.items() if gpu.is_active(field)]
    celsius = gpu.number("temperature.gpu")
    where = f" at {celsius:.0f} °C" if celsius is not None else ""
    return f"{', '.join(reasons)}{where}" if reasons else None


def _hot(gpu: GpuState) -> str | None:
    celsius = gpu.number("temperature.gpu")
    return f"{celsius:.0f} °C" if celsius is not None and celsius >= _HOT_C else None


def _capped(gpu: GpuState) -> str | None:
    limit, usual = gpu.number("power.limit"), gpu.number("power.default_limit")
    if limit and usual and limit < _LEAST_POWER * usual:
        return f"its power is limited to {limit:.0f} W of {usual:.0f} W"
    return None


def _slow_clock(gpu: GpuState) -> str | None:
    clock = gpu.number("clocks.applications.graphics")
    usual = gpu.number("clocks.default_applications.graphics")
    if clock and usual and clock < _LEAST_CLOCK * usual:
        return f"its clock is set to {clock:.0f} MHz, where {usual:.0f} MHz is the default"
    return None


def _old_bus(gpu: GpuState) -> str | None:
    generation = gpu.number("pcie.link.gen.max")
    if generation and generation <= _OLD_PCIE:
        return f"it is on PCIe generation {generation:.0f}"
    return None


def _narrow_bus(gpu: GpuState) -> str | None:
    width, most = gpu.number("pcie.link.width.current"), gpu.number("pcie.link.width.max")
    return f"{width:.0f} of {most:.0f} PCIe lanes" if width and most and width < most else None


def _in_use(gpu: GpuState) -> str | None:
    used = gpu.number("memory.used")
    return f"{used:.0f} MiB are used already" if used and used > _USED_MIB else None


def _divided(gpu: GpuState) -> str | None:
    if gpu.text("mig.mode.current") == "Enabled":
        return "MIG is on"
    mode = gpu.text("compute_mode")
    return f"its compute mode is {mode}" if mode in ("Prohibited", "Exclusive_Process") else None


def _xids(node: Node) -> Iterator[str]:
    for line in node.xids:
        match = _XID.search(line)
        if match and int(match[2]) in _HARDWARE_XIDS:
            yield f"Xid {match[2]} of {match[1]}: {line}"


def _other_xids(node: Node) -> Iterator[str]:
    for line in node.xids:
        match = _XID.search(line)
        if match and int(match[2]) not in _HARDWARE_XIDS:
            yield f"Xid {match[2]} of {match[1]}: {line}"


def _missing(node: Node) -> Iterator[str]:
    plan = node.plan
    if plan is None or plan.cluster.device != "cuda" or not node.gpus:
        return
    if len(node.gpus) < plan.cluster.devices_per_node:
        yield (
            f"nvidia-smi shows {len(node.gpus)} GPUs, and the plan has "
            f"{plan.cluster.devices_per_node} in each node"
        )


def _unlike(node: Node) -> Iterator[str]:
    for field, words in (("name", "kinds"), ("clocks.max.sm", "clocks"), ("power.limit", "power")):
        found = sorted({gpu.text(field) for gpu in node.gpus} - {None}, key=str)
        if len(found) > 1:
            yield f"GPUs of this node differ in {words}: {', '.join(map(str, found))}"


HEALTH: tuple[Check[Node], ...] = (
    Check(
        "SW220", "error", "A GPU has reported a hardware error (XID)",
        "After such an error the GPU gives wrong results or hangs in a collective.",
        "drain the node, reset the GPU with `nvidia-smi --gpu-reset`, and replace it if it returns",
        _xids,
    ),
    Check(
        "SW221", "note", "A GPU has reported an error (XID)",
        "Most other XIDs are faults of a program, such as an access out of bounds.",
        "look the number up in NVIDIA's list of XID errors",
        _other_xids,
    ),
    Check(
        "SW222", "error", "A GPU has uncorrected memory errors",
        "What it computes can be wrong.",
        "drain the node and reset the GPU; run NVIDIA's diagnostics: dcgmi diag -r 3",
        _each(_uncorrected),
    ),
    Check(
        "SW223", "warning", "A GPU's memory waits to be repaired",
        "Rows are remapped at the next reset only. Until then errors can come again.",
        "reset the GPU with `nvidia-smi --gpu-reset`, or restart the node",
        _each(_remapping),
    ),
    Check(
        "SW224", "error", "A GPU is throttled",
        "All ranks wait for the slowest one.",
        "look at fans, air flow and the power supply of the node; leave it out until then",
        _each(_throttled),
    ),
    Check(
        "SW225", "warning", "A GPU is hot",
        "It will lower its clock under load.",
        "look at fans and air flow of the node",
        _each(_hot),
    ),
    Check(
        "SW226", "warning", "A GPU's power is capped",
        "Matmuls at full load then run at a lower clock.",
        "nvidia-smi --power-limit WATTS, where the cap is not meant",
        _each(_capped),
    ),
    Check(
        "SW227", "warning", "A GPU's clock is lowered",
        "The plan counts with the default clock.",
        "nvidia-smi --reset-applications-clocks",
        _each(_slow_clock),
    ),
    Check(
        "SW228", "warning", "A GPU is on an old PCIe generation",
        "Offload and copies of activations take twice as long as on generation 4.",
        "check the slot and the BIOS, or leave memory.offload and memory.offload_activations out",
        _each(_old_bus),
    ),
    Check(
        "SW229", "warning", "A GPU has fewer PCIe lanes than it could",
        "Copies between host and GPU are slower by that share.",
        "reseat the card, and check the riser and the slot",
        _each(_narrow_bus),
    ),
    Check(
        "SW230", "warning", "A GPU is in use",
        "Its memory is not free, and another process takes a share of its time.",
        "see who it is: nvidia-smi; end it, or choose others with CUDA_VISIBLE_DEVICES",
        _each(_in_use),
    ),
    Check(
        "SW231", "warning", "A GPU is divided or reserved",
        "With MIG there is no NVLink, and NCCL cannot use peer access.",
        "nvidia-smi --multi-instance-gpu 0, or nvidia-smi --compute-mode 0",
        _each(_divided),
    ),
    Check(
        "SW232", "error", "GPUs are missing",
        "Ranks of this node would have no device.",
        "look for Xid 79 in `dmesg`; check --gpus-per-node, and CUDA_VISIBLE_DEVICES",
        _missing,
    ),
    Check(
        "SW233", "warning", "GPUs of this node are not alike",
        "All ranks run at the pace of the slowest one.",
        "use one kind with the same clocks and limits, chosen with CUDA_VISIBLE_DEVICES",
        _unlike,
    ),
)  # fmt: skip
