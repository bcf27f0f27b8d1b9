"""The part of a model that a rank has where its blocks are divided into stages.

Names of parameters stay those of the whole model. The family's own forward runs every stage: blocks
of other stages hand on what they are given, and a stage that is not the first begins with hidden
states in place of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_ELSEWHERE = "shardwise_elsewhere"
_OTHER_NAMES = "shardwise_other_names"


class HandOn(nn.Module):
    """Stands for a module of another stage."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """What it was given first."""
        return hidden


class StageBlocks(nn.ModuleList):
    """The blocks of this rank under their places in the whole model. While a stage runs, it is as
    long as the model's list, and blocks of other stages hand on."""

    def __init__(self, blocks: nn.ModuleList, own: Collection[int]) -> None:
        super().__init__()
        self._num_blocks = len(blocks)
        for place in sorted(own):
            self.add_module(str(place), blocks[place])
        self._running: range | None = None

    def run(self, stage: range | None) -> None:
        """Let only the blocks of this stage compute, or none be missing."""
        self._running = stage

    def __iter__(self) -> Iterator[nn.Module]:
        """Over all blocks while a stage runs, otherwise over those of this rank."""
        if self._running is None:
            return self.children()
        return iter(self._in_stage(self._running))

    def __len__(self) -> int:
        return self._num_blocks if self._running is not None else len(list(self.children()))

    def __getitem__(self, place: Any) -> Any:
        """A block, or a list of some, by places in what is iterated over."""
        return list(self)[place]

    def _in_stage(self, stage: range) -> list[nn.Module]:
        return [
            self.get_submodule(str(place)) if place in stage else HandOn()
            for place in range(self._num_blocks)
        ]


def keep_stages(model: Any, stages: Sequence[range], own: Collection[int]) -> None:
    """Leave only what this rank needs for the stages with these numbers. The model must be on
    meta."""
    everything = dict(model.named_parameters(remove_duplicate=False))
    base = model.base_model
    is_tied = model.lm_head.weight is base.embed_tokens.weight
    base.layers = StageBlocks(base.layers, [place for stage in own for place in stages[stage]])
    if 0 not in own:
        base.embed_tokens = None
    if len(stages) - 1 not in own:
        base.norm = HandOn()
        model.lm_head = None
    elif is_tied:
        # Its weight keeps both names, and nothing is looked up in it here.
        base.embed_tokens = model.lm_head
    here = dict(model.named_parameters(remove_duplicate=False))
    gone = {name: param for name, param in everything.items() if name not in here}
    kept = {id(param): name for name, param in model.named_parameters()}
    others = {name: kept[id(param)] for name, param in gone.items() if id(param) in kept}
    setattr(model, _ELSEWHERE, frozenset(gone.keys() - others.keys()))
    setattr(model, _OTHER_NAMES, others)


def names_elsewhere(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that other stages have."""
    found: frozenset[str] = getattr(model, _ELSEWHERE, frozenset())
    return found


def other_names(model: nn.Module) -> dict[str, str]:
    """The names that parameters of this rank have in other stages alone, and their names here. A
    file may hold a tied table under either of them."""
    found: dict[str, str] = getattr(model, _OTHER_NAMES, {})
    return found


@contextmanager
def running(model: Any, stage: range, *, is_last: bool) -> Iterator[None]:
    """Inside, the base model computes one stage. A rank may have the last norm beside stages that
    do not end with it."""
    base = model.base_model
    norm = base.norm
    base.layers.run(stage)
    base.norm = norm if is_last else HandOn()
    try:
        yield
    finally:
        base.layers.run(None)
        base.norm = norm


def is_staged(model: nn.Module) -> bool:
    """Whether this rank has a part of the model's blocks only."""
    return any(isinstance(module, StageBlocks) for module in model.modules())
