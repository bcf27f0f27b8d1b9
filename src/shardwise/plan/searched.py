"""All options of one model on one cluster, and the best of them: what a plan is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.facts.prices import price_of
from shardwise.facts.rates import Rates
from shardwise.plan.axis_rules import validate_axes
from shardwise.plan.basis import choose_basis
from shardwise.plan.decisions import Choices
from shardwise.plan.known_memory import KnownMemory
from shardwise.plan.options import Search
from shardwise.plan.outer_exchange import look_out, slowed
from shardwise.plan.search import Appraiser, Option, best_of, fits


@dataclass(frozen=True, slots=True)
class Searched:
    """What was looked at, and what came out best."""

    basis: Choices
    """The decisions that all options share."""

    appraiser: Appraiser
    options: list[Option]
    best: Option

    @property
    def fits(self) -> bool:
        """Whether the best option leaves the headroom that a steady run needs."""
        return fits(self.best.memory, self.appraiser.cluster)


def over_sites(option: Option, config: RunConfig, model: ModelSpec) -> Option:
    """The same, with its part of the waiting for other sites."""
    outlook = look_out(model, option.decided, config, option.forecast)
    return replace(option, forecast=slowed(option.forecast, outlook, config.diloco.steps))


def search_options(
    config: RunConfig,
    model: ModelSpec,
    hf_config: Mapping[str, Any],
    cluster: ClusterSpec,
    rates: Rates | None,
    known: KnownMemory | None = None,
) -> Searched:
    """Look at every option that the configuration leaves open. The best one may not fit.

    `known` is shared by searches of as many devices: their memory does not depend on the kind.
    """
    validate_axes(config, model, hf_config, cluster.world_size)
    basis = choose_basis(config, model, cluster)
    if rates is not None and basis["param_dtype"].value not in rates.matmul_flops:
        # The device emulates this format, at a speed that nobody has measured.
        rates = None
    price = price_of(cluster, config.cluster, offload=basis["offload"].value)
    appraiser = Appraiser(model, cluster, rates, price, known or KnownMemory(model, cluster))
    options = Search(config, model, hf_config, cluster).find_options(basis, appraiser)
    best = appraiser.with_forecast(best_of(options, cluster))
    return Searched(basis, appraiser, options, best)
