"""What each rank of a pipeline does one after the other, and how long all of it takes.

The orders are those of PyTorch's schedules. A rank begins with a forward when the stage before has
sent, with a backward when the stage behind has, and waits otherwise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

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

    in_slots: bool = False
    """Ranks of an interleaved schedule count slots, as PyTorch's do. In each a rank does one piece
    of work or none, and ends it together with those that it sends to or receives from."""

    @property
    def num_stages(self) -> int:
        """On all ranks."""
        return len(self.forward)

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.num_stages // self.ranks

    def busy(self, rank: int) -> float:
        """How long a rank computes in a step."""
        own = range(rank, self.num_stages, self.ranks)
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


def slots_of(pipeline: Pipeline, rank: int) -> list[StageWork | None]:
    """The same by slots, as PyTorch's interleaved schedule counts them; None where a rank waits for
    its turn."""
    work, total = work_of(pipeline, rank), pipeline.passes * pipeline.chunks
    ahead = min(num_ahead(pipeline, rank), total)
    first_backward = pipeline.num_stages + 2 * (pipeline.ranks - 1 - rank)
    in_turn = 2 * total - ahead
    last = [slot for backward in work[in_turn:] for slot in (None, backward)]
    waits = [None] * (first_backward - ahead - rank) if ahead else []
    return [*[None] * rank, *work[:ahead], *waits, *work[ahead:in_turn], *last]


def num_ahead(pipeline: Pipeline, rank: int) -> int:
    """Forwards of a rank before its first turn of a forward and a backward."""
    behind = pipeline.ranks - 1 - rank
    if pipeline.schedule == "1f1b":
        return behind + 1
    distance = 1 if pipeline.schedule == "zero_bubble" else 2
    return (pipeline.chunks - 1) * _round(pipeline) + distance * behind


@lru_cache(maxsize=4096)
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
    meets = pipeline.in_slots and pipeline.schedule == "interleaved_1f1b"
    return _play_slots(pipeline) if meets else _play(pipeline)


def _play(pipeline: Pipeline) -> float:
    """Where a rank waits for nothing but what it needs."""
    kinds, stages = get_args(Kind), range(pipeline.num_stages)
    seconds = [pipeline.seconds(StageWork(kind, stage, 0)) for kind in kinds for stage in stages]
    # What is done in turn does not depend on how long it takes.
    alike = (1.0,) * pipeline.num_stages
    free = [0.0] * pipeline.ranks
    done: list[float] = []
    for rank, piece, after in _turns(replace(pipeline, forward=alike, backward=alike, send=0.0)):
        begin = free[rank]
        if after is not None:
            begin = max(begin, done[after] + pipeline.send)
        free[rank] = begin + seconds[piece]
        done.append(free[rank])
    return max(free)


@lru_cache(maxsize=64)
def _turns(pipeline: Pipeline) -> list[tuple[int, int, int | None]]:
    """All pieces of work, each after those that it needs: its rank, its kind and stage as one
    number, and the place in this list of what another rank has to send."""
    kinds = get_args(Kind)
    turns: list[tuple[int, int, int | None]] = []
    left = [deque(work_of(pipeline, rank)) for rank in range(pipeline.ranks)]
    places: dict[StageWork, int] = {}
    while any(left):
        before = len(turns)
        for rank, queue in enumerate(left):
            while queue:
                needed = _sent_before(pipeline, queue[0])
                if needed is not None and needed not in places:
                    break
                work = queue.popleft()
                places[work] = len(turns)
                piece = kinds.index(work.kind) * pipeline.num_stages + work.stage
                turns.append((rank, piece, None if needed is None else places[needed]))
        if len(turns) == before:
            raise RuntimeError(f"{pipeline} would wait for ever")
    return turns


def _play_slots(pipeline: Pipeline) -> float:
    """Where the ranks that send and receive in a slot end it together."""
    free = [0.0] * pipeline.ranks
    slots = [slots_of(pipeline, rank) for rank in range(pipeline.ranks)]
    for slot in zip_longest(*slots):
        done = [
            at + (pipeline.seconds(work) if work else 0.0)
            for at, work in zip(free, slot, strict=True)
        ]
        free = list(done)
        for rank, work in enumerate(slot):
            if work is not None and (other := _receiver(pipeline, work)) is not None:
                met = max(done[rank], done[other]) + pipeline.send
                free[rank], free[other] = max(free[rank], met), max(free[other], met)
    return max(free)


def _receiver(pipeline: Pipeline, work: StageWork) -> int | None:
    """The rank that gets what a piece of work has made."""
    following = work.stage + (1 if work.kind == "forward" else -1)
    is_sent = work.kind != "weights" and 0 <= following < pipeline.num_stages
    return following % pipeline.ranks if is_sent else None


def _sent_before(pipeline: Pipeline, work: StageWork) -> StageWork | None:
    """What another rank has to do before a piece of work. What its own rank does is in order."""
    if work.kind == "forward" and work.stage > 0:
        return StageWork(work.kind, work.stage - 1, work.batch)
    if work.kind == "backward" and work.stage < pipeline.num_stages - 1:
        return StageWork(work.kind, work.stage + 1, work.batch)
    return None


def _round(pipeline: Pipeline) -> int:
    """Micro-batches that pass one stage of a rank before the rank turns to its next stage."""
    most = max(1, pipeline.passes // pipeline.ranks)
    rounds = next(num for num in range(most, 0, -1) if pipeline.passes % num == 0)
    return pipeline.passes // rounds


def _piece(pipeline: Pipeline, rank: int, number: int, kind: Kind) -> StageWork:
    """The `number`th of its kind on a rank."""
    size, chunks = _round(pipeline), pipeline.chunks
    turn, place = divmod(number, size)
    chunk = turn % chunks
    if kind != "forward":
        chunk = chunks - 1 - chunk
    return StageWork(kind, chunk * pipeline.ranks + rank, turn // chunks * size + place)
