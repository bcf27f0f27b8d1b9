"""Global batch = micro-batch x accumulation x ranks: which micro-batches a config leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.config.schema import Auto, TrainConfig
from shardwise.errors import UserError
from shardwise.plan.decisions import Choice

# An `auto` micro-batch stops here: larger ones fill memory and gain no speed.
MAX_AUTO_TOKENS = {"cuda": 32768, "cpu": 2048}

# With so many micro-batches for each of its ranks a pipeline is idle a fifth of the time at most.
PASSES_PER_STAGE = 4


def micro_batch_candidates(train: TrainConfig, ranks: int, seq_len: int, device: str) -> list[int]:
    """Micro-batches that keep the batch whole, largest first."""
    if train.micro_batch != "auto":
        validate_batch(train, ranks)
        return [train.micro_batch]
    if train.global_batch == "auto":
        cap = max(1, MAX_AUTO_TOKENS[device] // seq_len)
        return [size for size in (32, 24, 16, 12, 10, 8, 6, 5, 4, 3, 2, 1) if size <= cap]
    per_rank = _sequences_per_rank(train.global_batch, ranks)
    if train.accumulation != "auto":
        if per_rank % train.accumulation:
            raise _does_not_divide(train, ranks)
        return [per_rank // train.accumulation]
    cap = max(1, MAX_AUTO_TOKENS[device] // seq_len)
    return [size for size in range(min(per_rank, cap), 0, -1) if per_rank % size == 0]


def validate_batch(train: TrainConfig, ranks: int) -> None:
    """Raise where the three sizes that the user gave contradict each other."""
    if train.global_batch == "auto":
        return
    micro = 1 if train.micro_batch == "auto" else train.micro_batch
    per_rank = _sequences_per_rank(train.global_batch, ranks)
    wrong = per_rank % micro != 0
    if train.accumulation != "auto":
        wrong = per_rank != micro * train.accumulation
    if wrong:
        raise _does_not_divide(train, ranks)


def choose_batch(
    train: TrainConfig, ranks: int, micro: Choice[int], least: int = 1
) -> tuple[Choice[int], Choice[int]]:
    """(accumulation, global batch) for a chosen micro-batch. `least` ranks are stages of a
    pipeline."""
    if train.accumulation != "auto":
        passes = Choice(train.accumulation, "given", "user")
    elif train.global_batch == "auto":
        passes = Choice(1, "one pass per step", "rule")
        if least > 1:
            why = f"{PASSES_PER_STAGE} for each of {least} ranks with stages, which wait less then"
            passes = Choice(PASSES_PER_STAGE * least, why, "rule")
    else:
        formula = f"{train.global_batch} sequences / ({micro.value} x {ranks} ranks)"
        passes = Choice(train.global_batch // (micro.value * ranks), formula, "rule")
    if train.global_batch != "auto":
        return passes, Choice(train.global_batch, "given", "user")
    formula = f"{micro.value} x {passes.value} x {ranks} ranks"
    return passes, Choice(micro.value * passes.value * ranks, formula, "rule")


def _sequences_per_rank(global_batch: int, ranks: int) -> int:
    if global_batch % ranks:
        raise UserError(
            f"train.global_batch={global_batch} does not divide over {ranks} ranks",
            why="each rank takes the same number of sequences in a step",
            fix=f"write train.global_batch={_next_multiple(global_batch, ranks)}, or another "
            f"multiple of {ranks}",
        )
    return global_batch // ranks


def _does_not_divide(train: TrainConfig, ranks: int) -> UserError:
    return UserError(
        f"train.global_batch={train.global_batch} is not micro_batch={train.micro_batch} x "
        f"accumulation={train.accumulation} x {ranks} ranks",
        why="the batch must divide into whole micro-batches on every rank",
        fix=f"write {', or '.join(_ways_to_divide(train, ranks))}",
    )


def _ways_to_divide(train: TrainConfig, ranks: int) -> Iterator[str]:
    """Each of the three sizes changed alone, where that is enough."""
    yield f"train.global_batch={whole_batch(train, ranks)}"
    opened = {
        "micro_batch": replace(train, micro_batch="auto"),
        "accumulation": replace(train, accumulation="auto"),
    }
    for field, other in opened.items():
        if other != train and whole_batch(other, ranks) == train.global_batch:
            yield f"train.{field}=auto"


def whole_batch(train: TrainConfig, ranks: int) -> int | Auto:
    """The given batch, or the next larger one that is whole micro-batches on every rank."""
    if train.global_batch == "auto":
        return "auto"
    parts = ranks
    for factor in (train.micro_batch, train.accumulation):
        parts *= 1 if factor == "auto" else factor
    is_settled = "auto" not in (train.micro_batch, train.accumulation)
    return parts if is_settled else _next_multiple(train.global_batch, parts)


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
