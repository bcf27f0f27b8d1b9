"""Number formats: names of the config as torch dtypes and an FSDP2 policy."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.plan.planned import Plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def unit_policy(plan: Plan) -> MixedPrecisionPolicy:
    """Gathered parameters in `param`, gradients reduced in `reduce`; masters stay fp32."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.decided.param_dtype],
        reduce_dtype=DTYPES[plan.decided.reduce_dtype],
        cast_forward_inputs=plan.settings.precision.cast_forward_inputs,
    )


def root_policy(plan: Plan) -> MixedPrecisionPolicy:
    """The policy of every unit with an output dtype: only the model's output is cast to it."""
    unit = unit_policy(plan)
    output = plan.decided.output_dtype
    return MixedPrecisionPolicy(
        param_dtype=unit.param_dtype,
        reduce_dtype=unit.reduce_dtype,
        output_dtype=None if output is None else DTYPES[output],
        cast_forward_inputs=unit.cast_forward_inputs,
    )
