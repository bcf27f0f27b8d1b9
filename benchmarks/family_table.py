"""The scoreboard's rows as a table, and what they come to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from family_profile import show_kernels
from family_rows import OURS

# What the plan promises of memory.
_BAR = 0.05
_HEAD = (
    *("family", "layers", "ranks", "setting", "attention", "plan GiB", "likely", "reserved"),
    *("error", "in it", "allocated", "plan tok/s", "tok/s", "error", "MFU", "of limit", "problem"),
)
_PEER_HEAD = (
    *("family", "layers", "setting", "Trainer", "tok/s", "MFU", "of limit", "reserved GiB"),
    *("ours tok/s", "ours ÷ it", "problem"),
)
Found = Mapping[str, Any]


def markdown(data: Found) -> str:
    """All of a file of results."""
    ours = [row for row in data["rows"] if row["who"] == OURS]
    peers = [row for row in data["rows"] if row["who"] != OURS]
    parts = [_machine_line(data["machine"]), table(_HEAD, map(_cells, ours)), summary(ours)]
    if peers:
        speeds = {(row["family"], row["world"], row["setting"]): row.get("tok_s") for row in ours}
        parts.append(table(_PEER_HEAD, (_peer_cells(row, speeds) for row in peers)))
    parts += [show_terms(row) for row in ours if row.get("kernels")]
    return "\n\n".join(parts)


def memory_error(row: Found) -> float | None:
    """How much too high the plan is; below 0 it is too low."""
    planned, reserved = row.get("plan_gib"), row.get("reserved_gib")
    return planned / reserved - 1 if planned and reserved else None


def speed_error(row: Found) -> float | None:
    """How much too fast the plan is."""
    planned, measured = row.get("plan_tok_s"), row.get("tok_s")
    return planned / measured - 1 if planned and measured else None


def in_band(row: Found) -> bool | None:
    """Whether what was reserved lies where the plan says that it is likely."""
    reserved = row.get("reserved_gib")
    if not reserved or row.get("plan_gib") is None:
        return None
    return bool(row["plan_low_gib"] <= reserved <= row["plan_high_gib"])


def summary(rows: Sequence[Found]) -> str:
    """Shares and worst cases over all rows, over those of families not looked at, and by place."""
    groups = {
        "all": rows,
        "families not looked at": [row for row in rows if not row["seen"]],
        "rank 0 of 8": [row for row in rows if row["world"] > 1],
        "one GPU": [row for row in rows if row["world"] == 1],
    }
    lines = [line for name, group in groups.items() if (line := _summary_line(name, group))]
    lost = [row for row in rows if row.get("problem")]
    if lost:
        lines.append(f"{len(lost)} of {len(rows)} rows have no measurement")
    return "\n".join(lines) or "nothing was measured"


def show_terms(row: Found) -> str:
    """What the plan says a step is spent on, and what the profiler saw."""
    terms = ", ".join(f"{name} {ms:.1f}" for name, ms in row["plan_terms_ms"].items())
    planned = f"{row['row']}: ms of a step by the plan: {terms}"
    return f"{planned}\n{show_kernels(row['row'], row['kernels'])}"


def line_of(row: Found) -> str:
    """A row that has just been measured."""
    if row.get("problem"):
        return f"{row['row']:<44} {row['problem']}"
    text = f"{row['row']:<44} {row['reserved_gib']:6.1f} GiB ({signed(memory_error(row))}"
    text += {True: "", False: ", not likely", None: ""}[in_band(row)]
    text += f")  {count(row.get('tok_s')):>9} tok/s ({signed(speed_error(row))})"
    return f"{text}  mfu {share(row.get('mfu'))}  limit {share(_limit_share(row))}"


def _summary_line(name: str, rows: Sequence[Found]) -> str:
    memory = [error for row in rows if (error := memory_error(row)) is not None]
    speed = [error for row in rows if (error := speed_error(row)) is not None]
    if not memory:
        return ""
    close = sum(abs(error) <= _BAR for error in memory)
    likely = sum(bool(in_band(row)) for row in rows)
    text = (
        f"{name}: {len(memory)} rows; memory within {_BAR:.0%}: {close / len(memory):.0%}, "
        f"too low by {max(0.0, -min(memory)):.1%} at worst, too high by "
        f"{max(0.0, *memory):.1%}, likely: {likely / len(memory):.0%}"
    )
    if speed:
        sizes = [abs(error) for error in speed]
        text += f"; speed off by {statistics.median(sizes):.1%} (median), {max(sizes):.1%} (worst)"
    return text


def _cells(row: Found) -> list[str]:
    planned = row.get("plan_gib") is not None
    band = f"{row['plan_low_gib']:.1f} to {row['plan_high_gib']:.1f}" if planned else "-"
    likely = {True: "yes", False: "NO", None: "-"}[in_band(row)]
    return [
        row["family"] if row["seen"] else f"{row['family']} (not looked at)",
        str(row["layers"]),
        str(row["world"]),
        row["setting"],
        row.get("attention") or "-",
        *(gib(row.get("plan_gib")), band, gib(row.get("reserved_gib"))),
        *(signed(memory_error(row)), likely, gib(row.get("allocated_gib"))),
        *(count(row.get("plan_tok_s")), count(row.get("tok_s")), signed(speed_error(row))),
        *(share(row.get("mfu")), share(_limit_share(row)), plain(row.get("problem", ""))),
    ]


def _peer_cells(row: Found, speeds: Mapping[tuple[str, int, str], float | None]) -> list[str]:
    mine, theirs = speeds.get((row["family"], row["world"], row["setting"])), row.get("tok_s")
    return [
        *(row["family"], str(row["layers"]), row["setting"], row["who"]),
        *(count(theirs), share(row.get("mfu")), share(_limit_share(row))),
        *(gib(row.get("reserved_gib")), count(mine)),
        f"{mine / theirs:.2f}" if mine and theirs else "-",
        plain(row.get("problem", "")),
    ]


def _limit_share(row: Found) -> float | None:
    limit, speed = row.get("limit_tok_s"), row.get("tok_s")
    return speed / limit if limit and speed else None


def _machine_line(machine: Found) -> str:
    words = (f"{name} {value}" for name, value in machine.items() if value is not None)
    return f"{', '.join(words)}. Ranks 8: one GPU as rank 0 of 8, links take no time."


def table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
