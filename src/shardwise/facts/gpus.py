"""What each GPU can do, after the vendors' published figures, and which one a name means.

Peaks are dense (no 2:4 sparsity) with fp32 accumulation, because that is what training uses:
GeForce cards print twice as much for fp16 accumulation. A format is listed only where the chip
has arithmetic for it, so V100 and T4 have no bf16. Memory is what `nvidia-smi` reports, not the
round number on the box, so a plan is the same whether a GPU was named or probed. B200's bandwidth
is its bus width times its clock, which is below the printed 8 TB/s.

Sources: the vendors' data sheets as of November 2026. Of B300, GB300 and RTX PRO 6000 the memory is
what logs of `nvidia-smi` show. Data sheets of RTX PRO 6000 print peaks with sparsity in four bits;
the dense ones follow from 188 multiprocessors at 2.617 GHz, 512 sums each in bf16.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.errors import UserError
from shardwise.units import MIB

COMPUTE_FORMATS = frozenset({"fp32", "fp16", "bf16", "fp8"})
FLOAT8_CAPABILITY = (8, 9)  # CUDA's: Ada (L4, L40S, RTX 40), Hopper, Blackwell
NODE = 8  # GPUs that one NVSwitch or full NVLink mesh joins in a usual server
_HOPPER = ("H100", "H200", "GH200", "H800", "H20")
PCIE_NODE = 10  # cards of two slots that the largest usual servers hold


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One kind of GPU."""

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    """FLOP/s by format: fp32, tf32, bf16, fp16, fp8."""

    memory_bandwidth: float
    """Bytes per second."""

    nvlink_domain: int = 1
    """The most GPUs that NVLink, or the vendor's equivalent, joins; 1 where only PCIe does."""

    nvlink_bandwidth: float | None = None
    """Bytes per second in one direction: half of what datasheets print, which is both."""

    node_gpus: int = NODE
    """GPUs that the largest servers hold: DGX-2 and HGX A100 16 of them, a GB200 tray 4."""

    @property
    def most_in_a_node(self) -> int:
        """GPUs that a cluster's name may give one node: a server's, or all of an NVLink rack."""
        return max(self.node_gpus, self.nvlink_domain)

    @property
    def is_hopper(self) -> bool:
        """Whether its compute capability is 9.0."""
        return self.name.split("-")[0] in _HOPPER

    @property
    def compute_formats(self) -> frozenset[str]:
        """The formats that a training run may compute in; fp8 in linear layers only."""
        return COMPUTE_FORMATS & self.peak_flops.keys()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GpuSpec:
        """Back from `to_dict`."""
        return cls(**data)


def _gpu(
    name: str,
    memory_mib: int,
    tflops: dict[str, float],
    gb_per_s: float,
    nvlink: tuple[int, float] | None = None,
    node: int | None = None,
) -> GpuSpec:
    """A catalogue row in the datasheet's units; `nvlink` is (domain, GB/s both ways together)."""
    domain, both_ways = nvlink or (1, None)
    usual = NODE if domain >= NODE else PCIE_NODE
    return GpuSpec(
        name=name,
        memory_bytes=memory_mib * MIB,
        peak_flops={fmt: round(value * 1e12) for fmt, value in tflops.items()},
        memory_bandwidth=gb_per_s * 1e9,
        nvlink_domain=domain,
        nvlink_bandwidth=None if both_ways is None else both_ways * 1e9 / 2,
        node_gpus=usual if node is None else node,
    )


_V100 = {"fp32": 15.7, "fp16": 125.0}
_V100_PCIE = {"fp32": 14.0, "fp16": 112.0}
_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H100 = {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_H20 = {"fp32": 44.0, "tf32": 74.0, "bf16": 148.0, "fp16": 148.0, "fp8": 296.0}
_H100_PCIE = {"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0}
_H100_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}
_B200 = {"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}
_MI355X = {"fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2}
_A10G = {"fp32": 35.0, "tf32": 35.0, "bf16": 70.0, "fp16": 70.0}
_L4 = {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5}
_L40S = {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0, "fp8": 733.0}
_RTX_3090 = {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}
_RTX_4090 = {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}
_RTX_5090 = {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419.0}
_RTX_PRO_6000 = {"fp32": 125.9, "tf32": 251.9, "bf16": 503.8, "fp16": 503.8, "fp8": 1007.6}
_RTX_A6000 = {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}
_RTX_6000_ADA = {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5}

GPUS: tuple[GpuSpec, ...] = (
    _gpu("V100-16GB", 16384, _V100, 900, (NODE, 300)),
    _gpu("V100-32GB", 32768, _V100, 900, (NODE, 300), node=16),
    _gpu("V100-PCIe-16GB", 16384, _V100_PCIE, 900),
    _gpu("V100-PCIe-32GB", 32768, _V100_PCIE, 900),
    _gpu("T4", 15360, {"fp32": 8.1, "fp16": 65.0}, 300, node=20),
    _gpu("A10G", 23028, _A10G, 600),
    _gpu("A100-40GB", 40960, _A100, 1555, (NODE, 600), node=16),
    _gpu("A100-80GB", 81920, _A100, 2039, (NODE, 600), node=16),
    _gpu("A100-PCIe-40GB", 40960, _A100, 1555),
    _gpu("A100-PCIe-80GB", 81920, _A100, 1935),
    _gpu("A800-80GB", 81920, _A100, 2039, (NODE, 400)),
    _gpu("A800-PCIe-80GB", 81920, _A100, 1935),
    _gpu("L4", 23034, _L4, 300, node=16),
    _gpu("L40S", 46068, _L40S, 864),
    _gpu("RTX-3090", 24576, _RTX_3090, 936),
    _gpu("RTX-4090", 24564, _RTX_4090, 1008),
    _gpu("RTX-5090", 32607, _RTX_5090, 1792),
    _gpu("RTX-A6000", 49140, _RTX_A6000, 768),
    _gpu("RTX-6000-Ada", 49140, _RTX_6000_ADA, 960),
    _gpu("RTX-PRO-6000", 97887, _RTX_PRO_6000, 1792),
    _gpu("RTX-PRO-6000-Server", 97887, _RTX_PRO_6000, 1597),
    _gpu("H100", 81559, _H100, 3350, (NODE, 900)),
    _gpu("H100-PCIe", 81559, _H100_PCIE, 2039),
    _gpu("H100-NVL", 95830, _H100_NVL, 3900, (2, 600)),
    _gpu("H200", 143771, _H100, 4800, (NODE, 900)),
    _gpu("GH200", 97871, _H100, 4000, (1, 900), node=4),
    _gpu("H800", 81559, _H100, 3350, (NODE, 400)),
    _gpu("H20", 97871, _H20, 4000, (NODE, 900)),
    _gpu("B200", 183359, _B200, 7700, (NODE, 1800)),
    _gpu("GB200", 189471, _GB200, 8000, (72, 1800), node=4),
    _gpu("B300", 275040, _B200, 7700, (NODE, 1800)),
    _gpu("GB300", 284208, _GB200, 8000, (72, 1800), node=4),
    _gpu("MI300X", 196592, _MI300X, 5300, (NODE, 896)),
    _gpu("MI325X", 262128, _MI300X, 6000, (NODE, 896)),
    _gpu("MI355X", 294896, _MI355X, 8000, (NODE, 1075)),
)

# Other names, by people and `nvidia-smi`. Only whole names match: "RTX 4090 Laptop GPU" and "H100
# 80GB HBM3 MIG 1g.10gb" are other devices, and a wrong peak is worse than none.
_ALIASES: dict[str, tuple[str, ...]] = {
    "V100-16GB": ("V100", "V100-SXM2-16GB", "V100-SXM3-16GB"),
    "V100-32GB": ("V100-SXM2-32GB", "V100-SXM3-32GB"),
    "A100-40GB": ("A100-SXM4-40GB", "A100-SXM-40GB"),
    "A100-80GB": ("A100", "A100-SXM4-80GB", "A100-SXM-80GB"),
    "A100-PCIe-80GB": ("A100 80GB PCIe",),
    "A800-80GB": ("A800", "A800-SXM4-80GB", "A800-SXM-80GB"),
    "A800-PCIe-80GB": ("A800 80GB PCIe",),
    "RTX-PRO-6000": ("RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell Workstation Edition"),
    "RTX-PRO-6000-Server": ("RTX PRO 6000 Blackwell Server Edition",),
    "RTX-3090": ("3090",),
    "RTX-4090": ("4090",),
    "RTX-5090": ("5090",),
    "RTX-A6000": ("A6000",),
    "RTX-6000-Ada": ("6000 Ada", "RTX 6000 Ada Generation"),
    "H100": ("H100 80GB HBM3", "H100-SXM", "H100-SXM5", "H100-80GB", "H100-SXM5-80GB"),
    "H100-PCIe": ("H100 80GB PCIe",),
    "H200": ("H200-SXM", "H200-141GB"),
    "GH200": ("GH200 480GB", "GH200-96GB"),  # 480 GB is Grace's own memory, not the GPU's
    "H800": ("H800-SXM", "H800-SXM5", "H800-80GB"),
    "H20": ("H20-96GB",),
    "B300": ("B300 SXM6 AC", "B300-SXM"),
    "MI300X": ("MI300X OAM",),
    "MI325X": ("MI325X OAM",),
    "MI355X": ("MI355X OAM",),
}

_VENDOR_WORDS = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct)\b")


def _key(name: str) -> str:
    """'NVIDIA A100-SXM4-40GB' -> 'a100sxm440gb', so spelling and punctuation do not matter."""
    return re.sub(r"[^a-z0-9]", "", _VENDOR_WORDS.sub("", name.lower()))


_BY_KEY: dict[str, GpuSpec] = {
    _key(alias): gpu for gpu in GPUS for alias in (gpu.name, *_ALIASES.get(gpu.name, ()))
}


def match_gpu(device_name: str) -> GpuSpec | None:
    """The catalogue's entry for a device name, or None where it has none."""
    return _BY_KEY.get(_key(device_name))


# Accelerators that run no torch.cuda: each with why a plan for it would be for nothing.
_NO_CUDA = (
    (re.compile(r"tpu|v[2-7][pe]?$"), "TPUs run PyTorch through XLA, which has no FSDP2"),
    (re.compile(r"trainium|trn\d"), "Trainium runs PyTorch through Neuron, which has no FSDP2"),
    (re.compile(r"gaudi|hl\d"), "Gaudi is no device of torch.cuda, which ranks are made for"),
)


def validate_cuda(name: str) -> None:
    """Raise for accelerators that run no torch.cuda."""
    for pattern, why in _NO_CUDA:
        if pattern.match(_key(name)):
            raise UserError(
                f"{name} is no GPU that shardwise trains on",
                why=why,
                fix="name GPUs of NVIDIA or AMD, such as cluster.name=8xH100",
            )


def find_gpu(name: str, count: str = "1x") -> GpuSpec:
    """The catalogue's entry for a name that a user wrote, behind a `count` such as `4x8x`."""
    gpu = match_gpu(name)
    if gpu is None:
        validate_cuda(name)
        near = difflib.get_close_matches(_key(name), _BY_KEY, n=5, cutoff=0.5)
        names = list(dict.fromkeys(_BY_KEY[key].name for key in near))[:3]
        raise UserError(
            f"unknown GPU {name!r}",
            why=f"the catalogue has {', '.join(gpu.name for gpu in GPUS)}; others are described by "
            "cluster.peak_tflops, cluster.gpu_gib and cluster.gpu_gbps",
            fix=f"did you mean {' or '.join(f'cluster.name={count}{name}' for name in names)}?"
            if names
            else f"write cluster.name={count}KIND with one of these names",
        )
    return gpu
