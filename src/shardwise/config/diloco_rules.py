"""Rules about sites and their outer step, as rows."""

from __future__ import annotations

from dataclasses import fields

from shardwise.config.rule import Rule, above_zero, at_least, within
from shardwise.config.schema import DilocoConfig, RunConfig
from shardwise.config.schema_text import value_at

_DEFAULTS = RunConfig()


def _needs_sites(field: str) -> Rule:
    """A row for a setting that has no effect where there is one site."""
    return Rule(
        f"{field}-needs-sites",
        field,
        lambda c: c.num_sites > 1 or value_at(c, field) == value_at(_DEFAULTS, field),
        "there is one site, which exchanges nothing",
        f"write mesh.site=2 or more, or leave {field} out",
    )


def _at_outer_steps(field: str) -> Rule:
    """A row for steps at which all sites must have the same model."""

    def holds(config: RunConfig) -> bool:
        step = value_at(config, field)
        return config.num_sites == 1 or step is None or step % config.diloco.steps == 0

    def fix(config: RunConfig) -> str:
        every = config.diloco.steps
        nearest = max(1, round(value_at(config, field) / every)) * every
        return f"write {field}={nearest}, or another multiple of diloco.steps={every}"

    return Rule(
        f"{field}-is-an-outer-step",
        field,
        holds,
        "sites have one model only after an outer step, every {c.diloco.steps} steps",
        fix,
    )


def _alone(field: str, reason: str, *values: object) -> Rule:
    """A row for what was not tried with several sites."""
    return Rule(
        f"{field}-has-one-site",
        field,
        lambda c: c.num_sites == 1 or value_at(c, field) in values,
        f"there are {{c.num_sites}} sites, and {reason}",
        f"write mesh.site=1 cluster.datacenters=1, or leave {field} out",
    )


def _together(field: str, reason: str, *values: object) -> Rule:
    """A row for what only sites of one job do."""
    return Rule(
        f"{field}-in-one-job",
        field,
        lambda c: c.diloco.meet is None or value_at(c, field) in values,
        f"sites that meet at diloco.meet={{c.diloco.meet}} {reason}",
        f"leave {field} out" if values[0] is None else f"write {field}={values[0]}",
    )


def _is_address(text: str | None) -> bool:
    if text is None:
        return True
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16


DILOCO_RULES: tuple[Rule, ...] = (
    *at_least(1, "mesh.site", "cluster.datacenters", "diloco.steps", "diloco.fragments"),
    *at_least(0, "diloco.overlap_steps", "cluster.site_delay_ms", "diloco.site"),
    above_zero("diloco.patience_s", "300"),
    above_zero("diloco.lr", "0.7"),
    above_zero("cluster.site_link", "0.1 for 100 Mbit/s"),
    within("diloco.momentum", 0, 1),
    within("diloco.max_share", 0, 1),
    *(_needs_sites(f"diloco.{item.name}") for item in fields(DilocoConfig)),
    Rule(
        "meet-is-an-address",
        "diloco.meet",
        lambda c: _is_address(c.diloco.meet),
        "sites meet at HOST:PORT, where `shardwise sites` listens",
        "write diloco.meet=node1:29700",
    ),
    Rule(
        "site-is-one-of-the-sites",
        "diloco.site",
        lambda c: c.diloco.site < c.num_sites,
        "there are mesh.site={c.num_sites} sites, and the first one is 0",
        "write diloco.site=0",
    ),
    Rule(
        "site-of-a-job",
        "diloco.site",
        lambda c: c.diloco.site == 0 or c.diloco.meet is not None,
        "one job has all sites, because diloco.meet is not given",
        "leave diloco.site out",
    ),
    _together("diloco.exchange", "exchange fp32", "fp32"),
    _together("diloco.fragments", "exchange the model at once", 1),
    _together("diloco.overlap_steps", "wait for the exchange", 0),
    _together("cluster.datacenters", "name the cluster of one of them each", 1),
    _together("optim.name", "take over AdamW's moments", "adamw"),
    _together("train.epochs", "count steps that do not depend on a site", None),
    _together("optim.state", "take over moments in fp32 or bf16", "fp32", "bf16"),
    *map(_needs_sites, ("cluster.site_link", "cluster.site_delay_ms")),
    Rule(
        "site-is-a-datacenter",
        "mesh.site",
        lambda c: c.cluster.datacenters in (1, c.num_sites),
        "there are cluster.datacenters={c.cluster.datacenters}, and FSDP gathers and reduces every "
        "block in every step, for which links between datacenters are too slow",
        "leave mesh.site out: DiLoCo then joins the datacenters",
    ),
    *map(
        _at_outer_steps,
        ("train.steps", "train.stop_after", "train.eval_every", "checkpoint.every"),
    ),
    Rule(
        "fragments-divide-steps",
        "diloco.fragments",
        lambda c: c.diloco.steps % c.diloco.fragments == 0,
        "they are exchanged at equal distances within diloco.steps={c.diloco.steps}",
        "write diloco.fragments=1, or another divisor of {c.diloco.steps}",
    ),
    Rule(
        "exchanges-do-not-meet",
        "diloco.overlap_steps",
        lambda c: c.diloco.overlap_steps * c.diloco.fragments < c.diloco.steps,
        "the next exchange begins after diloco.steps / diloco.fragments steps",
        "write diloco.overlap_steps=0",
    ),
    _alone("adapter.method", "adapters were not trained on several", "none"),
    _alone("preference.objective", "answers were not compared on several", "none"),
    _alone("precision.linear", "float8 was not tried on several", "auto", "param"),
    _alone("precision.experts", "float8 was not tried on several", "param"),
    _alone("memory.offload", "the host updates parameters while sites would read them", "none"),
    _alone("memory.offload_optimizer", "paged moments were not tried on several", False),
    _alone("launch.elastic", "each has as many ranks as the others", False),
)
