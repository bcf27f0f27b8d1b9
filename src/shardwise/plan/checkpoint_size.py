"""How large the checkpoints of a plan are."""

from __future__ import annotations

from shardwise.plan.adam import adam_bytes
from shardwise.plan.memory import PARAM_BYTES
from shardwise.plan.plan import Plan


def checkpoint_bytes(plan: Plan) -> int:
    """The tensors of one checkpoint: trained parameters in fp32 and Adam's two moments, each once.

    Persistent buffers and JSON are left out: a few megabytes at most.
    """
    return int(plan.model.trained_params * (PARAM_BYTES + adam_bytes(plan.decided)))
