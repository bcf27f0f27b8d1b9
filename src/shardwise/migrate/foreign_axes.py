"""Sizes of axes inside a replica: tensor, context and expert parallelism of other tools."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.foreign_values import whole
from shardwise.migrate.key_rules import KeyRule, each, otherwise, unless
from shardwise.migrate.line import BadValueError, Outcome, always, changed, mapped
from shardwise.migrate.source import Source


def _axis(path: str, why: str, *, is_same: bool = True) -> KeyRule:
    def translate(value: Any, _: Source) -> Outcome:
        size = whole(value)
        if size < 0:
            raise BadValueError(f"there are no {size} ranks")
        if size < 2:
            return always("the file has no such axis; the plan takes one where it gains")
        return mapped({path: size}, why) if is_same else changed({path: size}, why)

    return KeyRule(translate)


TENSOR = _axis("mesh.tensor", "ranks that compute each matmul together")
CONTEXT = _axis("mesh.context", "ranks that divide each sequence")
HEADS = _axis(
    "mesh.context",
    "ranks divide each sequence, and gather keys and values; heads are not dealt out",
    is_same=False,
)
EXPERT = _axis("mesh.expert", "parts that the experts of a block are dealt out in")
PARTS = otherwise("what each rank keeps of a layer is found from the model")


def pipeline(keys: str, prefix: str = "") -> dict[str, KeyRule]:
    """The rules of pipeline parallelism. Its ranks need as many micro-batches in a step, so it is
    left to the user."""
    why = "those ranks shard instead; stages are asked for with mesh.pipeline"
    return each(unless(why, 1), keys, prefix)
