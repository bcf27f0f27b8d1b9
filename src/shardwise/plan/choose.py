"""Fill every `auto`: take the fastest of the decision tree's candidates that fits, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSource, ModelSpec
from shardwise.facts.rates import Rates
from shardwise.plan.axis_rules import validate_axes
from shardwise.plan.basis import choose_basis, offloaded_bytes
from shardwise.plan.candidates import leanest
from shardwise.plan.caveats import caveats, expanded
from shardwise.plan.decisions import Choice, Decisions
from shardwise.plan.gathers import choose_gathers
from shardwise.plan.inputs import choose_packing, choose_tokenizer, choose_weights
from shardwise.plan.options import Search
from shardwise.plan.outer_exchange import choose_site, look_out, outer_warnings, slowed
from shardwise.plan.planned import Plan
from shardwise.plan.reasons import choices_of, with_host_memory
from shardwise.plan.remedies import advise
from shardwise.plan.search import Option, alternatives, fits
from shardwise.plan.searched import search_options
from shardwise.plan.stage_memory import estimate_largest
from shardwise.units import format_bytes

# Host memory of a server with eight GPUs. Offload that needs more is not offered.
USUAL_HOST_BYTES = 2 * 2**40


def choose_plan(
    config: RunConfig,
    model: ModelSpec,
    cluster: ClusterSpec,
    source: ModelSource,
    rates: Rates | None = None,
) -> Plan:
    """Decide everything that the user left open, and give each decision its reason.

    Without `rates` no speed is known, and the decision tree's first answer that fits is taken.
    """
    searched = search_options(config, model, source.hf_config, cluster, rates)
    basis, options, best = searched.basis, searched.options, searched.best
    _validate_fits(best, Search(config, model, source.hf_config, cluster))
    weights = choose_weights(config, source)
    offload = with_host_memory(basis["offload_activations"], best, model)
    own_kernels = best.decided.own_kernels
    outlook = look_out(model, best.decided, config, best.forecast)
    step_s = None if best.forecast is None else best.forecast.step_s
    return Plan(
        config=config,
        model=model,
        hf_config=source.hf_config,
        model_dir=None if source.directory is None else str(source.directory),
        weights_dir=None if weights.value == "random" else weights.value,
        cluster=cluster,
        memory=best.memory,
        forecast=slowed(best.forecast, outlook, config.diloco.steps),
        outlook=outlook,
        alternatives=alternatives(best, options, searched.appraiser),
        warnings=[
            *caveats(best, config, model, cluster),
            *_expanded(config, source, weights, best.decided.base),
            *outer_warnings(config, outlook, step_s, cluster, model),
        ],
        choices={
            **basis,
            **choose_gathers(config, model, best.candidate.mesh, own_kernels=own_kernels),
            **choices_of(best, options, config, model, cluster),
            "site": choose_site(config, outlook, step_s),
            "offload_activations": offload,
            "weights": weights,
            "tokenizer": choose_tokenizer(config),
            "packing": choose_packing(config),
        },
    )


def _expanded(config: RunConfig, source: ModelSource, weights: Choice[str], base: str) -> list[str]:
    reads_its_own = weights.value != "random" and config.model.weights_from is None
    return expanded(config, source.hf_config, base) if reads_its_own else []


def _smallest(search: Search) -> Iterator[Decisions]:
    """Of every mesh the variants that take least memory: if none of them fits, no other does."""
    config, model, cluster = search.config, search.model, search.cluster
    basis = choose_basis(config, model, cluster)
    for candidate in search.all_candidates():
        yield from leanest(config, model, cluster, basis, candidate)


def _validate_fits(best: Option, search: Search) -> None:
    """Raise for a plan that is larger than the device. A tight plan only gets a warning.

    This holds on CPUs too: ranks there never took less than the estimate.
    """
    config, model, cluster = search.config, search.model, search.cluster
    if best.memory.total <= cluster.memory_bytes:
        return

    def fits_with(changed: RunConfig, place: ClusterSpec) -> bool:
        if changed.memory.offload == "cpu" and offloaded_bytes(model, place) > USUAL_HOST_BYTES:
            return False
        validate_axes(changed, model, search.hf_config, place.world_size)
        return any(
            fits(estimate_largest(model, place, decided), place)
            for decided in _smallest(replace(search, config=changed, cluster=place))
        )

    raise UserError(
        f"{model.name} does not fit on {cluster.name}",
        why=f"{format_bytes(best.memory.total)} are needed on a rank that has "
        f"{format_bytes(cluster.memory_bytes)}, {format_bytes(best.memory.states)} of them for "
        f"parameters, gradients and Adam, even with {best.label}",
        fix=advise(config, cluster, fits_with),
        code=ExitCode.DOES_NOT_FIT,
    )
