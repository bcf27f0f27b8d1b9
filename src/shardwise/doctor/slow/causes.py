"""Causes of a slow run, each with the share of the time that it costs and the evidence."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardwise.doctor.slow.pace import Pace
from shardwise.plan.rank_share import num_shards
from shardwise.report.values import short_seconds
from shardwise.units import format_bytes, format_rate

# Below this share of a link's bandwidth the links are slow; above it they are only not hidden.
_SLOW_LINK = 0.5
_DRIFT = 0.07
_FULL = 0.92
_TORN = 1.15
_ROOMY = 0.7
_UNEVEN = 0.05


@dataclass(frozen=True, slots=True)
class TimeLost:
    """What one cause costs."""

    share: float
    """Of the run's time."""

    evidence: str


Measure = Callable[[Pace], TimeLost | None]


def input_wait(pace: Pace) -> TimeLost | None:
    """Steps wait for data."""
    share = statistics.median(event["data_share"] for event in pace.case.steady)
    return TimeLost(share, f"{share:.0%} of the time of steps went to waiting for data")


def late_rank(pace: Pace) -> TimeLost | None:
    """The others wait for one rank."""
    if pace.late is None:
        return None
    rank, share = pace.late
    seconds = share * pace.step_s
    return TimeLost(share, f"the others wait {short_seconds(seconds)} of each step for rank {rank}")


def _exposed(pace: Pace) -> float:
    """Communication that nothing hides, above the plan. Waiting for a late rank is not counted."""
    excess = pace.excess("exposed")
    late = pace.late[1] if pace.late is not None else 0.0
    if excess is not None:
        return max(0.0, excess - late)
    if pace.planned_s is None:
        slow = 1.0 if pace.link_share is None else pace.link_share[0]
        return max(0.0, (1 - slow) * pace.communication_share - late)
    # Nothing was profiled: what is missing beside data and a late rank may be communication.
    waited = input_wait(pace)
    return max(0.0, pace.slower - late - (waited.share if waited else 0.0))


def slow_links(pace: Pace) -> TimeLost | None:
    """Collectives reach a part of the links' bandwidth."""
    if pace.link_share is None or pace.link_share[0] >= _SLOW_LINK:
        return None
    share, kind = pace.link_share
    # A late rank makes collectives look slow: it is the cause then.
    if pace.late is not None and pace.late[1] >= _exposed(pace):
        return None
    fabric, decided = pace.plan.cluster.fabric, pace.plan.decided
    inside = num_shards(decided) * decided.tensor <= fabric.domain and kind != "all_reduce"
    link = fabric.inside if inside else fabric.between
    return TimeLost(
        _exposed(pace),
        f"{kind} reaches {share:.0%} of what {link.name} should carry "
        f"({format_rate(link.bytes_per_s)})",
    )


def exposed_communication(pace: Pace) -> TimeLost | None:
    """Collectives are as fast as the links, and no compute hides them."""
    is_slow = pace.link_share is not None and pace.link_share[0] < _SLOW_LINK
    if pace.profile is None or is_slow:
        return None
    exposed, planned = pace.profile["exposed_share"], pace.planned_share("exposed", "waiting")
    return TimeLost(
        _exposed(pace),
        f"{exposed:.0%} of profiled steps is exposed communication, where the plan has "
        f"{planned:.0%}",
    )


def slow_compute(pace: Pace) -> TimeLost | None:
    """Kernels take longer than the device should need."""
    excess = pace.excess("compute")
    drifts = pace.drift > _DRIFT
    if excess is None and not drifts:
        return None
    share = excess if excess is not None else _unexplained(pace)
    told = []
    if pace.profile is not None:
        told.append(
            f"kernels take {pace.profile['compute_share'] * pace.profile['step_s']:.2f} s of a "
            f"step, where the plan has {(pace.profile['compute_share'] - share) * pace.step_s:.2f}"
            " s"
        )
    if drifts:
        told.append(f"the last steps are {pace.drift:.0%} slower than the first")
    return TimeLost(share, "; ".join(told))


def launch_gaps(pace: Pace) -> TimeLost | None:
    """The device waits for the host."""
    excess = pace.excess("idle")
    if excess is None or pace.profile is None:
        return None
    waited = input_wait(pace)
    share = excess - (waited.share if waited else 0.0)
    gaps = pace.profile.get("gaps")
    often = f" in {gaps:.0f} gaps a step" if isinstance(gaps, int | float) else ""
    return TimeLost(share, f"the device is idle {pace.profile['idle_share']:.0%} of a step{often}")


def host_copies(pace: Pace) -> TimeLost | None:
    """Copies between host and device are not hidden."""
    excess = pace.excess("copies")
    if excess is None or pace.profile is None:
        return None
    return TimeLost(excess, f"copies take {pace.profile['copies_share']:.0%} of a step")


def fragmentation(pace: Pace) -> TimeLost | None:
    """The allocator holds much more than is used, and has no room left."""
    last = pace.case.steady[-1]
    reserved, allocated = last["memory"]["reserved"], last["memory"]["allocated"]
    is_full = reserved > _FULL * last["memory_capacity"]
    if pace.plan.cluster.device != "cuda" or not is_full or reserved < _TORN * allocated:
        return None
    return TimeLost(
        _unexplained(pace),
        f"{format_bytes(reserved)} are reserved and {format_bytes(allocated)} used, of "
        f"{format_bytes(last['memory_capacity'])}: the allocator frees and asks again in steps",
    )


def recomputed_activations(pace: Pace) -> TimeLost | None:
    """Activations are recomputed because the user says so, and there is room."""
    last, choice = pace.case.steady[-1], pace.plan.choices["checkpoint_activations"]
    reserved, capacity = last["memory"]["reserved"], last["memory_capacity"]
    has_room = reserved < _ROOMY * capacity and not pace.plan.decided.offload
    if choice.source != "user" or not has_room:
        return None
    return TimeLost(
        pace.planned_share("recompute"),
        f"memory.checkpoint_activations={choice.value} with {format_bytes(reserved)} reserved of "
        f"{format_bytes(capacity)}",
    )


def _spent(kinds: tuple[str, ...], words: str, pace: Pace) -> TimeLost | None:
    share = sum(pace.spent[kind] for kind in kinds)
    return TimeLost(share, f"{share:.0%} of the run's time went to {words}")


def restarts(pace: Pace) -> TimeLost | None:
    """Steps were done twice, and ranks started anew."""
    if not pace.case.of_kind("restart", "rollback"):
        return None
    kinds = ("recompute", "restore", "idle")
    return _spent(kinds, "restarts and to steps that were done again", pace)


def evaluations(pace: Pace) -> TimeLost | None:
    """Held-out text is read too often."""
    count = len(pace.case.of_kind("eval"))
    if count < 2 or pace.case.of_kind("restart", "rollback"):
        return None
    return _spent(("idle",), f"{count} evaluations", pace)


def uneven_steps(pace: Pace) -> TimeLost | None:
    """A few steps take much longer than the others."""
    times = [event["step_s"] for event in pace.case.steady]
    mean = statistics.fmean(times)
    share = 1 - pace.step_s / mean
    if share < _UNEVEN:
        return None
    return TimeLost(
        share, f"the longest step took {max(times) / pace.step_s:.1f} times the usual one"
    )


def overflows(pace: Pace) -> TimeLost | None:
    """fp16 batches were computed again with a smaller scale."""
    again = sum(
        int(event["overflows"])
        for event in pace.case.of_kind("loss_scale")
        if isinstance(event.get("overflows"), int)
    )
    last = pace.case.steps[-1]["step"]
    if not again:
        return None
    return TimeLost(again / (last + again), f"{again} batches of {last} steps were computed again")


checkpoint_stalls: Measure = partial(_spent, ("checkpoint",), "copying checkpoints to the host")
compilation: Measure = partial(_spent, ("compile",), "compilation and warm-up")

# Causes that a profile or the record measures by themselves.
_DIRECT: tuple[Measure, ...] = (input_wait, late_rank, launch_gaps, host_copies)


def _unexplained(pace: Pace) -> float:
    """What is missing of the plan's speed beside all that was measured by itself."""
    found = [loss.share for measure in _DIRECT if (loss := measure(pace)) and loss.share > 0]
    profiled = 0.0 if pace.profile is None else _exposed(pace)
    return max(0.0, pace.slower - sum(found) - profiled)


def nothing_tells(pace: Pace) -> TimeLost | None:
    """The rest, where nothing was recorded that would tell."""
    known = slow_compute(pace), fragmentation(pace), slow_links(pace)
    if any(each is not None for each in known) or pace.profile is not None:
        return None
    share = _unexplained(pace)
    return TimeLost(share, f"steps take {short_seconds(pace.step_s)}, and {share:.0%} of that is "
                "neither planned nor recorded")  # fmt: skip
