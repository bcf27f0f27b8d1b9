"""What a training stack adds around the matmuls: numbers that no datasheet has.

The defaults are those of FSDP2 with torch's own kernels, measured on an H200. `OURS` says where
this project differs. Other stacks are other values of the same fields; `shardwise.compare`
keeps those that were fitted to published runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.facts.adapter_sizes import AdapterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Decisions, computes_float8, multiplies_base
from shardwise.plan.memory import EVEN_ROWS

Heads = Mapping[str, Mapping[int, float]]
_WIDEST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One stack. Passes are bytes moved through memory, in 16-bit training."""

    matmul_factor: float = 1.0
    """Share of the device's matmul rate that it reaches."""

    attention_factor: float = 1.0
    masked_factor: float = 0.55
    """The same where torch's attention is given a mask, and computes all scores: from Mistral 7B at
    8192 tokens on an H200."""

    heads: Heads = field(default_factory=lambda: {"sdpa": {_WIDEST: 1.0}})
    """Shares of attention's rate by kernel, and by the widest heads that a share holds for."""

    grouped_factor: float = 0.9
    """Share of the matmul rate that grouped matmuls of experts reach with many rows for each:
    torch's on an H200."""

    half_rows: float = 64.0
    """An expert with so many rows reaches half of that: 0.8 of a large matmul's rate at 512."""

    hidden_passes: float = 75.0
    """For each hidden channel of a token and block, forward and backward, compiled: norms, rope,
    residuals, casts."""

    eager_factor: float = 7.2
    """How much more of that there is without torch.compile: norms in fp32 and rope are a kernel for
    every operator."""

    ffn_passes: float = 5.2
    """For each channel of each of the feed-forward's vectors, compiled: activation, product and
    their backward."""

    eager_ffn_factor: float = 1.7
    routed_passes: float = 42.0
    """For each hidden channel of each of a token's experts: permutation, weighting and sum, by the
    count of Mixtral's block."""

    loss_passes: float = 10.0
    """For each logit."""

    head_factor: float = 1.0
    """Share of the matmul rate that the head's matmuls reach."""

    copy_factor: float = 1.8
    """How much slower than memory the copies to and from the buffers of collectives are: many
    small pieces."""

    lone_passes: float = 0.0
    """For each parameter of a rank that holds all of them: casts to 16 bits and back, copies."""

    optimizer_passes: float = 65.0
    """For each parameter of a rank's shard: Adam, clipping, zeroing."""

    block_kernels: float = 60.0
    """Launches for a block, forward and backward, compiled; twice as many without."""

    tensor_launches: float = 0.0
    """What FSDP2's hooks take the host for each parameter of a block, forward and backward, as so
    many launches."""

    unpack_launches: float = 0.0
    """What operators on a packed weight take the host for each use, in the same way."""

    overlaps: bool = True
    """Launches and collectives run beside compute. On a CPU they do not: it does everything in
    turn, and FSDP2 waits for each of gloo's collectives."""

    contention: float = 0.04
    """Share by which collectives slow the compute they overlap."""

    link_factor: float = 1.0
    """How much longer than their bytes the collectives of units take."""

    replica_pieces: float = 1.0
    """All-reduces over replicas in a step: so many, and at least one per unit."""

    wait_share: float = 0.005
    """What ranks wait for the slowest, as a share of the step for each doubling of the nodes."""

    step_s: float = 0.010
    """What every optimizer step costs besides: its two ends, where nothing overlaps, and gaps."""

    pass_s: float = 0.0
    """What every micro-batch costs besides."""

    norm_passes: float = 13.0
    """For each hidden channel, where `selective` checkpointing recomputes only norms."""

    selective_recompute: float = 0.0
    """Share of a block's matmuls that `selective` checkpointing runs again."""

    stops_early: float = 1.0
    """1 where recomputation ends with the last tensor that backward needs, which leaves out the
    block's last matmul; 0 where it runs the whole block again."""

    float8_factor: float = 1.0
    """Share of the device's float8 rate that the scaling recipe leaves."""

    float8_experts_factor: float = 0.86
    """The same for grouped matmuls of experts with a scale for each row. Not measured: it is that
    of linear layers with such scales."""

    narrow_factor: float = 1.0
    """How much more than usual its matmuls lose to narrow shapes."""

    float8_passes: float = 11.0
    """Casts, for each input channel of a float8 matmul, forward and backward."""

    float8_gathers: bool = True
    """Float8 runs also gather weights and activations in eight bits."""

    tensor_factor: float = 1.0
    """How much longer than their bytes tensor-parallel collectives take."""

    tensor_overlap: float = 0.0
    """Share of them that hides behind matmuls."""

    expert_factor: float = 1.0
    """How much longer than their bytes the all-to-alls of experts' tokens take; less than 1 where a
    part of them hides."""

    exchange_s: float = 0.0
    """What each of these all-to-alls costs besides: the host waits for the numbers of tokens."""

    compiles_cut_blocks: bool = True
    """Selective recompute around experts that are dealt out is compiled. Ours is not: the compiler
    cuts the graph there, and traces no checkpoint with a cut."""

    sends_once: bool = False
    """A token goes to each node once, however many of its experts are there."""

    converts_experts: bool = False
    """Float8 runs multiply stacked experts in eight bits too."""

    splits_update: bool = False
    """Each replica updates a part of the parameters, as in ZeRO-1."""

    stages_in_slots: bool = True
    """Interleaved stages run by PyTorch's schedule, whose ranks meet in every slot."""

    stages_outermost: bool = False
    """Stages of a pipeline lie further apart than replicas of them; ours lie inside a replica."""

    frozen: bool = False
    """The base model is not trained (LoRA): no gradients of its weights, nothing to reduce."""

    adapter_passes: float = 0.0
    """For each channel that goes into or comes out of a linear layer with an adapter, compiled: the
    adapter reads the input a second time and adds to the output."""

    unpack_passes: float = 0.0
    """For each weight that is stored in four bits or eight, before each use; 0: weights are stored
    as they are computed with."""

    packed_width: float = 0.5
    """Bytes of such a weight."""

    def attention_share(self, kernel: str, width: int) -> float:
        """The share of attention's rate that `kernel` reaches with heads of `width` channels."""
        shares = self.heads.get(kernel, self.heads["sdpa"])
        return next((share for most, share in shares.items() if width <= most), shares[_WIDEST])


# On one H200, forward and backward together, over 4096 and 8192 tokens, with windows and without.
_HEADS: Heads = {
    "sdpa": {64: 0.81, 128: 1.0, 192: 0.95, _WIDEST: 0.84},
    "flex_attention": {64: 0.54, 128: 0.70, _WIDEST: 0.36},
    "flash_attention_4": {64: 0.90, 128: 1.10, 192: 0.90, _WIDEST: 0.69},
}
# Of the host beside an H200, in launches of 6 us: 20 us for each kernel of a block (a matmul takes
# 19 to 28), and what two steps left that waited for the host: QLoRA of 8B at 2048 tokens,
# recomputed, 9.9 ms a block, and a float8 base at 8192 tokens, 15.9 ms.
_BLOCK_LAUNCHES = 34 * 20 / 6
_TENSOR_LAUNCHES = 320 / 6
_UNPACK_LAUNCHES = {"nf4": 150 / 6, "float8": 700 / 6}
# Our own kernels copy into a reduce-scatter and compute AdamW, the loss and SwiGLU's backward. The
# two ends of a step were measured with them, on models of 1B to 13B.
OURS = Software(
    ffn_passes=6.0,
    loss_passes=7.2,
    copy_factor=1.5,
    lone_passes=6.0,
    optimizer_passes=36.0,
    step_s=0.012,
    heads=_HEADS,
    # Experts with 512, 1024 and 2048 rows reached 0.80, 0.86 and 0.91 of the rate.
    grouped_factor=0.95,
    half_rows=96.0,
    compiles_cut_blocks=False,
)
# For each logit where all of them exist, by the operators of torch: casts to fp32 and back, a
# softmax that reads twice, zeros, and its backward that reads twice. Not measured.
_WHOLE_PASSES = 48.0
# What other stacks' published runs were fitted from; ours is not measured yet.
_ADAPTER_PASSES = 12.0
# Four bits and a scale are read and bf16 is written, at nine tenths of the memory's bandwidth. Not
# measured.
_UNPACK_PASSES = 2.8
# The same for one byte, and for layers that multiply it as it is: backward transposes it, which is
# one of two uses. Casts are counted for inputs and for gradients. None of it was measured.
_FLOAT8_UNPACK_PASSES = 3.3
_TURN_PASSES = 1.1
_BASE_CASTS = 7.5
# OLMo 3's head of 100,278 rows ran at a third of the rate before it was padded.
_ODD_HEAD = 1 / 3
# For CPUs, fitted to steps of llama-shaped models of 128 to 512 channels. Launches stand for the
# cost of the interpreter, autograd and FSDP2's hooks for each block.
ON_CPU = Software(
    overlaps=False,
    hidden_passes=300.0,
    eager_factor=1.0,
    ffn_passes=36.0,
    eager_ffn_factor=1.0,
    loss_passes=160.0,
    copy_factor=1.5,
    optimizer_passes=35.0,
    block_kernels=560.0,
    step_s=0.009,
)


def _of_packed(adapter: AdapterSpec, model: ModelSpec, decided: Decisions) -> dict[str, Any]:
    """What weights in four bits or eight change."""
    if not adapter.packed_params:
        return {}
    floats: dict[str, Any] = {"unpack_launches": _UNPACK_LAUNCHES["nf4"]}
    if adapter.packing in ("nf4", "mxfp4"):
        return {**floats, "unpack_passes": _UNPACK_PASSES}
    if not multiplies_base(decided):
        return {**floats, "unpack_passes": _FLOAT8_UNPACK_PASSES, "packed_width": 1.0}
    experts = model.expert_params * model.num_layers / adapter.packed_params
    passes = experts * _FLOAT8_UNPACK_PASSES + (1 - experts) * _TURN_PASSES
    return {
        "unpack_passes": passes,
        "packed_width": 1.0,
        "float8_passes": _BASE_CASTS,
        "unpack_launches": _UNPACK_LAUNCHES["float8"],
    }


_OWN, _PLAIN = (
    replace(base, block_kernels=_BLOCK_LAUNCHES, tensor_launches=_TENSOR_LAUNCHES)
    for base in (OURS, Software(heads=_HEADS))
)


def software_of(device: str, model: ModelSpec, decided: Decisions) -> Software:
    """The software numbers of such decisions about such a model on such devices."""
    if device != "cuda":
        return ON_CPU if model.adapter is None else replace(ON_CPU, frozen=True)
    base = _OWN if decided.own_kernels else _PLAIN
    if decided.slice_tokens is None:
        base = replace(base, loss_passes=_WHOLE_PASSES)
    if model.adapter is not None:
        # What adapters move is a part of what was counted of a block.
        base = replace(base, frozen=True, adapter_passes=0.0 if model.kinds else _ADAPTER_PASSES)
        base = replace(base, **_of_packed(model.adapter, model, decided))
    pads = decided.own_kernels and decided.slice_tokens is not None
    if model.vocab_size % EVEN_ROWS and not pads:
        base = replace(base, head_factor=_ODD_HEAD)
    if not (decided.float8_rowwise and computes_float8(model, decided)):
        return base
    # One scale for each row instead of one for each tensor, by the difference between torchtitan's
    # published runs.
    return replace(
        base, float8_factor=0.86, narrow_factor=2.1, float8_passes=19.0, float8_gathers=False
    )
