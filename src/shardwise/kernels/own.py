"""Whether a run uses kernels of our own where torch's would do."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from shardwise.errors import ExitCode, UserError
from shardwise.kernels.hopper import has_quack, on_hopper
from shardwise.plan.float8 import is_float8
from shardwise.plan.plan import Plan

_SWIGLU_AFTER = (
    "kernels: SwiGLU after its matmuls instead of inside of them, because quack-kernels 0.6 from "
    "0.6.4 on (shardwise[quack]) is not installed here"
)


def uses_own(plan: Plan) -> bool:
    """As planned, on a GPU where Triton is there to compile them."""
    return _wants_own(plan) and _has_triton()


def kernels_note(plan: Plan) -> str | None:
    """What a run has to say of its kernels: that they are not those of the plan, or not all.

    An error where the user asked for ours by name, and where a library is there that is broken.
    """
    if not _wants_own(plan):
        return None
    if _has_triton():
        return _swiglu_note(plan)
    if plan.kernels.source == "user":
        raise UserError(
            "train.kernels=own needs Triton, which is not installed here",
            fix="install the triton that this torch was built for, or leave train.kernels out",
            code=ExitCode.ENVIRONMENT,
        )
    return "kernels: torch's instead of our own, because Triton is not installed here"


def _swiglu_note(plan: Plan) -> str | None:
    if not plan.model.swiglu or is_float8(plan.linear.value) or not on_hopper():
        return None
    if not has_quack():
        return _SWIGLU_AFTER
    try:
        # Now rather than in the first step: its releases and those of what it needs must agree.
        import_module("shardwise.kernels.swiglu_quack")
    except (AttributeError, ImportError, RuntimeError, TypeError) as error:
        raise UserError(
            "quack-kernels is installed here and does not work",
            why=f"{type(error).__name__}: {error}",
            fix="pip install --upgrade 'shardwise[quack]', or uninstall quack-kernels",
            code=ExitCode.ENVIRONMENT,
        ) from error
    return None


def _wants_own(plan: Plan) -> bool:
    return plan.kernels.value == "own" and plan.cluster.device == "cuda"


def _has_triton() -> bool:
    return find_spec("triton") is not None
