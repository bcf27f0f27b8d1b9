"""Which rank the others wait for, step after step.

The time of a rank in a collective includes its wait for the others, so the rank that waits least
comes last. In one step that may be any rank: a pause, a busy core. A rank that holds the others up
does so in nearly every step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.parallel.mesh import World

# A rank is late in a step if the others wait longer than it by this share of the step, and by at
# least so many seconds. Ranks that share a CPU hold each other up all the time.
BEHIND_SHARE = {"cuda": 0.10, "cpu": 0.25}
BEHIND_S = {"cuda": 0.005, "cpu": 0.05}
# A rank is named when it was late in so many of the last steps. With a report every ten steps that
# is at most 18 steps after it became slow. By chance one of two ranks would be late so often in 2%
# of all cases, and the waits must be long besides.
JUDGED_STEPS = 10
LATE_STEPS = 9
# A named rank stays named until it was late in fewer steps, so that an alert does not come and go
# with noise.
STILL_LATE_STEPS = 5


def find_straggler(
    waits: Sequence[float], step_s: float, device: str, named: int | None, world: World
) -> dict[str, Any] | None:
    """Find the rank that the others wait for, from the waits of all ranks in their last steps.

    This is a collective call. `named` is the rank that was found before, if any.
    """
    if len(waits) < JUDGED_STEPS:
        return None
    mine = torch.tensor(waits, dtype=torch.float64)
    everyones = torch.empty(world.size * len(waits), dtype=torch.float64)
    dist.all_gather_into_tensor(everyones, mine, group=world.group)
    of_ranks = everyones.view(-1, len(waits)).tolist()
    return judge_waits(of_ranks, max(BEHIND_S[device], BEHIND_SHARE[device] * step_s), named)


def judge_waits(
    of_ranks: Sequence[Sequence[float]], late_s: float, named: int | None = None
) -> dict[str, Any] | None:
    """The rank that waits least, if it does so nearly always and by far. `waits` are by rank and
    step."""
    if len(of_ranks) == 1:
        return None
    last = min(range(len(of_ranks)), key=lambda rank: statistics.median(of_ranks[rank]))
    others = [waits for rank, waits in enumerate(of_ranks) if rank != last]
    behind = [
        statistics.median(waits) - own for *waits, own in zip(*others, of_ranks[last], strict=True)
    ]
    needed = STILL_LATE_STEPS if last == named else LATE_STEPS
    if sum(seconds >= late_s for seconds in behind) < needed:
        return None
    return {"rank": last, "behind_s": statistics.median(behind)}
