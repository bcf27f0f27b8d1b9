"""The hardware of this machine, found without torch: GPUs from nvidia-smi, the CPU from /proc."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ExitCode, UserError
from shardwise.facts.gpus import FLOAT8_CAPABILITY, GpuSpec, match_gpu
from shardwise.facts.host import memory_limit
from shardwise.units import MIB

CPUINFO = Path("/proc/cpuinfo")
_NVIDIA_SMI_TIMEOUT_S = 60
# Arm's name for bf16, then x86's two. fp16 is never counted: where CPUs have it, torch's kernels
# are slow.
_CPU_BF16_FLAGS = frozenset({"bf16", "avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedGpu:
    """One visible GPU."""

    device_name: str
    memory_bytes: int
    compute_formats: frozenset[str]
    gpu: GpuSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedCpu:
    """The CPU and the memory of the whole machine."""

    device_name: str
    memory_bytes: int
    compute_formats: frozenset[str]


def probe_gpus(environ: Mapping[str, str]) -> list[ProbedGpu]:
    """The GPUs that CUDA would show a process with this environment; none without a driver."""
    if environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []  # none is wanted, so a driver that hangs is not asked
    rows = _visible(query_nvidia_smi("name,memory.total", environ), environ)
    if not rows:
        return []
    matches = [match_gpu(name) for name, _ in rows]
    # This is asked only for unknown GPUs, and old drivers do not know the field.
    capabilities = (
        _visible(query_nvidia_smi("compute_cap", environ), environ) if None in matches else []
    )
    capabilities = capabilities or [["unknown"]] * len(rows)
    return [
        ProbedGpu(
            device_name=name,
            memory_bytes=_memory_bytes(memory, gpu),
            compute_formats=gpu.compute_formats if gpu else _formats_of_capability(capability),
            gpu=gpu,
        )
        for (name, memory), gpu, [capability] in zip(rows, matches, capabilities, strict=True)
    ]


def probe_cpu() -> ProbedCpu:
    """The CPU of this machine."""
    cpuinfo = CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else ""
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.M)).split())
    # Only blanks are skipped, not \s: where a machine's name is empty, the next line is not the
    # name.
    model = re.search(r"^model name[ \t]*:[ \t]*(\S.*)$", cpuinfo, re.M)
    return ProbedCpu(
        device_name=model[1].strip() if model else f"{platform.machine()} CPU".strip(),
        memory_bytes=_ram_bytes(),
        compute_formats=frozenset({"fp32", "bf16"} if flags & _CPU_BF16_FLAGS else {"fp32"}),
    )


def query_nvidia_smi(fields: str, environ: Mapping[str, str]) -> list[list[str]]:
    """Rows of nvidia-smi; none where it is absent or finds no driver, as on login nodes."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return []
    try:
        answer = subprocess.run(
            [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"nvidia-smi gave no answer within {_NVIDIA_SMI_TIMEOUT_S} s",
            why="a GPU or its driver hangs",
            fix="run `nvidia-smi` by hand; to go on without GPUs: export CUDA_VISIBLE_DEVICES=''",
            code=ExitCode.ENVIRONMENT,
        ) from error
    if answer.returncode != 0:
        return []
    num_fields = len(fields.split(","))
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == num_fields]


def _visible(rows: list[list[str]], environ: Mapping[str, str]) -> list[list[str]]:
    """The devices that CUDA_VISIBLE_DEVICES leaves. As in CUDA, the first index that does not
    exist ends the list."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return rows
    visible: list[list[str]] = []
    for entry in (part.strip() for part in wanted.split(",")):
        # Python reads no number of thousands of digits.
        if entry.isdecimal() and len(entry) < 10 and int(entry) < len(rows):
            visible.append(rows[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and len(visible) < len(rows):
            # Which row a UUID means is not asked for: on machines with one kind of GPU it does not
            # matter.
            visible.append(rows[len(visible)])
        else:
            break
    return visible


def _memory_bytes(mib: str, gpu: GpuSpec | None) -> int:
    """nvidia-smi's MiB in bytes. Chips that share the host's memory print '[N/A]' instead."""
    if mib.isdecimal():
        return int(mib) * MIB
    return gpu.memory_bytes if gpu else _ram_bytes()


def _formats_of_capability(capability: str) -> frozenset[str]:
    """Formats by compute capability: tensor cores came with 7.0 (fp16), bf16 with 8.0 and fp8
    with 8.9."""
    numbers = capability.split(".")
    version = tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else (0,)
    since = {"fp32": (0,), "fp16": (7, 0), "bf16": (8, 0), "fp8": FLOAT8_CAPABILITY}
    return frozenset(name for name, first in since.items() if version >= first)


def _ram_bytes() -> int:
    """The machine's memory, or as much of it as a container or job may take."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, memory_limit() or machine)
