"""A result of the tunnel as text, beside what the plan expected."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote
from typing import get_args

from shardwise.plan.axis_traffic import AXES, AxisTraffic, planned_traffic
from shardwise.plan.batch import whole_batch
from shardwise.plan.planned import MemoryEstimate
from shardwise.tunnel.ledger import Class
from shardwise.tunnel.result import TunnelResult
from shardwise.tunnel.traffic import sum_traffic
from shardwise.units import GIB, format_bytes, format_count

_EIGHT = "8xH100"
_WHERE = {
    "gpu": "on {device}, with emulated links",
    "cpu": "on {device}, with links emulated by sleep",
    "fake": "on fake tensors: one step, nothing computed",
}

# The plan's classes in the tunnel's words; the rest is what no tensor shows.
_CLASSES: dict[str, Class] = {
    "params": "params",
    "grads": "grads",
    "optimizer": "optimizer",
    "gathered": "gathered",
    "buffers": "gathered",
    "activations": "activations",
    "recompute": "activations",
    "loss": "loss",
}


def headline(result: TunnelResult) -> str:
    """One line: who ran where."""
    where = _WHERE[result.mode].format(device=result.device_name)
    return f"wind tunnel: rank 0 of {result.plan.world_size} {where}"


def memory_rows(result: TunnelResult) -> list[tuple[str, ...]]:
    """(class, bytes at the peak, the most of it, the plan's estimate), the total last."""
    memory, planned = result.memory, _planned(result.plan.memory)
    rows: list[tuple[str, ...]] = [("", "at the peak", "largest", "plan")]
    for name in dict.fromkeys([*memory.largest, *memory.classes]):
        held = (_show(sizes.get(name)) for sizes in (memory.classes, memory.largest))
        rows.append((name, *held, format_bytes(planned.get(name, _rest(planned)))))
    capacity = format_bytes(result.plan.cluster.memory_bytes)
    total = f"{format_bytes(result.plan.memory.total)} of {capacity}"
    moment = f"in {memory.moment}" if memory.moment else ""
    rows.append(("allocated", format_bytes(memory.allocated_bytes), moment, total))
    if memory.reserved_bytes is not None:
        rows.append(("reserved", format_bytes(memory.reserved_bytes), "", total))
    return rows


def traffic_title(result: TunnelResult) -> str:
    """The title, with the links."""
    if not result.collectives:
        return "no collectives: there is one rank"
    if result.links.are_free:
        return "collectives of one step; links of infinite speed"
    fabric = result.links.fabric
    speed = f" at {result.links.speed:g} x their speed" if result.links.speed != 1 else ""
    rates = f"{fabric.inside.name} {fabric.inside.bytes_per_s / 1e9:.3g} GB/s"
    if result.plan.world_size > fabric.domain:
        between = fabric.between
        rates += f", between nodes {between.name} {between.bytes_per_s / 1e9:.3g} GB/s"
    return f"collectives of one step; links{speed}: {rates}"


def traffic_rows(result: TunnelResult) -> list[tuple[str, ...]]:
    """(kind, axis, group, count, GiB, modelled ms); none where nothing moves."""
    if not result.collectives:
        return []
    rows: list[tuple[str, ...]] = [("kind", "along", "ranks", "count", "GiB", "ms modelled")]
    for row in sum_traffic(result.collectives):
        group = str(row.ranks) if row.stride == 1 else f"{row.ranks}, every {row.stride}th"
        size, milliseconds = f"{row.num_bytes / GIB:.3f}", f"{row.seconds * 1e3:.2f}"
        rows.append((row.kind, row.axis or "-", group, str(row.count), size, milliseconds))
    return rows


def axis_rows(result: TunnelResult) -> list[tuple[str, ...]]:
    """(axis, bytes, the plan's, modelled ms, the plan's) of one step; none where nothing moves."""
    counted, planned = result.axes, planned_traffic(result.plan)
    rows: list[tuple[str, ...]] = [("along", "a step", "plan", "ms modelled", "plan")]
    for axis in AXES:
        sums = counted.get(axis, AxisTraffic(0, 0.0)), planned.get(axis, AxisTraffic(0, 0.0))
        if any(each.num_bytes for each in sums):
            sizes = (format_bytes(each.num_bytes) for each in sums)
            rows.append((axis, *sizes, *(f"{each.seconds * 1e3:.2f}" for each in sums)))
    return rows if len(rows) > 1 else []


def timing_rows(result: TunnelResult) -> list[tuple[str, ...]]:
    """(what, value, remark)."""
    timing, forecast = result.timing, result.plan.forecast
    if timing is None:
        return []
    asked, exposed = result.communication_s, timing.exposed_s
    hidden = f"{1 - min(1.0, exposed / asked):.0%} of it is hidden" if asked else "nothing to hide"
    planned = f"plan {forecast.step_s * 1e3:.1f} ms" if forecast else ""
    rows: list[tuple[str, ...]] = [
        ("step", f"{timing.step_s * 1e3:.1f} ms", planned),
        ("over free links", f"{timing.free_step_s * 1e3:.1f} ms", ""),
        ("communication", f"{asked * 1e3:.1f} ms", f"emulated {timing.emulated_s * 1e3:.1f} ms"),
        ("exposed", f"{exposed * 1e3:.1f} ms", hidden),
        ("speed", f"{format_count(timing.tokens_per_s_per_gpu)} tok/s/gpu", ""),
    ]
    if timing.mfu is not None and timing.hfu is not None:
        planned = f", plan {forecast.mfu:.1%}" if forecast and forecast.mfu else ""
        rows.append(("mfu", f"{timing.mfu:.1%}", f"hfu {timing.hfu:.1%}{planned}"))
    return rows


def next_lines(result: TunnelResult, words: str) -> list[str]:
    """What to try; `words` are the file and the changes that the user typed."""
    if result.trace is not None:
        trace = quote(str(result.trace))
        return [f"next: shardwise profile {trace}   (where the time of a step goes)"]
    if not result.collectives:
        return [
            f"next: shardwise tunnel {words} --cluster {_EIGHT}{_batch(result)}   (rank 0 of more)"
        ]
    command = f"shardwise tunnel {words} --cluster {result.plan.cluster.name}"
    slower = 1 if result.links.are_free else result.links.speed / 2
    lines = [f"next: {command} --link-speed {slower:g}   (slower links)"]
    if result.mode == "fake":
        lines.append("      the same on a machine with a GPU   (measures the step)")
    lines.append(f"      shardwise plan {words} --cluster {result.plan.cluster.name}   (reasons)")
    return lines


def _batch(result: TunnelResult) -> str:
    """A change of the batch, where the one that was given does not divide over eight ranks."""
    train = result.plan.settings.train
    whole = whole_batch(train, 8)
    return "" if whole == train.global_batch else f" train.global_batch={whole}"


def _planned(memory: MemoryEstimate) -> dict[str, int]:
    """The plan's estimate by the tunnel's classes."""
    planned = dict.fromkeys(get_args(Class), 0)
    for name, value in asdict(memory).items():
        if isinstance(value, int):
            planned[_CLASSES.get(name, "other")] += value
    return planned


def _rest(planned: dict[str, int]) -> int:
    """All that a device cannot tell apart."""
    return sum(size for name, size in planned.items() if name not in ("params", "optimizer"))


def _show(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
