"""Whether a run uses our own kernels where torch's would do."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from shardwise.errors import ExitCode, UserError
from shardwise.kernels.hopper import has_quack, on_hopper
from shardwise.plan.decisions import multiplies_experts
from shardwise.plan.float8_rules import is_float8
from shardwise.plan.planned import Plan

_GATED_AFTER = (
    "kernels: gated MLPs are computed after their matmuls instead of in their epilogue, because "
    "quack-kernels 0.6 from 0.6.4 on (shardwise[quack]) is not installed here"
)
# As configurations call those that an epilogue computes.
_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")


def uses_own(plan: Plan) -> bool:
    """Whether the plan wants our kernels, and this is a GPU with Triton to compile them."""
    return _wants_own(plan) and _has_triton()


def kernels_note(plan: Plan) -> str | None:
    """The note where a run's kernels are not those of the plan, or not all of them.

    It is an error where the user asked for our kernels by name, and where an installed library is
    broken.
    """
    if not _wants_own(plan):
        return None
    if _has_triton():
        return _gated_note(plan)
    if plan.choices["kernels"].source == "user":
        raise UserError(
            "train.kernels=own needs Triton, which is not installed here",
            fix="install the triton that this torch was built for, or leave train.kernels out",
            code=ExitCode.ENVIRONMENT,
        )
    if multiplies_experts(plan.decided):
        raise UserError(
            "precision.experts=float8 needs Triton, which is not installed here",
            why="its casts are kernels of our own",
            fix="install the triton that this torch was built for, or leave precision.experts out",
            code=ExitCode.ENVIRONMENT,
        )
    return "kernels: torch's instead of our own, because Triton is not installed here"


def _gated_note(plan: Plan) -> str | None:
    given = (plan.hf_config.get(name) for name in ("hidden_act", "hidden_activation"))
    is_known = plan.model.gated_mlp and any(each in _ACTIVATIONS for each in given)
    if not is_known or is_float8(plan.decided.linear) or not on_hopper():
        return None
    if not has_quack():
        return _GATED_AFTER
    try:
        # The library is imported now rather than in the first step: its release must match those of
        # what it needs.
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
    return plan.decided.kernels == "own" and plan.cluster.device == "cuda"


def _has_triton() -> bool:
    return find_spec("triton") is not None
