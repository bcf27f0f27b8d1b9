"""The stages of a pipeline: which rank has which, and how hidden states go from one to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.parallel import moved_rows
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import DTYPES
from shardwise.plan.planned import Plan
from shardwise.plan.stage_cuts import stage_ranges


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages, as one of the ranks that have them sees them."""

    blocks: tuple[range, ...]
    """The blocks of each stage."""

    rank: int
    """The place of this rank among those of the pipeline."""

    ranks: int
    group: ProcessGroup
    width: int
    """Channels of a hidden state."""

    dtype: torch.dtype
    """What hidden states are sent in."""

    device: torch.device
    dividing: ProcessGroup | None = None
    """The ranks of this stage that divide its tokens; None where each has all of them."""

    @property
    def last(self) -> int:
        """The number of the stage with the head."""
        return len(self.blocks) - 1

    @property
    def own(self) -> list[int]:
        """The numbers of this rank's stages. Neighbours in number lie on neighbours in rank."""
        return list(range(self.rank, len(self.blocks), self.ranks))

    def owner(self, stage: int) -> int:
        """The rank of a stage."""
        return stage % self.ranks

    def sent_shape(self, sequences: int, tokens: int) -> tuple[int, int, int]:
        """Of the hidden states that a rank sends. Ranks that divide tokens send a part each, so
        that together they send them once."""
        parts = 1 if self.dividing is None else self.dividing.size()
        return sequences, tokens // parts, self.width

    def whole(self, received: Tensor) -> Tensor:
        """All tokens of what the ranks of a stage have received, on each of them."""
        if self.dividing is None:
            return received
        return moved_rows.all_rows(received, moved_rows.name_of(self.dividing))

    def receive(self, stage: int, sequences: int, tokens: int) -> Tensor:
        """This rank's part of the hidden states that a stage begins with."""
        shape = self.sent_shape(sequences, tokens)
        hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
        dist.recv(hidden, group=self.group, group_src=self.owner(stage - 1))
        return hidden

    def send(self, stage: int, hidden: Tensor) -> None:
        """What a stage has made, to the next one."""
        dist.send(hidden.contiguous(), group=self.group, group_dst=self.owner(stage + 1))


def stages_of(plan: Plan, mesh: Mesh) -> Stages | None:
    """The stages of a plan; None where every rank has all blocks."""
    group, decided = mesh.group("pipeline"), plan.decided
    if group is None:
        return None
    return Stages(
        blocks=tuple(stage_ranges(decided.pipeline_blocks)),
        rank=mesh.axes.place(mesh.world.rank)["pipeline"],
        ranks=decided.pipeline,
        group=group,
        width=plan.model.hidden_size,
        dtype=DTYPES[decided.output_dtype or decided.param_dtype],
        device=torch.device(plan.cluster.device),
        dividing=mesh.group("tensor") if decided.sequence_parallel else None,
    )
