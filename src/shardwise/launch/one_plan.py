"""One plan for all ranks: the first rank makes it and sends it, and the others insert their paths.

Every node still reports what it was given, so nodes that were not started alike are found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace

from shardwise.config.schema import RunConfig
from shardwise.facts.models import read_model_config
from shardwise.launch.identity import with_paths_of
from shardwise.launch.meeting import meet
from shardwise.launch.peers import Peers
from shardwise.launch.preflight import validate_run
from shardwise.plan.inputs import choose_tokenizer, choose_weights
from shardwise.plan.planned import Plan

Agree = Callable[[Peers], Plan]
"""How a rank gets its plan. An error is raised on all ranks."""

_PLAN = "plan"


def same_plan(plan: Plan) -> Agree:
    """The plan for ranks that have all read it from one file."""
    return lambda peers: meet(peers, lambda: plan)


def plan_of_first_rank(config: RunConfig, plan: Plan | None) -> Agree:
    """The plan for ranks that a launcher has started, each with a configuration of its own.

    `plan` is the first rank's; it is None on all others, which make none.
    """

    def agree(peers: Peers) -> Plan:
        if plan is not None:
            peers.send(_PLAN, json.dumps(plan.to_dict()))
        # The first rank also reads it from there, so all ranks hold what was sent, to the last bit.
        sent = Plan.from_dict(json.loads(peers.receive(_PLAN)))
        look = (lambda: sent) if plan is not None else (lambda: _look_around(sent, config))
        return with_paths_of(meet(peers, look), sent)

    return agree


def _look_around(sent: Plan, config: RunConfig) -> Plan:
    """The first rank's decisions with this node's configuration and files, checked on this node."""
    own = with_own_inputs(sent, config)
    if os.environ["LOCAL_RANK"] == "0":
        validate_run(own)
    return own


def with_own_inputs(plan: Plan, config: RunConfig) -> Plan:
    """The decisions of `plan` with this node's configuration, and the files that it names."""
    source = read_model_config(config.model)
    weights = choose_weights(config, source)
    inputs = {"weights": weights, "tokenizer": choose_tokenizer(config)}
    return replace(
        plan,
        config=config,
        hf_config=source.hf_config,
        model_dir=None if source.directory is None else str(source.directory),
        weights_dir=None if weights.value == "random" else weights.value,
        choices={**plan.choices, **inputs},
    )
