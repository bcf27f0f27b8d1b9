"""How large the checkpoints of a plan are."""

from __future__ import annotations

from shardwise.plan.adam import state_bytes
from shardwise.plan.memory import PARAM_BYTES
from shardwise.plan.planned import Plan


def checkpoint_bytes(plan: Plan) -> int:
    """The tensors of one checkpoint: trained parameters in fp32 and the optimizer's state, each
    once.

    Persistent buffers and JSON are left out: a few megabytes at most.
    """
    return int(plan.model.trained_params * (PARAM_BYTES + state_bytes(plan.model, plan.decided)))
