"""The pass over all sequences that computes a reference, before the first step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.loader import MicroBatch, eval_batches
from shardwise.data.sequences import SequenceSet
from shardwise.errors import ExitCode, UserError
from shardwise.model.lora import adapters_off
from shardwise.parallel.shard import reshard_all
from shardwise.training.channels import Channels
from shardwise.training.comparison import compare_losses
from shardwise.training.document_attention import masks_by_position
from shardwise.training.heartbeat import Phase
from shardwise.training.preference_losses import document_logps, exchanged_logps, has_kl_term
from shardwise.training.reference import keep_reference
from shardwise.training.session import Session, attach_training_loss
from shardwise.training.surroundings import fast_attention
from shardwise.units import format_count, format_duration

_EVERY_S = 10.0


def prepare_reference(session: Session, channels: Channels, start: int) -> bool:
    """Compute the reference where it is not known, and return whether. All ranks call this
    together, before a checkpoint of step `start` is restored over the first weights.

    The loss is attached and compared with the model's own first, because a reference of a wrong
    loss would be kept.
    """
    reference = session.reference
    if reference is None or reference.is_known:
        return False
    attach_training_loss(session, channels.say)
    compare_losses(session, channels, start)
    attention = fast_attention(session.device, reads_positions=masks_by_position(session.plan))
    began = time.monotonic()
    with attention, channels.heartbeat.during(Phase.EVALUATING):
        fill_table(session, reference.table, channels)
    session.mesh.world.decide(lambda: keep_reference(reference))
    seconds, directory = time.monotonic() - began, reference.directory
    num_documents = reference.num_documents
    channels.say(
        f"reference: log-probabilities of {num_documents} answers in {format_duration(seconds)}, "
        f"kept in {directory}"
    )
    channels.events.write(
        "reference", documents=num_documents, seconds=seconds, directory=str(directory)
    )
    return True


def fill_table(session: Session, table: Tensor, channels: Channels) -> None:
    """Compute the log-probability of every document with the weights that the model holds now,
    without adapters."""
    model, data, mesh, device = session.model, session.data, session.mesh, session.device
    splits = [split for split in (data.train, data.eval) if split is not None]
    progress = _Progress(channels, sum(map(len, splits)))
    table.zero_()
    model.eval()
    with torch.no_grad(), adapters_off(model):
        for batch in chain.from_iterable(_batches(split, session) for split in splits):
            if batch.compared is None:
                raise ValueError("this micro-batch has no documents")
            found = batch.compared.to(device)
            table[found.numbers] = document_logps(model, batch, found, device)
            if has_kl_term(session.plan.settings.preference):
                others, logps = exchanged_logps(model, batch, device)
                table[others.numbers + len(table) // 2] = logps
            progress.add(session.plan.decided.micro_batch * mesh.data_degree)
    model.train()
    reshard_all(model)
    # Each document was computed by one rank, and is 0 on the others.
    dist.all_reduce(table, group=mesh.token_group)
    _validate_finite(table)


class _Progress:
    """Counts sequences, and says now and then how long the rest takes."""

    def __init__(self, channels: Channels, num_sequences: int) -> None:
        self._channels = channels
        self._num_sequences = num_sequences
        self._done = 0
        self._began = self._said_at = time.monotonic()

    def add(self, num_sequences: int) -> None:
        """Count sequences of all ranks."""
        self._channels.heartbeat.beat()
        self._done = min(self._num_sequences, self._done + num_sequences)
        now = time.monotonic()
        if now - self._said_at < _EVERY_S:
            return
        self._said_at = now
        left = (self._num_sequences - self._done) * (now - self._began) / self._done
        self._channels.say(
            f"reference: {format_count(self._done)} of {format_count(self._num_sequences)} "
            f"sequences, eta {format_duration(left)}"
        )


def _batches(sequences: SequenceSet, session: Session) -> Iterator[MicroBatch]:
    """This rank's part of all sequences."""
    return eval_batches(
        sequences,
        num_sequences=len(sequences),
        micro_batch=session.plan.decided.micro_batch,
        rank=session.mesh.data_rank,
        num_ranks=session.mesh.data_degree,
    )


def _validate_finite(table: Tensor) -> None:
    bad = (~torch.isfinite(table)).nonzero().flatten()
    if len(bad):
        raise UserError(
            f"the reference has no finite log-probability for {len(bad)} of {len(table)} answers",
            why="the first weights give logits that are not finite, such as for answer number "
            f"{int(bad[0])} of the data",
            fix="check the weights, or write precision.param=fp32",
            code=ExitCode.DIVERGED,
        )
