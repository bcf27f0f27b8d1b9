"""What makes a run slower or faster than expected: each with its effect and a way to check it.

A fault changes the question that an expectation answers. The likeliest faults are those that
explain a gap best: some change the expectation by a certain factor (more recompute, an older
kernel), others can be of any size, and are the less likely the larger they would have to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, log
from typing import Any

from shardwise.compare import changes
from shardwise.compare.question import SpeedQuestion
from shardwise.doctor.slow.ranked import SLOW

# How far an expectation under a fault is usually off, as a logarithm.
_USUAL_MISS = 0.06
Change = Callable[[SpeedQuestion], SpeedQuestion | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFault:
    """One thing that may be otherwise than stated."""

    title: str
    check: str
    """How to see whether it is so, in any stack."""

    change: Change | None = None
    """The question with this fault; None where it is not possible there."""

    usual: Callable[[SpeedQuestion], float] | None = None
    """Of a fault of any size: the usual size, as a logarithm of the step time."""

    factor: Callable[[SpeedQuestion], float | None] | None = None
    """Measured over true, where the figure itself is another one."""

    why: str = ""
    slower: bool = True

    def gap(self, question: SpeedQuestion, expected: float) -> float | None:
        """The logarithm of expected over measured that the fault makes; None where it has none."""
        if self.factor is not None:
            times = self.factor(question)
            return None if times is None else -log(times)
        changed = self.change(question) if self.change else None
        return None if changed is None else log(expected / changed.tokens_per_s())


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyReason:
    """A fault, and what is expected with it."""

    title: str
    why: str
    check: str
    tokens_per_s: float | None
    """None for faults of any size."""


def likely_reasons(question: SpeedQuestion, measured: float, number: int = 3) -> list[LikelyReason]:
    """The faults that explain best why `measured` is not what is expected."""
    expected = question.tokens_per_s()
    gap = log(expected / measured)
    found = sorted(_ranked(question, expected, gap), key=lambda each: each[0])
    return [reason for _, reason in found[:number]]


def _ranked(
    question: SpeedQuestion, expected: float, gap: float
) -> Iterator[tuple[float, LikelyReason]]:
    for fault in FAULTS:
        if fault.slower != (gap > 0):
            continue
        size = fault.gap(question, expected)
        if fault.usual:
            cost, speed = 1.0 + abs(gap) / fault.usual(question), None
        elif size is None or size * gap <= 0:
            continue
        else:
            cost, speed = abs(gap - size) / _USUAL_MISS, expected * exp(-size)
        yield (
            cost,
            LikelyReason(title=fault.title, why=fault.why, check=fault.check, tokens_per_s=speed),
        )


def _doctors(name: str, check: str, **more: Any) -> SpeedFault:
    """A reason of the doctor's for slow runs, with a check that needs no run of ours."""
    found = next(each for each in SLOW if each.id == name)
    return SpeedFault(title=found.title, why=found.why, check=check, **more)


FAULTS: tuple[SpeedFault, ...] = (
    # Of any size.
    _doctors("SW401", "time steps with random tokens in place of the data",
             usual=changes.waits_for_data),
    _doctors("SW402", "compare the step times of single ranks or nodes; run without the slowest",
             usual=changes.waits_for_ranks),
    _doctors("SW405", "nvidia-smi -q -d PERFORMANCE,CLOCK under load; time a large matmul",
             usual=changes.is_throttled),
    _doctors("SW411", "profile one step and look for gaps between kernels",
             usual=changes.waits_for_host),
    _doctors("SW407", "look for cudaMalloc in a profile, or num_alloc_retries in torch's "
             "memory_stats; leave 5% of the memory free", usual=changes.waits_for_memory),
    # Of a certain size.
    _doctors("SW406", "read the launch flags: recompute full where it was stated otherwise",
             change=changes.recompute_all),
    _doctors("SW403", "nccl-tests' all_reduce_perf between nodes; NCCL_DEBUG=INFO must say NET/IB "
             "and GDRDMA, and not NET/Socket", change=changes.one_card),
    _doctors("SW404", "profile one step: collectives that no compute runs beside",
             change=changes.in_turn),
    SpeedFault(title="Norms, rope and activations run as many small kernels",
          why="They then move several times the bytes through memory.",
          check="see whether torch.compile or fused kernels are really on; profile one step",
          change=changes.eager),
    SpeedFault(title="Attention runs an older kernel",
          why="FlashAttention 2 reaches half of 3 on Hopper, and 1 half of 2 on Ampere.",
          check="profile one step and read the names of the attention kernels",
          change=changes.older_attention),
    SpeedFault(title="Attention holds all scores",
          why="A mask, a window or an odd head size makes libraries leave their fast kernels.",
          check="profile one step: softmax kernels between two matmuls",
          change=changes.plain_attention),
    SpeedFault(title="The pipeline has few micro-batches",
          why="Stages are idle for (stages - 1) / (micro-batches + stages - 1) of a step.",
          check="divide the global batch by micro-batch and data-parallel ranks",
          change=changes.few_passes),
    SpeedFault(title="Experts are loaded unevenly",
          why="All ranks wait for the one whose experts have the most tokens.",
          check="log the tokens of each expert; time a step with balanced random routing",
          change=changes.uneven_experts),
    SpeedFault(title="Experts do not run as grouped matmuls",
          why="One launch for each expert leaves most of the device idle.",
          check="profile one step: one grouped kernel for each projection, or many small ones",
          change=changes.small_experts),
    SpeedFault(title="Linear layers do not run in eight bits",
          why="Recipes skip layers, and fall back to 16 bits without a word.",
          check="profile one step and read the names of the matmul kernels",
          change=changes.no_float8),
    # Faster.
    SpeedFault(slower=False, title="The figure counts all GPUs",
          why="Throughput is published for one GPU, for a node and for the whole run.",
          check="divide by the number of GPUs", factor=changes.of_all_gpus),
    SpeedFault(slower=False, title="The figure counts a node",
          why="Throughput is published for one GPU, for a node and for the whole run.",
          check="divide by the GPUs of a node", factor=changes.of_a_node),
    SpeedFault(slower=False, title="Less is recomputed than stated",
          why="Without recompute a step has a quarter less to do.",
          check="read the launch flags; state it with --recompute none",
          change=changes.recompute_nothing),
    SpeedFault(slower=False, title="Kernels are fused",
          why="Fused norms and activations move fewer bytes through memory.",
          check="see whether torch.compile or fused kernels are on", change=changes.compiled),
    SpeedFault(slower=False, title="Linear layers run in eight bits",
          why="Their matmuls are up to twice as fast.",
          check="read the launch flags; state it with --precision fp8", change=changes.float8),
    SpeedFault(slower=False, title="Only a part of the model is trained",
          why="Frozen weights need no gradients.",
          check="read the launch flags for LoRA or frozen layers", change=changes.frozen),
    SpeedFault(slower=False, title="Attention runs a newer kernel",
          why="FlashAttention 3 and cuDNN's are twice as fast as 2 on Hopper, and 2 as 1 on "
          "Ampere.",
          check="profile one step and read the names of the attention kernels",
          change=changes.newer_attention),
    SpeedFault(slower=False, title="The pipeline has more micro-batches, or is interleaved",
          why="Both leave stages idle for a smaller part of a step.",
          check="divide the global batch by micro-batch and data-parallel ranks; state it with "
          "--global-batch", change=changes.many_passes),
    SpeedFault(slower=False, title="The figure counts padding, or sequences are shorter",
          why="Padded tokens and short sequences cost less attention.",
          check="count the tokens that the loss is computed on, and the usual length",
          usual=changes.counts_otherwise),
)  # fmt: skip
