"""`shardwise plan --calibrate`: measure this machine, and show it beside the catalogue."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from shardwise.cli.show import show_table
from shardwise.facts.calibration import Calibration
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import Link
from shardwise.facts.rates import rates_of


def calibrate_for(cluster: ClusterSpec, *, quick: bool) -> None:
    """Measure, save the result, and print the table to stderr, because stdout belongs to the
    plan."""
    from shardwise.calibrate.machine import calibrate, measurable

    here = measurable(cluster)
    count = f"{here.world_size} rank{'s' * (here.world_size > 1)}"
    typer.echo(f"measuring {here.device_name}, {count} at the same time", err=True)
    found = calibrate(here, quick=quick)
    path = found.save()
    show_table(list(_rows(found, here)), err=True)
    typer.echo(f"kept in {path}; plans for such devices use it from now on", err=True)


def _rows(found: Calibration, cluster: ClusterSpec) -> Iterator[tuple[str, ...]]:
    """(what, measured, catalogue, measured over catalogue)."""
    catalogue = None if cluster.gpu is None else rates_of(cluster.gpu)
    yield "", "measured", "catalogue", ""
    for fmt, rate in found.rates.matmul_flops.items():
        known = None if catalogue is None else catalogue.matmul_flops.get(fmt)
        yield _row(f"matmul {fmt}", rate, known, "FLOP/s")
    for what, name, unit in _FIGURES:
        known = None if catalogue is None else getattr(catalogue, name)
        yield _row(what, getattr(found.rates, name), known, unit)
    fabric = cluster.fabric
    for what, link, usual in (
        ("inside a domain", found.inside, fabric.inside),
        ("between domains", found.between, fabric.between),
    ):
        if link is not None:
            yield from _link_rows(what, link, usual)


_FIGURES = (
    ("  half of it at a width of", "half_width", ""),
    ("attention forward", "attention_forward_flops", "FLOP/s"),
    ("attention backward", "attention_backward_flops", "FLOP/s"),
    ("  half of it at a length of", "half_context", ""),
    ("element-wise work", "memory_bytes_per_s", "B/s"),
    ("one small operation", "launch_s", "s"),
)


def _link_rows(what: str, link: Link, usual: Link) -> Iterator[tuple[str, ...]]:
    yield _row(f"link {what}", link.bytes_per_s, usual.bytes_per_s, "B/s")
    yield _row("  each hop", link.hop_s, usual.hop_s, "s")


def _row(what: str, measured: float, known: float | None, unit: str) -> tuple[str, ...]:
    if not known:
        return what, _figure(measured, unit), "-", ""
    return what, _figure(measured, unit), _figure(known, unit), f"{measured / known:.2f} x"


def _figure(value: float, unit: str) -> str:
    """3.2e9 FLOP/s -> '3.20 GFLOP/s'; 4e-6 s -> '4.0 us'."""
    if not unit:
        return f"{value:.0f}"
    if unit == "s":
        return f"{value * 1e6:.1f} us"
    for prefix, size in (("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value / 1e6:.1f} M{unit}"
