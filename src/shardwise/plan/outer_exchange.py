"""What sites exchange in an outer step: its bytes, its seconds, and how many steps make it cheap.

Each rank exchanges what its own shard has learnt with the ranks of the other sites that hold the
same shard. Inside a site nothing is sent for it, unless there are replicas: then each exchanges a
part, and they share the result over their own links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.config.schema import DilocoConfig, RunConfig
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import TCP_SHARE
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Choice, Decisions
from shardwise.plan.exchange_bytes import exchange_bytes
from shardwise.plan.planned import Forecast, Outlook
from shardwise.plan.rank_share import trained_share
from shardwise.units import format_duration

# Below a few Gbit/s between nodes even a reduction of gradients alone takes most of a step.
SLOW_GBITS = 3.0


@dataclass(frozen=True, slots=True)
class SiteLink:
    """What joins a site with the others."""

    bytes_per_s: float
    """In one direction, for all ranks of a site together."""

    delay_s: float

    @classmethod
    def of(cls, config: RunConfig) -> SiteLink | None:
        """The link that the user named; None without one."""
        gbits, delay = config.cluster.site_link, config.cluster.site_delay_ms
        return None if gbits is None else cls(TCP_SHARE * gbits * 1e9 / 8, delay / 1000)


def look_out(
    model: ModelSpec, decided: Decisions, config: RunConfig, forecast: Forecast | None
) -> Outlook | None:
    """The exchanges that are expected; None where there is one site."""
    sites = config.num_sites
    if sites == 1:
        return None
    diloco, link, is_ring = config.diloco, SiteLink.of(config), decided.jobs == 1
    numbers = math.ceil(trained_share(model, decided) / decided.replicate)
    num_bytes = exchange_bytes(numbers, sites, diloco.exchange, is_ring=is_ring)
    if link is None:
        return Outlook(bytes_per_rank=num_bytes)
    # A ring sums up and passes on. Everyone sends the rest to everyone.
    hops = 2 * (sites - 1) if is_ring and diloco.exchange == "fp32" else sites - 1
    hops *= diloco.fragments
    of_site = num_bytes * decided.data_ranks // decided.site
    seconds = of_site / link.bytes_per_s + hops * link.delay_s
    if forecast is None:
        return Outlook(bytes_per_rank=num_bytes, seconds=seconds)
    hidden = diloco.fragments * diloco.overlap_steps * forecast.step_s
    waited = max(0.0, seconds - hidden)
    trained = diloco.steps * forecast.step_s
    return Outlook(
        bytes_per_rank=num_bytes,
        seconds=seconds,
        waited_s=waited,
        share=waited / (waited + trained),
        least_steps=_least_steps(waited, forecast.step_s, diloco),
    )


def _least_steps(waited: float, step_s: float, diloco: DilocoConfig) -> int | None:
    """The fewest steps that keep the share; None where no number does."""
    if diloco.max_share == 0:
        return None if waited else diloco.fragments
    steps = waited * (1 - diloco.max_share) / diloco.max_share / step_s
    least = max(math.ceil(steps), diloco.overlap_steps * diloco.fragments + 1)
    return -(-least // diloco.fragments) * diloco.fragments


def slowed(forecast: Forecast | None, outlook: Outlook | None, steps: int) -> Forecast | None:
    """The forecast of a step, with its part of the waiting for other sites."""
    if forecast is None or outlook is None or outlook.waited_s is None:
        return forecast
    extra, rest = outlook.waited_s / steps, 1 - (outlook.share or 0.0)
    usd = forecast.usd_per_billion_tokens
    return replace(
        forecast,
        step_s=forecast.step_s + extra,
        terms={**forecast.terms, "between_sites": extra},
        tokens_per_s=forecast.tokens_per_s * rest,
        mfu=None if forecast.mfu is None else forecast.mfu * rest,
        hfu=None if forecast.hfu is None else forecast.hfu * rest,
        usd_per_billion_tokens=None if usd is None else usd / rest,
        hours_per_billion_tokens=forecast.hours_per_billion_tokens / rest,
    )


def choose_site(config: RunConfig, outlook: Outlook | None, step_s: float | None) -> Choice[int]:
    """How many sites train apart, and why."""
    sites = config.num_sites
    if outlook is None:
        return Choice(1, "all ranks are in one place, and make every step together", "rule")
    why = _every(config)
    if outlook.seconds is not None and step_s is not None:
        why = (
            f"a reduction in every step would take {outlook.seconds:.1f} s between sites, beside "
            f"{step_s:.1f} s of work; {why}"
        )
    if config.diloco.meet is not None:
        why = f"this job is site {config.diloco.site} of {sites}, which meet at "
        return Choice(1, f"{why}{config.diloco.meet}; {_every(config)}", "user")
    return Choice(sites, why, "rule" if config.mesh.site == "auto" else "user")


def _every(config: RunConfig) -> str:
    return f"DiLoCo: an outer step joins the sites every {config.diloco.steps} steps"


def outer_warnings(
    config: RunConfig,
    outlook: Outlook | None,
    step_s: float | None,
    cluster: ClusterSpec,
    model: ModelSpec,
) -> list[str]:
    """Warnings about outer steps that have not run on a device, take too long, or are not
    needed."""
    if outlook is None:
        return _of_network(cluster, model)
    untried = (
        [] if cluster.device == "cpu" else ["several sites have run on CPU ranks alone so far"]
    )
    return [*untried, *_of_links(config.diloco, outlook, step_s)]


def _of_network(cluster: ClusterSpec, model: ModelSpec) -> list[str]:
    """Nodes that work together in every step over a network that is no more than a link between
    sites."""
    rate = 8e-9 * cluster.fabric.between.bytes_per_s
    if cluster.num_nodes == 1 or rate >= SLOW_GBITS:
        return []
    nodes = cluster.num_nodes
    num_bytes = exchange_bytes(model.trained_params, nodes, "fp32", is_ring=True)
    exchange = format_duration(num_bytes / (TCP_SHARE * cluster.fabric.between.bytes_per_s))
    return [
        f"the network between nodes carries {rate:.2g} Gbit/s, and every step waits for it: with "
        f"cluster.datacenters={nodes} cluster.site_link={rate:.2g} each node is a site, and DiLoCo "
        f"joins them in {exchange} now and then"
    ]


def _of_links(diloco: DilocoConfig, outlook: Outlook, step_s: float | None) -> list[str]:
    if outlook.seconds is None:
        return [
            "cluster.site_link is not given, so the plan cannot tell how long sites wait for each "
            "other: write the Gbit/s of the link, such as cluster.site_link=0.1"
        ]
    if outlook.share is None or step_s is None:
        return []
    if outlook.share > diloco.max_share:
        least = outlook.least_steps
        enough = (
            "" if least is None else f"; diloco.steps={least} would keep {diloco.max_share:.0%}"
        )
        return [f"sites wait for exchanges {outlook.share:.0%} of the time{enough}"]
    if outlook.seconds <= diloco.max_share * step_s:
        return [
            f"the link between sites would carry a reduction in every step, at "
            f"{outlook.seconds / step_s:.0%} of its time: with cluster.datacenters=1 mesh.site=1 "
            "all ranks make every step together, and no outer step is needed"
        ]
    return []
