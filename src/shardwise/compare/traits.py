"""What a row says about the software besides the layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.facts.gpus import GpuSpec

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a row says about the software besides the layout."""

    flash: int
    """Generation of the attention kernel; only the third is written for Hopper."""

    frozen: bool
    """LoRA: the base model gets no gradients."""

    quantised: bool
    """QLoRA: weights are unpacked from four bits before each use."""

    light_states: bool
    """Weights and optimizer states of 16 bits or fewer: a fraction of Adam's traffic."""

    async_tensor: bool
    """Tensor-parallel collectives are split up and hidden in the matmuls."""

    rowwise: bool
    """Float8 with a scale for each row instead of one a tensor."""

    reinforcement: bool
    """The trainer of a reinforcement-learning loop, not of a plain run."""

    zero1: bool
    """Replicas whose optimizer states are split over them."""

    adapter_units: bool
    """Adapters are units of their own, as in FSDP1, where a unit is trained as a whole or not."""

    sends_once: bool
    """DeepEP or HybridEP sends a token to each node once."""

    graphs: bool
    """CUDA graphs launch blocks with experts, so that the host waits for no numbers of tokens."""

    stages_in_slots: bool
    """Its interleaved stages run by PyTorch's schedule; others have written their own."""

    early_zero3: bool
    """DeepSpeed's ZeRO-3 in its first year, which used one network card of a node."""


def read_traits(row: Row, gpu: GpuSpec) -> Traits:
    """Those of a row."""
    notes, method = notes_of(row), row.get("method", "").lower()
    strategy = row.get("strategy", "").upper()
    return Traits(
        flash=_flash_generation(row, gpu),
        frozen="lora" in method,
        quantised="qlora" in method or "nf4" in row.get("precision", "").lower(),
        light_states=has_light_states(row),
        async_tensor=bool(re.search(r"async[ -]?tp", notes)),
        rowwise="rowwise" in notes,
        reinforcement="type=rl" in notes,
        zero1=strategy == "ZERO1",
        sends_once=bool(re.search(r"deepep|hybridep", notes)),
        graphs="cuda graphs" in notes,
        # FSDP2, which mixes trained and frozen parameters, came with torch 2.4.
        adapter_units="lora" in method and _date(row) < "2024-07",
        stages_in_slots=bool(
            re.search("torchtitan|torchao|automodel", row.get("source", "").lower())
        ),
        early_zero3=strategy == "ZERO3" and _date(row) < "2022",
    )


def has_light_states(row: Row) -> bool:
    """Whether weights, and so the optimizer's states, are not kept in fp32."""
    return bool(re.search("bf16 weights|pure bf16", row.get("precision", "").lower()))


def notes_of(row: Row) -> str:
    """The remarks, in lower case."""
    return row.get("notes", "").lower()


def _flash_generation(row: Row, gpu: GpuSpec) -> int:
    """FlashAttention 2 is of July 2023, about as old as H100s in clouds; 3 is always said."""
    attention = row.get("attention_impl", "").lower()
    if re.search(r"3|cudnn", attention):
        return 3
    if attention.endswith("1"):
        return 1
    early = _date(row) < "2023-08" and "fp8" not in gpu.peak_flops
    return 1 if early and "2" not in attention else 2


def _date(row: Row) -> str:
    return row.get("source_date") or "9999"
