"""Forward and backward over the stages of a pipeline, in the order of a schedule of PyTorch's.

Every rank of a pipeline reads the same micro-batches. A stage is told the number of one, and finds
tokens, positions and labels by itself, so that only hidden states and their gradients travel.
PyTorch's schedules know FSDP2 only where a stage is a module of its own; here all stages of a rank
are one FSDP2 model, whose hooks gather and free parameters as ever. Gradients are reduced in every
backward, or stay on the rank until the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from shardwise.data.loader import MicroBatch
from shardwise.internals.fsdp2_state import reduce_gradients
from shardwise.metrics.meters import peak_memory
from shardwise.metrics.stage_figures import RankFigures, StageFigures
from shardwise.model.stage_part import running
from shardwise.parallel.shard import reshard_all
from shardwise.parallel.stages import Stages
from shardwise.plan.planned import Plan
from shardwise.training.objective import BatchLoss, model_inputs
from shardwise.training.passes import Passed
from shardwise.training.stopwatch import Stopwatch


def attach_stages(model: Any, stages: Stages) -> None:
    """Give `model` the method `run_stage(number, received, labels, more)`. The last stage returns
    its loss, and all others their hidden states. The model has its loss already, and registers
    this method in its place."""
    sum_loss = model.sum_loss

    def run_stage(
        self: Any, number: int, received: Tensor, labels: Tensor, more: dict[str, Any]
    ) -> Tensor:
        ids = received if number == 0 else None
        given = more if number == 0 else {**more, "inputs_embeds": stages.whole(received)}
        is_last = number == stages.last
        with running(self, stages.blocks[number], is_last=is_last):
            if is_last:
                loss: Tensor = sum_loss(ids, labels, **given)
                return loss
            hidden: Tensor = self.base_model(input_ids=ids, **given, use_cache=False)[0]
            return hidden

    model.run_stage = MethodType(run_stage, model)


class StageModule(nn.Module):
    """One stage as PyTorch's schedules call it: with the number of a micro-batch."""

    def __init__(self, model: Any, number: int, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self.number = number
        self.is_last = is_last
        self.batches: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        self.losses: list[Tensor] = []

    def forward(self, received: Tensor, batch: Tensor) -> Tensor:
        """The stage's hidden states, or its loss as a tensor of one number."""
        ids, labels, more = self.batches[int(batch)]
        output: Tensor = self.model.run_stage(
            self.number, ids if self.number == 0 else received, labels, more
        )
        if not self.is_last:
            return output
        self.losses.append(output.detach())
        return output[None]


class TimedStage(PipelineStage):
    """A stage that tells a stopwatch when it computes."""

    watch: Stopwatch

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's, timed."""
        with self.watch.running():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's, timed."""
        with self.watch.running():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's, timed."""
        with self.watch.running():
            return super().backward_weight_one_chunk(*args, **kwargs)


class StagePasses:
    """All micro-batches of a step through the stages of this rank."""

    def __init__(
        self, model: Any, plan: Plan, stages: Stages, on_phase: Callable[[str], None]
    ) -> None:
        self.model = model
        self.plan = plan
        self.stages = stages
        self.on_phase = on_phase
        self.device = torch.device(plan.cluster.device)
        self.modules = [StageModule(model, n, n == stages.last) for n in stages.own]
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._scale: Callable[[Tensor], Tensor] = torch.sum
        self.whole, self.busy = Stopwatch(self.device), Stopwatch(self.device)
        """From the first forward of a step to this rank's last backward, and computing in it."""

    def forward_backward(
        self, batches: Sequence[MicroBatch], num_terms: Tensor, loss_scale: float
    ) -> Passed:
        """Gradients are reduced after the last backward."""
        inputs = [model_inputs(batch, self.device) for batch in batches]
        for module in self.modules:
            module.batches, module.losses = inputs, []
        self._scale = lambda loss: loss.sum() / num_terms * loss_scale
        keeps, waits = self.plan.decided.keeps_gathered, self.plan.decided.accumulates_unsharded
        self.model.set_requires_gradient_sync(not waits)
        self.model.set_requires_all_reduce(not waits)
        self.model.set_is_last_backward(not waits)
        self.model.set_reshard_after_backward(not keeps)
        sequences, tokens = inputs[0][0].shape
        schedule = self._schedule_of(len(batches), (sequences, tokens))
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self.stages.own else ()
        target = {"target": numbers} if self.stages.last in self.stages.own else {}
        self.on_phase("forward")
        with self.whole.running():
            schedule.step(*first, batch=numbers, **target)
        self.on_phase("backward")
        self.model.set_reshard_after_backward(True)
        if waits:
            reduce_gradients(self.model)
        else:
            reshard_all(self.model)
        losses = [loss for module in self.modules for loss in module.losses]
        zero = torch.zeros((), device=self.device)
        for module in self.modules:
            module.batches, module.losses = [], []
        return Passed(torch.stack(losses).sum() if losses else zero)

    def figures(self) -> StageFigures:
        """How the ranks of a pipeline have spent their time since the last call, and what they
        hold. All of them call this together.

        A rank that has done its part waits for the last backward of any rank.
        """
        stages, held = self.stages, peak_memory(self.device)
        longest = torch.tensor(self.whole.take_s(), device=self.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=stages.group)
        # Bytes are exact in 64 bits only.
        own = [sum(self.busy.take_s()), held.allocated, held.reserved]
        table = torch.empty(stages.ranks * len(own), dtype=torch.float64, device=self.device)
        dist.all_gather_into_tensor(table, table.new_tensor(own), group=stages.group)
        rows = table.view(stages.ranks, len(own)).tolist()
        return StageFigures(
            bubble=1 - sum(busy for busy, _, _ in rows) / stages.ranks / longest.sum().item(),
            ranks=[
                RankFigures(rank, busy / len(longest), int(allocated), int(reserved))
                for rank, (busy, allocated, reserved) in enumerate(rows)
            ],
        )

    def _schedule_of(self, num: int, shape: tuple[int, int]) -> Any:
        """The schedule for so many micro-batches of one shape, which is made once."""
        key = (num, *shape)
        if key not in self._schedules:
            stages = [self._stage(module, shape) for module in self.modules]
            self._schedules[key] = self._make_schedule(num, stages)
        return self._schedules[key]

    def _make_schedule(self, num: int, stages: list[TimedStage]) -> Any:
        common: dict[str, Any] = {
            "n_microbatches": num,
            "loss_fn": lambda loss, _: self._scale(loss),
            "scale_grads": False,
        }
        name = self.plan.decided.pipeline_schedule
        if name == "1f1b":
            return Schedule1F1B(stages[0], **common)
        if name == "interleaved_1f1b":
            return ScheduleInterleaved1F1B([*stages], **common)
        return ScheduleInterleavedZeroBubble([*stages], **common)

    def _stage(self, module: StageModule, shape: tuple[int, int]) -> TimedStage:
        """Shapes are given, so that PyTorch need not find them by a forward that FSDP2 would
        see."""
        stages = self.stages

        def hidden() -> Tensor:
            sent = stages.sent_shape(*shape)
            given = torch.empty(sent, dtype=stages.dtype, device="meta")
            return given.requires_grad_()

        number = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        stage = TimedStage(
            module,
            module.number,
            len(stages.blocks),
            self.device,
            input_args=(number if module.number == 0 else hidden(),),
            output_args=(loss if module.is_last else hidden(),),
            group=stages.group,
        )
        stage.watch = self.busy
        return stage


class StagedNextToken:
    """The cross-entropy of every token that counts, by forwards over all stages."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def prepare(self, model: Any, batches: Sequence[MicroBatch], device: torch.device) -> None:
        """Tokens share nothing."""

    def num_terms(self, batch: MicroBatch) -> int:
        """The labels that count."""
        return batch.num_valid_tokens

    def loss(self, model: Any, batch: MicroBatch, device: torch.device) -> BatchLoss:
        """The loss on the rank of the last stage, and 0 on all others. It has no gradient."""
        stages, (ids, labels, more) = self.stages, model_inputs(batch, device)
        hidden, total = ids, torch.zeros((), device=device)
        for number in range(len(stages.blocks)):
            if number not in stages.own:
                continue
            if number > 0:
                hidden = stages.receive(number, *ids.shape)
            with torch.no_grad():
                hidden = model.run_stage(number, hidden, labels, more)
            if number == stages.last:
                total = hidden
            else:
                stages.send(number, hidden)
        return BatchLoss(total)
