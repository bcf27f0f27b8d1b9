"""Whether a model's blocks can be divided over ranks that compute them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.plan.axis_sizes import given_axes
from shardwise.plan.decisions import DTYPE_BYTES
from shardwise.plan.refused import RefusedSetting

# Those that were compared with one process. Any other may divide a head, or count a token twice.
FAMILIES = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("granite", "smollm3", "phi", "starcoder2", "cohere", "cohere2", "exaone4", "seed_oss"),
    *("arcee", "apertus", "mixtral", "qwen3_moe", "glm4_moe", "dots1", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3"),
)
# Settings that were not shown to give the same numbers, and why they may not.
REFUSED: tuple[RefusedSetting, ...] = (
    RefusedSetting(
        "adapter.base",
        lambda c: c.adapter.base not in ("auto", "param"),
        "packed weights are not divided",
    ),
    RefusedSetting(
        "adapter.dora", lambda c: c.adapter.dora, "a rank would need the lengths of whole rows"
    ),
    RefusedSetting(
        "adapter.dropout",
        lambda c: c.adapter.dropout > 0,
        "each rank would drop other inputs of one adapter",
    ),
    RefusedSetting(
        "precision.linear",
        lambda c: c.precision.linear not in ("auto", "param"),
        "a scale of float8 would be that of a rank's part",
    ),
    RefusedSetting(
        "precision.experts",
        lambda c: c.precision.experts != "param",
        "a scale of float8 would be that of a rank's part",
    ),
    RefusedSetting(
        "optim.state",
        lambda c: c.optim.state == "int8",
        "a rank's part may end inside a block of numbers with one scale",
    ),
    RefusedSetting(
        "preference.objective",
        lambda c: c.preference.objective != "none",
        "losses of whole answers were not compared with one process",
    ),
)


def check_tensor(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any]
) -> Iterator[UserError]:
    """What forbids `mesh.tensor` ranks, one error for each."""
    size = given_axes(config.mesh).tensor
    if size == 1:
        return
    if model.model_type not in FAMILIES or config.model.trust_remote_code:
        yield _refusal(
            size,
            f"how to divide {model.model_type} models is not known; it is known for "
            f"{', '.join(FAMILIES)}",
            "write mesh.tensor=1",
        )
        return
    widths = divided_widths(model, hf_config)
    for name, width in widths.items():
        if width % size:
            largest = max(n for n in range(1, size) if gcd(n, *widths.values()) == n)
            fix = f"write mesh.tensor={largest}"
            yield _refusal(size, f"each rank takes a part of the model's {width} {name}", fix)
            return
    own = widths["channels of an MLP"] // size
    if model.num_experts > 1 and own % (even := 16 // DTYPE_BYTES.get(config.precision.param, 2)):
        why = (
            f"{own} channels of an expert on a rank are not whole 16 bytes, in multiples of {even}"
        )
        yield _refusal(size, f"{why}, as grouped matmuls want", "write mesh.tensor=1")
    yield from _refused_settings(config, model)


def divided_widths(model: ModelSpec, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers that must divide over the ranks, by what they count."""
    kv_heads = hf_config.get("num_key_value_heads") or model.num_kv_heads
    widths = {"heads": model.num_heads, "heads of keys and values": kv_heads}
    own = "moe_intermediate_size" if model.num_experts > 1 else "intermediate_size"
    width = hf_config.get(own) or hf_config.get("intermediate_size") or model.ffn_size
    return {**widths, "channels of an MLP": width}


def _refused_settings(config: RunConfig, model: ModelSpec) -> Iterator[UserError]:
    """What of the run's settings forbids it."""
    axes, length = given_axes(config.mesh), config.data.seq_len
    size, ranks = axes.tensor, axes.neighbours
    if config.mesh.sequence_parallel and length % ranks:
        yield _refusal(
            size,
            f"{ranks} ranks divide the tokens of a sequence, and {length} do not divide",
            f"write data.seq_len={-(-length // ranks) * ranks}, or mesh.sequence_parallel=false",
        )
    for refused in REFUSED:
        if refused.is_asked(config):
            yield _refusal(size, refused.why, f"leave {refused.path} out, or write mesh.tensor=1")
    if config.adapter.base == "auto" and model.adapter is not None and model.adapter.packed_params:
        yield _refusal(size, "packed weights are not divided", "write adapter.base=param")
    if model.attention_dropout:
        yield _refusal(
            size,
            "the model drops attention weights, and each rank would drop others",
            "write model.overrides.attention_dropout=0, or mesh.tensor=1",
        )


def _refusal(size: int, why: str, fix: str) -> UserError:
    return UserError(f"mesh.tensor={size} does not suit this run", why=why, fix=fix)
