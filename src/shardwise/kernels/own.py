"""Whether a run uses kernels of our own where torch's would do."""

from __future__ import annotations

from importlib.util import find_spec

from shardwise.errors import ExitCode, UserError
from shardwise.plan.plan import Plan


def uses_own(plan: Plan) -> bool:
    """As planned, on a GPU where Triton is there to compile them."""
    return _wants_own(plan) and _has_triton()


def kernels_note(plan: Plan) -> str | None:
    """What a run has to say of its kernels: that they are not those of the plan.

    An error where the user asked for ours by name.
    """
    if not _wants_own(plan) or _has_triton():
        return None
    if plan.kernels.source == "user":
        raise UserError(
            "train.kernels=own needs Triton, which is not installed here",
            fix="install the triton that this torch was built for, or leave train.kernels out",
            code=ExitCode.ENVIRONMENT,
        )
    return "kernels: torch's instead of our own, because Triton is not installed here"


def _wants_own(plan: Plan) -> bool:
    return plan.kernels.value == "own" and plan.cluster.device == "cuda"


def _has_triton() -> bool:
    return find_spec("triton") is not None
