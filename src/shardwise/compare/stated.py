"""A run that somebody states in a few words, as a row of the table of published runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import ceil

from shardwise.compare.layout import UnusableRow
from shardwise.compare.published_rows import PublishedRun, read_run
from shardwise.compare.shapes import Shape
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec

# Where nothing is said of the batch: what steps of large models usually read.
_USUAL_STEP = 2**20
_USUAL_SEQ = 4096
_NOT_GATED = ("gpt2", "gpt_neox", "opt", "bloom", "mpt", "falcon")
_FSDP = {"strategy": "FULL_SHARD", "compile": "no", "attention_impl": "flash_attention_2"}
_TUNED = {"compile": "no", "attention_impl": "cudnn", "notes": "fused norm"}


@dataclass(frozen=True, slots=True)
class StackHabits:
    """A stack that a user may name: whose profile it has, and what its runs usually do."""

    source: str
    usual: Mapping[str, str] = field(default_factory=lambda: _FSDP)


HABITS: dict[str, StackHabits] = {
    "megatron": StackHabits("megatron-bridge", {**_TUNED, "strategy": "ZERO1"}),
    "torchtitan": StackHabits(
        "torchtitan", {**_FSDP, "compile": "yes", "activation_ckpt": "selective"}
    ),
    "nanotron": StackHabits("nanotron", {**_FSDP, "strategy": "ZERO1"}),
    "prime-rl": StackHabits("prime-rl", {**_FSDP, "compile": "yes", "activation_ckpt": "full"}),
    "automodel": StackHabits("automodel", {**_TUNED, "strategy": "FULL_SHARD"}),
    "llm-foundry": StackHabits("llm-foundry"),
    "torchtune": StackHabits("torchtune"),
    "deepspeed": StackHabits("deepspeed", {**_FSDP, "strategy": "ZERO3"}),
    **{name: StackHabits(name) for name in ("trainer", "accelerate", "axolotl", "llama-factory")},
    **{name: StackHabits(name) for name in ("trl", "verl", "fsdp")},
}
_OTHER_NAMES = {
    "megatron-lm": "megatron",
    "megatron-core": "megatron",
    "megatron-bridge": "megatron",
    "nemo": "megatron",
    "nemo-automodel": "automodel",
    "transformers": "trainer",
    "hf": "trainer",
    "zero3": "deepspeed",
    "llamafactory": "llama-factory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedRun:
    """What a user says of a run. None is what was left unsaid."""

    model: ModelSpec
    cluster: ClusterSpec
    tokens_per_s: float
    stack: str
    seq: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    recompute: str | None = None
    network: str | None = None
    set_up: Mapping[str, str] = field(default_factory=dict)
    """Fields of a row that words have said (`said_words.py`)."""

    @property
    def seq_len(self) -> int:
        """The tokens of a sequence."""
        return self.seq or _USUAL_SEQ

    @property
    def replicas(self) -> int:
        """Ranks that read sequences of their own."""
        return self.cluster.world_size // (self.tensor * self.pipeline * self.context)


def habits_of(stack: str) -> StackHabits:
    """The stack that a word means."""
    name = stack.lower()
    name = _OTHER_NAMES.get(name, name)
    if name in HABITS:
        return HABITS[name]
    near = get_close_matches(name, [*HABITS, *_OTHER_NAMES], n=2, cutoff=0.6)
    raise UserError(
        f"unknown stack {stack!r}",
        why=f"the known ones are {', '.join(HABITS)}",
        fix=f"did you mean --stack {' or --stack '.join(near)}?"
        if near
        else "write --stack fsdp for a stack of FSDP or ZeRO-3 that is not named",
    )


def read_stated(stated: StatedRun) -> tuple[PublishedRun, list[str]]:
    """The run as a row would have it, and what was assumed because nobody said it."""
    _validate_split(stated)
    habits, cluster = habits_of(stated.stack), stated.cluster
    if cluster.gpu is None:
        raise UserError(
            f"{cluster.name} has no GPU that is known",
            fix="write --cluster NODESxGPUSxKIND, such as --cluster 2x8xH100",
        )
    passes, assumed = _passes(stated)
    said = dict(stated.set_up)
    states, notes = said.pop("states", ""), said.pop("notes", "")
    row = {
        **habits.usual,
        **said,
        "source": habits.source,
        "gpu": cluster.gpu.name,
        "n_gpus": str(cluster.world_size),
        "gpus_per_node": str(cluster.devices_per_node),
        "seq_len": str(stated.seq_len),
        "tp": str(stated.tensor),
        "pp": str(stated.pipeline),
        "cp": str(stated.context),
        "ep": str(stated.expert),
        "micro_batch": str(stated.micro_batch or 1),
        "grad_accum": str(passes),
        "precision": f"{stated.precision or 'bf16'} {states}".strip(),
        "tokens_per_s_per_gpu": str(stated.tokens_per_s),
        "interconnect": stated.network or "",
        "notes": "; ".join(filter(None, (habits.usual.get("notes", ""), notes))),
    }
    if stated.recompute is not None:
        row["activation_ckpt"] = stated.recompute
    if stated.expert > 1 and stated.expert > cluster.devices_per_node:
        row["notes"] += "; DeepEP"
    shape = Shape(stated.model, gated=stated.model.model_type not in _NOT_GATED)
    try:
        run = read_run(0, row, shape)
    except UnusableRow as reason:
        raise _impossible(stated, reason) from None
    return run, [*assumed, *_unsaid(stated, run)]


def _passes(stated: StatedRun) -> tuple[int, list[str]]:
    """Micro-batches of a step, and how they were found."""
    micro_batch, replicas = stated.micro_batch or 1, stated.replicas
    if stated.global_batch is not None:
        return max(1, round(stated.global_batch / (micro_batch * replicas))), []
    passes = max(stated.pipeline, ceil(_USUAL_STEP / (micro_batch * replicas * stated.seq_len)))
    batch = passes * micro_batch * replicas
    return passes, [f"{batch} sequences in a step (--global-batch)"]


def _unsaid(stated: StatedRun, run: PublishedRun) -> Iterator[str]:
    """What the row has taken as usual."""
    decided = run.decided
    if stated.seq is None:
        yield f"sequences of {stated.seq_len} tokens (--seq)"
    if stated.micro_batch is None:
        yield "one sequence in a micro-batch (--micro-batch)"
    if stated.precision is None:
        yield "bf16 (--precision)"
    if stated.recompute is None:
        yield f"recompute {decided.checkpoint_activations} (--recompute)"
    kernels = {
        "compile": "fused kernels" if decided.compile else "no fused kernels",
        "attention_impl": f"FlashAttention {run.traits.flash} or as fast",
    }
    unsaid = [words for name, words in kernels.items() if name not in stated.set_up]
    if unsaid:
        yield f"{', '.join(unsaid)}, as {stated.stack} usually runs (--with)"
    if decided.pipeline > 1 and decided.pipeline_chunks == 1:
        share = (decided.pipeline - 1) / (decided.accumulation + decided.pipeline - 1)
        yield (
            f"a pipeline that is idle {share:.0%} of the time or more: {decided.pipeline} stages, "
            f"{decided.accumulation} micro-batches, no interleaving (--with vp=2)"
        )
    if stated.network is None and stated.cluster.num_nodes > 1:
        yield f"{run.fabric.between.name} between nodes (--network)"


def _validate_split(stated: StatedRun) -> None:
    ranks = stated.tensor * stated.pipeline * stated.context
    if stated.cluster.world_size % ranks:
        raise UserError(
            f"--tp {stated.tensor} x --pp {stated.pipeline} x --cp {stated.context} does not "
            f"divide {stated.cluster.world_size} GPUs",
            fix="write --tp 1 --pp 1 --cp 1, or sizes whose product divides them",
        )
    copies = int(stated.set_up.get("dp_replicate", "1"))
    if stated.replicas % copies:
        raise UserError(
            f"--with replicas={copies} does not divide the {stated.replicas} ranks that read "
            "sequences of their own",
            fix="write --with replicas=N with an N that divides them, or leave it out",
        )
    if "vp " in stated.set_up.get("notes", "") and stated.pipeline == 1:
        raise UserError(
            "--with vp=N divides the blocks of a pipeline's stages, and there is one stage",
            fix="add --pp N, or leave vp out",
        )
    if stated.expert > 1 and stated.model.num_experts < 2:
        raise UserError(
            f"--ep {stated.expert}: {stated.model.name} has no experts",
            fix="write --ep 1",
        )


def _impossible(stated: StatedRun, reason: UnusableRow) -> UserError:
    total = stated.cluster.world_size
    fix = "write --tokens-per-s NUMBER, of one GPU"
    if "peak" in str(reason) and total > 1:
        fix = (
            "give the tokens of one GPU: where these are of all, write --tokens-per-s "
            f"{stated.tokens_per_s / total:.0f}"
        )
    return UserError(f"this run cannot be: {reason}", fix=fix)
