"""Types and names that several sections share."""

from __future__ import annotations

from typing import Literal

Auto = Literal["auto"]
Strategy = Literal["auto", "full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
PipelineSchedule = Literal["1f1b", "interleaved_1f1b", "zero_bubble"]
DtypeName = Literal["bf16", "fp16", "fp32"]
FLOAT8_FORMATS = ("float8", "float8_rowwise")  # of `precision.linear`

# The field that a section takes when the YAML gives it a bare string (`model: llama-3.1-8b`), so
# that the smallest useful file is three lines.
FROM_STRING = {
    **{"model": "name", "adapter": "method", "data": "source", "cluster": "name"},
    "preference": "objective",
}
