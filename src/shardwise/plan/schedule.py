"""What each rank of a pipeline does one after the other, and how long all of it takes.

The orders are those of PyTorch's schedules. A rank begins with a forward when the stage before has
sent, with a backward when the stage behind has, and waits otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "weights"]


class StageWork(NamedTuple):
    """One stage's part of one micro-batch."""

    kind: Kind
    stage: int
    batch: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule, and how long each stage takes for one micro-batch."""

    schedule: str
    ranks: int
    passes: int
    forward: tuple[float, ...]
    """By stage. Stages lie on ranks in turn."""

    backward: tuple[float, ...]
    send: float = 0.0
    """From one stage to the next."""

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return len(self.forward) // self.ranks

    def busy(self, rank: int) -> float:
        """How long a rank computes in a step."""
        own = range(rank, len(self.forward), self.ranks)
        return self.passes * sum(self.forward[stage] + self.backward[stage] for stage in own)

    def seconds(self, work: StageWork) -> float:
        """How long one piece of work takes."""
        if work.kind == "forward":
            return self.forward[work.stage]
        whole = self.backward[work.stage]
        if self.schedule != "zero_bubble":
            return whole
        # Tokens have no gradient, so the first stage does all of backward at once, and late.
        if work.stage == 0:
            return whole if work.kind == "weights" else 0.0
        return whole / 2


def work_of(pipeline: Pipeline, rank: int) -> list[StageWork]:
    """What a rank does, in order."""
    total = pipeline.passes * pipeline.chunks
    warmup = min(num_ahead(pipeline, rank), total)
    splits = pipeline.schedule == "zero_bubble"
    work = [_piece(pipeline, rank, number, "forward") for number in range(warmup)]
    late = 0
    for number in range(total):
        if warmup + number < total and pipeline.schedule != "1f1b":
            work.append(_piece(pipeline, rank, warmup + number, "forward"))
        work.append(_piece(pipeline, rank, number, "backward"))
        if warmup + number < total and pipeline.schedule == "1f1b":
            work.append(_piece(pipeline, rank, warmup + number, "forward"))
        if splits and number >= rank:
            work.append(_piece(pipeline, rank, late, "weights"))
            late += 1
    if splits:
        work += [_piece(pipeline, rank, number, "weights") for number in range(late, total)]
    return work


def num_ahead(pipeline: Pipeline, rank: int) -> int:
    """Forwards of a rank before its first turn of a forward and a backward."""
    behind = pipeline.ranks - 1 - rank
    if pipeline.schedule == "1f1b":
        return behind + 1
    distance = 1 if pipeline.schedule == "zero_bubble" else 2
    return (pipeline.chunks - 1) * _round(pipeline) + distance * behind


def most_in_flight(pipeline: Pipeline, rank: int) -> int:
    """The most micro-batches of a stage whose activations a rank keeps at once."""
    last = "weights" if pipeline.schedule == "zero_bubble" else "backward"
    now = most = 0
    for kind, _, _ in work_of(pipeline, rank):
        now += (kind == "forward") - (kind == last)
        most = max(most, now)
    return most


@lru_cache(maxsize=4096)
def seconds_of_step(pipeline: Pipeline) -> float:
    """From the first forward to the last piece of work of any rank."""
    left = [iter(work_of(pipeline, rank)) for rank in range(pipeline.ranks)]
    following = [next(each, None) for each in left]
    free = [0.0] * pipeline.ranks
    done: dict[StageWork, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(left):
            while (work := following[rank]) is not None:
                ready = _ready_at(pipeline, work, done)
                if ready is None:
                    break
                free[rank] = max(free[rank], ready) + pipeline.seconds(work)
                done[work] = free[rank]
                following[rank], moved = next(queue, None), True
    if any(work is not None for work in following):
        raise RuntimeError(f"{pipeline} would wait for ever")
    return max(free)


def _ready_at(pipeline: Pipeline, work: StageWork, done: dict[StageWork, float]) -> float | None:
    """When what a piece of work needs is there; None where it is not known yet."""
    latest = 0.0
    for needed, travels in _needs(pipeline, work):
        if needed not in done:
            return None
        latest = max(latest, done[needed] + (pipeline.send if travels else 0.0))
    return latest


def _needs(pipeline: Pipeline, work: StageWork) -> Iterator[tuple[StageWork, bool]]:
    """The pieces that come before one, and whether their result travels."""
    travels = pipeline.ranks > 1
    if work.kind == "forward" and work.stage > 0:
        yield StageWork("forward", work.stage - 1, work.batch), travels
    if work.kind == "backward":
        yield StageWork("forward", work.stage, work.batch), False
        if work.stage < len(pipeline.forward) - 1:
            yield StageWork("backward", work.stage + 1, work.batch), travels
    if work.kind == "weights":
        yield StageWork("backward", work.stage, work.batch), False


def _round(pipeline: Pipeline) -> int:
    """Micro-batches that pass one stage of a rank before the rank turns to its next stage."""
    return pipeline.passes // max(1, pipeline.passes // pipeline.ranks)


def _piece(pipeline: Pipeline, rank: int, number: int, kind: Kind) -> StageWork:
    """The `number`th of its kind on a rank."""
    size, chunks = _round(pipeline), pipeline.chunks
    turn, place = divmod(number, size)
    chunk = turn % chunks
    if kind != "forward":
        chunk = chunks - 1 - chunk
    return StageWork(kind, chunk * pipeline.ranks + rank, turn // chunks * size + place)
