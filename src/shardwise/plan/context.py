"""Whether ranks can divide the sequences of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.facts.positions import changing_rope
from shardwise.plan.axis_sizes import given_axes
from shardwise.plan.refused import RefusedSetting

_WHOLE = "write mesh.context=1"
# Attentions that are called through transformers' interface.
_REGISTERED = ("flash_attention_4", "flex_attention")
# Settings that need whole sequences, and why.
REFUSED: tuple[RefusedSetting, ...] = (
    RefusedSetting(
        "preference.objective",
        lambda c: c.preference.objective != "none",
        "the tokens of an answer would lie on several ranks, and its log-probability is their sum",
    ),
    RefusedSetting(
        "data.group_lengths",
        lambda c: c.data.group_lengths,
        "each batch would have another length, and ranks divide sequences of one length",
    ),
    RefusedSetting(
        "model.attention=flash_attention_2",
        lambda c: c.model.attention == "flash_attention_2",
        "transformers calls that kernel itself, and hands no keys of other ranks to it",
    ),
)


def check_context(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any]
) -> Iterator[UserError]:
    """What forbids `mesh.context` ranks, one error for each."""
    axes, length = given_axes(config.mesh), config.data.seq_len
    ranks = axes.context
    if ranks == 1:
        return
    cuts = tokens_of_a_cut(ranks, axes.tensor, divided=config.mesh.sequence_parallel)
    if length % cuts:
        near = max(cuts, length - length % cuts)
        yield UserError(
            f"mesh.context={ranks} does not divide sequences of {length} tokens",
            why=f"each rank has two chunks of a sequence, and {length} is no multiple of {cuts}",
            fix=f"write data.seq_len={near}, or {_WHOLE.removeprefix('write ')}",
        )
    for refused in REFUSED:
        if refused.is_asked(config):
            yield UserError(
                f"mesh.context={ranks} does not go with {refused.setting}",
                why=refused.why,
                fix=f"leave {refused.path} out, or {_WHOLE}",
            )
    yield from _check_attention(ranks, model)
    if kind := changing_rope(hf_config, length):
        yield UserError(
            f"ranks cannot divide sequences of {length} tokens of this {model.model_type} model",
            why=f"its rotary positions ({kind}) depend on the longest position of a forward, "
            "which only one rank has",
            fix=_WHOLE,
        )


def tokens_of_a_cut(context: int, tensor: int, *, divided: bool) -> int:
    """What the length of a sequence must be a multiple of. Ranks of `tensor` may divide the tokens
    of a rank of `context` once more."""
    return (2 * context if context > 1 else 1) * (tensor if divided else 1)


def _check_attention(ranks: int, model: ModelSpec) -> Iterator[UserError]:
    if model.attention_dropout:
        yield UserError(
            f"mesh.context={ranks} does not go with dropout in attention",
            why="each rank would drop other pairs of tokens than one process does",
            fix="set its rate to 0, such as model.overrides.attention_dropout=0.0, or " + _WHOLE,
        )
    if not set(_REGISTERED) & set(model.attentions):
        yield UserError(
            f"ranks cannot divide the sequences of {model.model_type} models",
            why="their code in transformers computes attention itself, and shows no place where "
            "the keys of other ranks could come in",
            fix=_WHOLE,
        )
