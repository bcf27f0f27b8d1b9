"""A configuration of another tool, or a training script, as checks look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.schema_text import TOP_LEVEL, field_types, section_classes
from shardwise.config.trees import read_file
from shardwise.errors import UserError
from shardwise.migrate.kinds import recognise
from shardwise.migrate.script import NamedCall, named_calls
from shardwise.migrate.source import Source

FSDP1_CLASS = "torch.distributed.fsdp.FullyShardedDataParallel"
FSDP2_CALL = "torch.distributed.fsdp.fully_shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSetup:
    """Keys of a file by their last names, or the calls of a script."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[NamedCall, ...] = ()

    def said(self, *names: str) -> Iterator[tuple[str, str]]:
        """(key, value in lower case) of the first of these keys that is set."""
        for name in names:
            if self.keys.get(name) is not None:
                yield name, str(self.keys[name]).lower()
                return

    def called(self, *ends: str) -> list[NamedCall]:
        """Calls whose full name ends with one of these, such as `fsdp.fully_shard`."""
        return [call for call in self.calls if call.name.endswith(ends)]


def read_setup(file: Path) -> ForeignSetup | None:
    """What another tool's file or a script says; None where it is neither."""
    if file.suffix.lower() == ".py":
        return ForeignSetup(calls=tuple(named_calls(file)))
    try:
        document = read_file(file)
        ours = {*section_classes(), *field_types()[TOP_LEVEL]}
        if document.faults or not document.tree or set(document.tree) <= ours:
            return None
        recognise(document.tree, file)
    except UserError:
        # Whoever loads it as ours says what is wrong with it.
        return None
    return ForeignSetup(
        keys={leaf.path[-1]: leaf.value for leaf in Source(document.tree, file).leaves()}
    )
